"""The gradient norm against exact arithmetic, and clipping against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.engines import gradients
from samestep.engines.gradients import clip_factor, global_norm, scale_
from samestep.engines.protocol import Replica
from samestep.world import World
from tests.exact import float32_root, sum_of_squares

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
ONLY = Replica(index=0, count=1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def norm_of(*tensors: torch.Tensor) -> float:
    return global_norm(tensors, ONLY, ALONE)


def right_norm(*tensors: torch.Tensor) -> float:
    return float32_root(sum_of_squares(tensors))


def random(numel: int, seed: int, spread: float = 4.0) -> torch.Tensor:
    """Normal numbers over several orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.exp(spread * torch.randn(numel, generator=generator))


@pytest.fixture
def always_exact(monkeypatch):
    """The bound of the fast sum is so wide that it never suffices."""
    monkeypatch.setattr(gradients, "_RELATIVE_ERROR", 1.0)


@pytest.fixture
def exact_calls(monkeypatch):
    """Counts how often the squares are summed exactly."""
    calls = []
    original = gradients._exact_terms
    monkeypatch.setattr(gradients, "_exact_terms", lambda mine: calls.append(1) or original(mine))
    return calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 2, 7, 1000, 3000])
def test_is_the_correctly_rounded_norm(numel, dtype):
    for seed in range(5):
        tensor = random(numel, seed, spread=2.0).to(dtype)
        assert norm_of(tensor) == right_norm(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_sum_is_the_correctly_rounded_norm_too(always_exact, exact_calls, dtype):
    for seed in range(40):
        tensor = random(200, seed, spread=2.0).to(dtype)
        assert norm_of(tensor) == right_norm(tensor)
    assert len(exact_calls) == 40


def test_exact_and_fast_agree(exact_calls, monkeypatch):
    """A thousand inputs of several lengths and spreads."""
    tensors = [random(1 + 97 * (seed % 13), seed, spread=seed % 8) for seed in range(1000)]
    fast = [norm_of(tensor) for tensor in tensors]
    assert len(exact_calls) < 20
    monkeypatch.setattr(gradients, "_RELATIVE_ERROR", 1.0)
    exact_calls.clear()
    assert [norm_of(tensor) for tensor in tensors] == fast
    assert len(exact_calls) == 1000


def test_chunks_do_not_matter(monkeypatch, exact_calls):
    """More than one chunk, both sums; and the elements beside the edge of a chunk are there."""
    tensor = random(70_000, 0, spread=1.0)
    expected = right_norm(tensor)
    assert norm_of(tensor) == expected
    edge = torch.zeros(65_537)
    edge[[0, 65_535, 65_536]] = torch.tensor([3.0, 4.0, 12.0])
    assert norm_of(edge) == 13.0
    monkeypatch.setattr(gradients, "_RELATIVE_ERROR", 1.0)
    assert norm_of(tensor) == expected
    assert norm_of(edge) == 13.0
    monkeypatch.setattr(gradients, "_CHUNK", 16)
    assert norm_of(tensor[:1000]) == right_norm(tensor[:1000])


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    exact=st.booleans(),
)
def test_does_not_depend_on_how_it_is_cut(values, cuts, exact):
    """Any finite fp32 numbers, zeros, denormals and the largest included."""
    with pytest.MonkeyPatch.context() as patch:
        if exact:
            patch.setattr(gradients, "_RELATIVE_ERROR", 1.0)
        whole = torch.tensor(values, dtype=torch.float32)
        bounds = sorted(min(cut, len(values)) for cut in cuts)
        assert norm_of(*whole.tensor_split(bounds)) == norm_of(whole)
        assert norm_of(whole.flip(0)) == norm_of(whole)
        assert norm_of(whole) == pytest.approx(right_norm(whole), rel=2**-23)


