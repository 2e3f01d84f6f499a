"""Shares of updates that rounding makes vanish: known forecasts, and counts worked out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from samestep.precision.lost_updates import Counts, count, forecast_lost, sample
from samestep.rounding import stochastic_to_bfloat16, stream

BF16, FP32 = torch.bfloat16, torch.float32


def share(weights: torch.Tensor, lr: float) -> float:
    lost, total = forecast_lost(weights, lr)
    assert total == 2 * weights.numel()
    return lost / total


@pytest.mark.parametrize(("lr", "lost"), [(1e-3, 0.0), (1e-4, 0.11), (1e-5, 0.84), (1e-6, 0.98)])
def test_known_shares_of_normal_weights(lr: float, lost: float) -> None:
    weights = (torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)) * 0.02).to(BF16)
    assert share(weights, lr) == pytest.approx(lost, abs=0.01)
    assert share(weights.float(), lr) < 0.001


def test_known_share_of_ones() -> None:
    """Above 1 the numbers are 2**-7 apart, below 2**-8: half of the way down is 2**-9, about 0.00195."""
    ones = torch.ones(1000, dtype=BF16)
    assert share(ones, 1e-3) == 1.0
    assert share(ones, 2.1e-3) == 0.5
    assert share(ones, 4e-3) == 0.0
    assert share(ones.float(), 1e-3) == 0.0
    assert share(torch.zeros(10, dtype=BF16), 1e-30) == 0.0
    assert share(ones, 0.0) == 1.0


def test_a_forecast_of_nothing() -> None:
    assert forecast_lost(torch.empty(0, dtype=BF16), 1e-3) == (0, 0)


@pytest.mark.parametrize("numel", [1, 16_384, 16_385, 200_001, 400_000])
def test_samples_do_not_depend_on_the_cut(numel: int) -> None:
    """However many ranks share a parameter, together they sample what one rank alone does."""
    values = torch.arange(numel)
    whole = sample(values, start=0, numel=numel)
    assert whole.numel() <= 16_384
    assert whole.numel() >= min(numel, 16_384 // 2)
    for cuts in ([numel // 2], [1, 2, 3, numel // 3, numel - 1], [0, numel]):
        bounds = [0, *sorted(max(0, min(cut, numel)) for cut in cuts), numel]
        parts = [sample(values[low:high], start=low, numel=numel) for low, high in itertools.pairwise(bounds)]
        assert torch.equal(torch.cat(parts), whole)


def test_a_sample_is_a_live_view() -> None:
    values = torch.zeros(200_000)
    sampled = sample(values, start=0, numel=200_000)
    values.fill_(3.0)
    assert bool((sampled == 3.0).all())


def counted(before: list[float], after: list[float], wanted: list[float], dtype: torch.dtype, **others: Any) -> Counts:
    held = others.pop("held", FP32)
    due = torch.tensor(wanted, dtype=torch.float64)
    return count(due, torch.tensor(before, dtype=held), torch.tensor(after, dtype=held), dtype, **others)


def numbers(counts: Counts) -> tuple[float, float, float]:
    return counts.wanted, counts.lost, counts.unseen


def test_counts_by_hand() -> None:
    """fp32 masters: the first is lost, the second unseen (1 + 1e-3 is 1 in bf16), the third seen, the fourth was not
    to move and did not."""
    case = ([1.0] * 4, [1.0, 1.001, 1.01, 1.0], [1.0, 1.0, 1.0, 0.0])
    assert numbers(counted(*case, BF16)) == (3, 1, 1)
    assert numbers(counted(*case, FP32)) == (3, 1, 0)


def test_unseen_needs_a_crossing_not_a_distance() -> None:
    """Half way between two bf16 numbers the smallest step is seen, near a bf16 number a larger one is not."""
    edge = 1 + 2**-8
    counts = counted([edge - 1e-6, 1.0], [edge + 1e-6, 1.001], [1.0, 1.0], BF16)
    assert numbers(counts) == (2, 0, 1)


def test_float16_sees_eight_times_smaller_steps() -> None:
    case = ([1.0, 1.0], [1.001, 1.0002], [1.0, 1.0])
    assert numbers(counted(*case, torch.float16)) == (2, 0, 1)
    assert numbers(counted(*case, BF16)) == (2, 0, 2)


def test_bf16_masters_are_their_own_copy() -> None:
    counts = counted([1.0, 1.0, 1.0], [1.0, 1.0078125, 1.0], [1.0, 1.0, 1.0], BF16, held=BF16)
    assert numbers(counts) == (3, 2, 0)


def test_what_the_compensation_keeps_is_not_lost() -> None:
    """Nothing is lost where weight or compensation moved; but the forward pass sees the weight alone."""
    carried = (torch.zeros(3, dtype=BF16), torch.tensor([-1e-3, 0.0, 0.0], dtype=BF16))
    counts = counted([1.0] * 3, [1.0, 1.0078125, 1.0], [1.0] * 3, BF16, held=BF16, compensation=carried)
    assert numbers(counts) == (3, 1, 1)


def test_lengths_by_hand() -> None:
    """Wanted (3, 4) * 2**-7 from ones: the first arrives whole, of the second nothing. 9 of 25 parts of the squared
    length arrive. Of the master's update the bf16 copy shows what bf16 holds."""
    step = 2**-7
    counts = counted([1.0, 1.0], [1 + 3 * step, 1.0], [3 * step, 4 * step], BF16, held=BF16)
    assert counts.length("arrived") == counts.length("seen") == pytest.approx(16 / 25)
    half = counted([1.0, 1.0], [1 + step, 1 + step / 4], [step, step / 4], BF16)
    assert half.length("arrived") == 0.0
    assert half.length("seen") == pytest.approx((1 / 16) / (17 / 16))


def test_a_length_below_zero_is_an_update_that_rounding_made_longer() -> None:
    step = 2**-7
    assert counted([1.0], [1 + step], [step / 2], BF16, held=BF16).length("arrived") == -1.0


def test_stochastic_rounding_loses_no_length_on_average() -> None:
    """Updates of a hundredth of bf16's spacing: one in a hundred weights moves, by a hundred times as much."""
    before, step = torch.ones(1_000_000, dtype=BF16), 2**-7 / 100
    wanted = torch.full((1_000_000,), step)
    after = stochastic_to_bfloat16(before.float() + wanted, stream(0, 1, "w", "weight"), start=0)
    counts = count(wanted.double(), before, after, BF16)
    assert counts.share("lost") == pytest.approx(0.99, abs=1e-3)
    # One standard deviation of the mean of a million such draws is 0.01.
    assert counts.length("arrived") == pytest.approx(0.0, abs=0.04)


def test_nothing_wanted() -> None:
    counts = counted([1.0], [1.0], [0.0], BF16)
    assert counts.share("lost") == counts.length("arrived") == 0.0


def test_counts_of_ranks_add_up() -> None:
    one, other = counted([1.0], [1.0], [1.0], FP32), counted([1.0], [2.0], [1.0], FP32)
    total = Counts.total([one.numbers, other.numbers])
    assert numbers(total) == (2, 1, 0)
    assert total.length("arrived") == 0.5
