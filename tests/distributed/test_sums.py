"""Sums and norms over real ranks, against sums by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from samestep import world
from samestep.engines import gradients
from samestep.engines.protocol import Replica
from samestep.engines.reduction import Reducer
from tests.exact import float32_root, sum_of_squares

pytestmark = pytest.mark.timeout(120)


def values_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * numel + rank)).to(dtype)


def by_hand(parts: list[torch.Tensor]) -> torch.Tensor:
    """Neighbours in pairs, then the pairs, with a + b alone."""
    if len(parts) == 1:
        return parts[0]
    return by_hand([parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)])


def all_reduced(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, set[torch.dtype]]:
    """A job: the sum over ranks, and the dtypes that the reducer noted."""
    reducer = Reducer("tree")
    values = values_of(dist.get_rank(), numel, dtype)
    reducer.all_reduce(values)
    return values, reducer.dtypes


def reduce_scattered(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A job: this rank's part of the sum over ranks."""
    values = values_of(dist.get_rank(), numel, dtype)
    part = torch.empty(numel // dist.get_world_size(), dtype=dtype)
    Reducer("tree").reduce_scatter(part, values, None)
    return part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_reduce_adds_in_the_order_of_a_tree(ranks, count, dtype):
    for numel in (1, 2, 37, 40):
        results = ranks.run(count, all_reduced, numel=numel, dtype=dtype)
        right = by_hand([values_of(rank, numel, dtype) for rank in range(count)])
        for values, dtypes in results:
            assert torch.equal(values, right)
            assert dtypes == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_reduce_scatter_adds_in_the_order_of_a_tree(ranks, count, dtype):
    numel = 12 * 7
    results = ranks.run(count, reduce_scattered, numel=numel, dtype=dtype)
    right = by_hand([values_of(rank, numel, dtype) for rank in range(count)])
    assert torch.equal(torch.cat(results), right)


def norm_over_ranks(cuts: list[int], copies: int, exact: bool) -> float:
    """A job: the norm of 1000 numbers that the ranks hold in pieces. With copies, so many ranks hold the same piece."""
    here = world.start(timeout_seconds=60)
    bound = gradients._RELATIVE_ERROR
    gradients._RELATIVE_ERROR = 1.0 if exact else bound
    try:
        group, copy = divmod(here.rank, copies)
        mine = values_of(0, 1000, torch.float32).tensor_split(cuts)[group]
        pieces = list(mine.tensor_split([mine.numel() // 3]))
        return gradients.global_norm(pieces, Replica(index=copy, count=copies), here)
    finally:
        gradients._RELATIVE_ERROR = bound


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("count", "cuts", "copies"),
    [(2, [1], 1), (2, [1000], 1), (2, [], 2), (3, [500, 500], 1), (4, [5, 5, 900], 1), (4, [333], 2), (4, [], 4)],
)
def test_norm_does_not_depend_on_the_pieces(ranks, count, cuts, copies, exact):
    right = float32_root(sum_of_squares([values_of(0, 1000, torch.float32)]))
    assert ranks.run(count, norm_over_ranks, cuts=cuts, copies=copies, exact=exact) == [right] * count


def norm_with(value: float) -> float:
    """A job: rank 1 has one element that is not finite."""
    here = world.start(timeout_seconds=60)
    mine = torch.tensor([1.0, value if here.rank == 1 else 1.0])
    return gradients.global_norm([mine], Replica(index=0, count=1), here)


def test_a_norm_that_is_not_finite_is_so_on_every_rank(ranks):
    assert ranks.run(2, norm_with, value=float("inf")) == [float("inf")] * 2
    assert [str(norm) for norm in ranks.run(2, norm_with, value=float("nan"))] == ["nan"] * 2