def test_next_to_a_tie(exact_calls):
    """The squares add up to that of the middle between 1 and the next fp32 number, give or take one part in 2**50,
    which a sum with the bound of the fast one cannot tell."""
    middle = [1.0, 2.0**-12, 2.0**-12, 2.0**-24]  # (1 + 2**-24)**2 == 1 + 2 * 2**-24 + 2**-48
    following = 1.0 + 2.0**-23
    tie = torch.tensor(middle)
    above = torch.tensor([*middle, 2.0**-25])
    below = torch.tensor([*middle[:3], 2.0**-24 - 2.0**-27])
    for tensor, expected in ((tie, 1.0), (above, following), (below, 1.0)):
        assert right_norm(tensor) == expected
        exact_calls.clear()
        assert norm_of(tensor) == expected
        assert exact_calls == [1]
        padded = torch.cat([torch.zeros(40), tensor, torch.zeros(3)])
        assert norm_of(*padded.tensor_split([41, 42])) == expected


def test_denormals_and_huge_values():
    smallest = torch.full((3,), 2.0**-149)
    assert norm_of(smallest) == right_norm(smallest) == 2.0**-149 * 2
    assert norm_of(torch.full((4,), 2.0**-149)) == 2.0**-148
    largest = torch.full((1,), torch.finfo(torch.float32).max)
    assert norm_of(largest) == largest.item()
    assert norm_of(largest, smallest) == largest.item()
    assert norm_of(largest, largest) == math.inf
    assert norm_of(torch.full((4,), 2.0**126)) == 2.0**127


def test_mixed_magnitudes_are_exact(always_exact):
    """Every fp32 exponent at once: the exact sum needs many digits."""
    every = torch.tensor([2.0**e * (1 + 2.0**-20) for e in range(-149, 100)])
    assert norm_of(every) == right_norm(every)


def test_nothing_zero_and_not_finite():
    assert global_norm([], ONLY, ALONE) == 0.0
    assert norm_of(torch.empty(0), torch.zeros(5)) == 0.0
    for dtype in DTYPES:
        assert norm_of(torch.tensor([1.0, math.inf], dtype=dtype)) == math.inf
        assert norm_of(torch.tensor([1.0, -math.inf], dtype=dtype)) == math.inf
        assert math.isnan(norm_of(torch.tensor([1.0, math.nan], dtype=dtype)))
        assert math.isnan(norm_of(torch.tensor([math.inf]), torch.tensor([math.nan])))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_replicas_square_each_element_once(monkeypatch, count, exact):
    """Ranks with the same gradient: together they count it once."""
    tensors = [random(numel, numel) for numel in (1, 2, 100, 7)]
    terms: list[list[float]] = []

    def gather(values: list[float], world: World) -> list[list[float]]:
        terms.append(values)
        return [values]

    monkeypatch.setattr(gradients, "gather_numbers", gather)
    if exact:
        monkeypatch.setattr(gradients, "_RELATIVE_ERROR", 1.0)
    for index in range(count):
        global_norm(tensors, Replica(index=index, count=count), ALONE)
    shares = terms[1::2] if exact else terms
    total = math.fsum(value for share in shares for value in share)
    assert total == pytest.approx(float(sum_of_squares(tensors)), rel=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [1e-4, 0.1, 1.0, 2.5, 1e6])
def test_clipping_is_torchs(limit, dtype):
    for seed in range(10):
        tensors = [random(numel, seed, spread=1.0).to(dtype) for numel in (3, 70, 1001)]
        ours = [tensor.clone() for tensor in tensors]
        norm = norm_of(*ours)
        scale_(ours, clip_factor(norm, limit))
        parameters = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.grad = tensor.clone()
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, torch.tensor(norm))
        for parameter, tensor in zip(parameters, ours, strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, tensor)


def test_clipping_off_or_not_needed():
    assert clip_factor(1e30, None) == 1.0
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0
    tensor = torch.tensor([1.0, 2.0])
    scale_([tensor], 1.0)
    assert tensor.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_factor_is_not_rounded_to_the_gradients_dtype(dtype):
    """Every mantissa of bf16, times a factor that takes more than its eight bits."""
    factor = torch.tensor(0.38712345).item()
    whole = torch.arange(128.0, 256.0).to(dtype)
    right = (whole.double() * factor).to(dtype)
    assert not torch.equal(whole * torch.tensor(factor).to(dtype), right)
    scale_([whole], factor)
    assert torch.equal(whole, right)
