"""Stochastic rounding: right in expectation and variance, and the same wherever and in whatever pieces it happens."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from samestep.rounding import random_bits, stochastic_to_bfloat16, stream

SIGMAS = 5.0
VALUES = [1 + 2**-8, 1 + 2**-7 * 3 / 65536, 0.02, -0.02, 0.7, -1234.5678, 3.1e-30, -2.9e30, 1.3e-40]
STREAM = stream(3, 14, "model.layers.0.mlp.up_proj.weight", "cast")
WHOLE = torch.randn(200_003, generator=torch.Generator().manual_seed(0)) * 0.02


def neighbours(value: float) -> tuple[float, float, float]:
    """The bf16 numbers below and above an fp32 value (eight significant bits), and the share of the way up."""
    spacing = 2.0 ** max(math.frexp(value)[1] - 8, -133)
    below = math.floor(value / spacing)
    return below * spacing, (below + 1) * spacing, value / spacing - below


def copies(value: float, count: int) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.float32)


@pytest.mark.parametrize("value", VALUES)
def test_expectation_of_every_value(value: float) -> None:
    count = 1 << 18
    value = copies(value, 1).item()
    below, above, share = neighbours(value)
    rounded = stochastic_to_bfloat16(copies(value, count), STREAM, start=0).double()
    assert set(rounded.unique().tolist()) == {below, above}
    ups = int((rounded == above).sum())
    assert abs(ups - count * share) < SIGMAS * math.sqrt(count * share * (1 - share))


@pytest.mark.parametrize("value", [1 + 2**-8, 0.02, -0.7])
def test_variance_is_that_of_independent_choices(value: float) -> None:
    """Over many streams, the number of ups among 1,024 elements scatters as a binomial one does."""
    streams, count = 1000, 1024
    value = copies(value, 1).item()
    _, above, share = neighbours(value)
    values = copies(value, count)
    ups = torch.tensor(
        [
            float((stochastic_to_bfloat16(values, stream(0, step, "w", "cast"), start=0).double() == above).sum())
            for step in range(streams)
        ]
    )
    expected = count * share * (1 - share)
    assert abs(ups.mean() - count * share) < SIGMAS * math.sqrt(expected / streams)
    assert abs(ups.var() / expected - 1) < SIGMAS * math.sqrt(2 / (streams - 1))


def test_one_element_over_many_steps() -> None:
    """An element's choices at different steps are independent: the sums over 64 steps scatter as they should."""
    steps, count = 64, 1 << 16
    value = copies(0.02, 1).item()
    below, above, share = neighbours(value)
    total = torch.zeros(count, dtype=torch.float64)
    for step in range(steps):
        total += stochastic_to_bfloat16(copies(value, count), stream(0, step, "w", "weight"), start=0).double() - below
    ups = total / (above - below)
    assert abs(ups.mean() / steps - share) < SIGMAS * math.sqrt(share * (1 - share) / steps / count)
    assert abs(ups.var() / (steps * share * (1 - share)) - 1) < SIGMAS * math.sqrt(2 / count)


def test_what_bf16_holds_stays() -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    every = patterns.view(torch.bfloat16)
    numbers = every[~every.isnan()]
    for step in range(3):
        rounded = stochastic_to_bfloat16(numbers.float(), stream(0, step, "w", "cast"), start=step)
        assert torch.equal(rounded.view(torch.int16), numbers.view(torch.int16))  # both zeros, infinities
    assert torch.isinf(numbers).sum() == 2


def test_nan_stays_nan() -> None:
    """Those of CPUs, and that of GPUs, 0x7FFFFFFF, to which nothing can be added."""
    patterns = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7FFF8000, -0x400000], dtype=torch.int32)
    values = patterns.view(torch.float32).repeat(1000)
    assert values.isnan().all()
    assert stochastic_to_bfloat16(values, STREAM, start=0).isnan().all()


def test_beyond_the_largest_number() -> None:
    """Half way between the largest bf16 number and what would be the next, half of the elements become infinite."""
    largest = torch.finfo(torch.bfloat16).max
    rounded = stochastic_to_bfloat16(copies(largest + 2.0**119, 10_000), STREAM, start=0).float()
    assert set(rounded.unique().tolist()) == {largest, math.inf}
    assert abs(rounded.isinf().sum() - 5000) < SIGMAS * 50


