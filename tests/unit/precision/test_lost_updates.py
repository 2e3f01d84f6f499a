"""Shares of updates that rounding makes vanish: known forecasts, and counts worked out by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from samestep.precision import lost_updates
from samestep.precision.lost_updates import Counts, count, forecast_lost, sample, watch

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


@pytest.mark.parametrize("numel", [1, 65_536, 65_537, 200_001, 400_000])
def test_samples_do_not_depend_on_the_cut(numel: int) -> None:
    """However many ranks share a parameter, together they sample what one rank alone does."""
    values = torch.arange(numel)
    whole = sample(values, start=0, numel=numel)
    assert whole.numel() <= 65_536
    assert whole.numel() >= min(numel, 65_536 // 2)
    for cuts in ([numel // 2], [1, 2, 3, numel // 3, numel - 1], [0, numel]):
        bounds = [0, *sorted(max(0, min(cut, numel)) for cut in cuts), numel]
        parts = [sample(values[low:high], start=low, numel=numel) for low, high in itertools.pairwise(bounds)]
        assert torch.equal(torch.cat(parts), whole)


def test_a_sample_is_a_live_view() -> None:
    values = torch.zeros(200_000)
    sampled = sample(values, start=0, numel=200_000)
    values.fill_(3.0)
    assert bool((sampled == 3.0).all())


def watched(values: torch.Tensor, gradient: list[float], **options: object) -> lost_updates.Watched:
    settings = {"moments": [], "decayed": False} | options
    return watch(values, torch.tensor(gradient), **settings)  # type: ignore[arg-type]


def test_counts_by_hand() -> None:
    """fp32 masters: the first is lost, the second unseen (1 + 1e-3 is 1 in bf16), the third seen, the fourth was not
    to move and did not."""
    values = torch.ones(4)
    before = watched(values, [1.0, 1.0, 1.0, 0.0])
    values += torch.tensor([0.0, 1e-3, 1e-2, 0.0])
    assert count([before], BF16) == Counts(wanted=3, lost=1, unseen=1)
    assert count([before], FP32) == Counts(wanted=3, lost=1, unseen=0)


def test_unseen_needs_a_crossing_not_a_distance() -> None:
    """Half way between two bf16 numbers the smallest step is seen, near a bf16 number a larger one is not."""
    edge = 1 + 2**-8
    values = torch.tensor([edge - 1e-6, 1.0])
    before = watched(values, [1.0, 1.0])
    values += torch.tensor([2e-6, 1e-3])
    assert count([before], BF16) == Counts(wanted=2, lost=0, unseen=1)


def test_float16_sees_eight_times_smaller_steps() -> None:
    values = torch.ones(2)
    before = watched(values, [1.0, 1.0])
    values += torch.tensor([1e-3, 2e-4])
    assert count([before], torch.float16) == Counts(wanted=2, lost=0, unseen=1)
    assert count([before], BF16) == Counts(wanted=2, lost=0, unseen=2)


def test_bf16_masters_are_their_own_copy() -> None:
    values = torch.ones(3, dtype=BF16)
    before = watched(values, [1.0, 1.0, 1.0])
    values += torch.tensor([1e-3, 1e-2, 0.0]).to(BF16)
    assert count([before], BF16) == Counts(wanted=3, lost=2, unseen=0)


def test_what_the_compensation_keeps_is_not_lost() -> None:
    """Nothing is lost where weight or compensation moved; but the forward pass sees the weight alone."""
    values, compensation = torch.ones(3, dtype=BF16), torch.zeros(3, dtype=BF16)
    before = watched(values, [1.0, 1.0, 1.0], compensation=compensation)
    compensation[0] = -1e-3
    values[1] = 1.0078125
    assert count([before], BF16) == Counts(wanted=3, lost=1, unseen=1)


def test_an_update_is_due_to_gradient_moment_or_decay() -> None:
    values = torch.tensor([1.0, 1.0, 0.0, 1.0])
    gradient = [1.0, 0.0, 0.0, 0.0]
    moment = torch.tensor([0.0, 0.0, 1e-30, 0.0])
    assert watched(values, gradient).wanted.tolist() == [True, False, False, False]
    assert watched(values, gradient, moments=[moment]).wanted.tolist() == [True, False, True, False]
    assert watched(values, gradient, moments=[moment], decayed=True).wanted.tolist() == [True, True, True, True]
    assert watched(values, gradient, decayed=True).wanted.tolist() == [True, True, False, True]


def test_several_shards_add_up() -> None:
    shards = []
    for _ in range(3):
        values = torch.ones(2)
        shards.append(watched(values, [1.0, 1.0]))
        values[0] += 0.5
    assert count(shards, BF16) == Counts(wanted=6, lost=3, unseen=0)
    assert count([], BF16) == Counts(wanted=0, lost=0, unseen=0)


def test_the_forecast_is_what_adamw_does() -> None:
    """One step of torch's AdamW in bf16 from gradients of either sign leaves as many weights as forecast."""
    generator = torch.Generator().manual_seed(1)
    weights = (torch.randn(200_000, generator=generator) * 0.02).to(BF16)
    for lr in (1e-4, 1e-5):
        moved = weights.clone().requires_grad_()
        moved.grad = torch.randn(200_000, generator=generator).to(BF16)
        before = watch(moved.detach(), moved.grad, [], decayed=False)
        torch.optim.AdamW([moved], lr=lr, weight_decay=0.0).step()
        seen = count([before], BF16)
        assert seen.lost / seen.wanted == pytest.approx(share(weights, lr), abs=0.01)