def test_negative_values_mirror_positive_ones() -> None:
    up = stochastic_to_bfloat16(WHOLE, STREAM, start=0)
    assert torch.equal(stochastic_to_bfloat16(-WHOLE, STREAM, start=0), -up)


@pytest.mark.parametrize("start", [0, 7, (1 << 31) - 70_000, (1 << 32) - 100_001, (1 << 32) + 12, 5 << 32])
def test_cuts_do_not_matter(start: int) -> None:
    """A slice alone is the slice of the whole, also where the index passes 2**31 and 2**32."""
    whole = stochastic_to_bfloat16(WHOLE, STREAM, start=start)
    bounds = [0, 1, 2, 65_535, 65_537, 100_000, 100_001, 131_072, 199_999, WHOLE.numel()]
    for low, high in itertools.pairwise(bounds):
        out = torch.zeros(high - low, dtype=torch.bfloat16)
        alone = stochastic_to_bfloat16(WHOLE[low:high], STREAM, start=start + low, out=out)
        assert alone is out
        assert torch.equal(out, whole[low:high]), (low, high)


def test_far_places_have_numbers_of_their_own() -> None:
    places = [0, 1 << 31, 1 << 32, (1 << 32) + (1 << 31), 2 << 32, 1 << 40]
    bits = [uniform(random_bits(STREAM, start=place, numel=1 << 16)) for place in places]
    for index, one in enumerate(bits):
        for other in bits[index + 1 :]:
            assert abs(correlation(one, other)) < SIGMAS / math.sqrt(one.numel())


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """The sixteen low bits, those that rounding uses, between -1/2 and 1/2."""
    return (bits & 0xFFFF).double() / 65536 - 0.5


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of numbers whose expectation is 0 and whose variance is 1/12."""
    return float(torch.dot(one, other)) / one.numel() * 12


COUNT = 1 << 18
LAGS = [*range(1, 17), 64, 255, 256, 4096]


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"step": 1}, {"step": 2}, {"name": "b"}, {"purpose": "exp_avg"}, {"name": "1/a", "step": 0}],
    ids=str,
)
def test_streams_are_distinct(change: dict[str, int | str]) -> None:
    base: dict[str, int | str] = {"seed": 0, "step": 0, "name": "a", "purpose": "weight"}
    streams = [stream(**arguments) for arguments in (base, base | change)]  # type: ignore[arg-type]
    one, other = (uniform(random_bits(random, start=0, numel=COUNT)) for random in streams)
    for lag in [0, *LAGS]:
        assert abs(correlation(one[: COUNT - lag], other[lag:])) < SIGMAS / math.sqrt(COUNT - lag)


@pytest.mark.parametrize("seed", range(3))
def test_elements_of_one_stream_are_uncorrelated(seed: int) -> None:
    bits = uniform(random_bits(stream(seed, 0, "a", "weight"), start=0, numel=COUNT))
    for lag in LAGS:
        assert abs(correlation(bits[: COUNT - lag], bits[lag:])) < SIGMAS / math.sqrt(COUNT - lag)


def chi_square(bins: torch.Tensor) -> float:
    """In standard deviations above what uniform numbers have."""
    counts = torch.bincount(bins, minlength=1 << 16).double()
    expected = bins.numel() / counts.numel()
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("seed", range(3))
def test_the_low_bits_are_uniform(seed: int) -> None:
    bits = random_bits(stream(seed, 1, "a", "cast"), start=0, numel=1 << 22) & 0xFFFF
    assert abs(chi_square(bits)) < SIGMAS
    high = bits >> 8
    assert abs(chi_square(high[:-1] << 8 | high[1:])) < SIGMAS  # pairs of neighbours


def test_numbers_never_change() -> None:
    """A resumed run rounds as its first part did. The hash of a known input, worked out in plain integers."""

    def by_hand(index: int) -> int:
        first, second = STREAM.first & 0xFFFFFFFF, STREAM.second & 0xFFFFFFFF
        x = (index & 0xFFFFFFFF) ^ ((first + 0x9E3779B1 * (index >> 32)) & 0xFFFFFFFF)
        x = ((x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF) ^ second
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    for start in (0, (1 << 32) - 4, (3 << 32) + 9):
        bits = random_bits(STREAM, start=start, numel=8)
        assert [value & 0xFFFFFFFF for value in bits.tolist()] == [by_hand(start + i) for i in range(8)]
