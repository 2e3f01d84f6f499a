"""The comparison itself: it must find a single bit, and say where it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from samestep.engines.protocol import Shard
from tests.equivalence.trajectories import RankRun, Step, Trajectory, digest, digest_of, first_difference, joined


def shares_of(tensor: torch.Tensor, cuts: list[int]) -> list[Shard]:
    flat, bounds = tensor.reshape(-1), [0, *cuts, tensor.numel()]
    return [Shard(name="w", shape=tuple(tensor.shape), start=a, values=flat[a:b]) for a, b in pairwise(bounds)]


def next_float(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A copy whose element `index` is one bit away."""
    integers = {4: torch.int32, 2: torch.int16}[tensor.itemsize]
    changed = tensor.clone()
    changed.view(integers).view(-1)[index] += 1
    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_adds_up_over_shares_and_sees_every_bit(dtype):
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = digest_of(tensor)
    for cuts in ([1], [17, 18], [0, 35], [5, 5, 30]):
        assert sum(map(digest, shares_of(tensor, cuts))) % 2**64 == whole
    for index in range(tensor.numel()):
        assert digest_of(next_float(tensor, index)) != whole
    swapped = tensor.flatten()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert digest_of(swapped) != whole
    assert digest_of(torch.zeros(3)) != digest_of(-torch.zeros(3))


def step_of(masters: dict[str, torch.Tensor], **changes: object) -> Step:
    usual = Step(
        loss=2.0,
        grad_norm=1.0,
        grad_norm_clipped=1.0,
        skipped=False,
        lr=0.1,
        loss_scale=None,
        lost_update_share=None,
        unseen_update_share=None,
        never_moved=(),
        digests={name: digest_of(tensor) for name, tensor in masters.items()},
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def rank_run(masters: dict[str, torch.Tensor], replica: int = 0, **changes: object) -> RankRun:
    step = step_of(masters, **changes)
    whole = masters if replica == 0 else {}
    return RankRun(
        replica=replica, start=step.digests, steps=[step], masters=whole, evaluations=[], violations=[], dtypes={}
    )


def story(name: str, *steps: Step) -> Trajectory:
    return Trajectory(name=name, start={"a": 1}, steps=list(steps), masters={}, evaluations=[])


def test_first_difference_names_step_quantity_and_parameter():
    weights = {"a": torch.ones(3), "b": torch.ones(4)}
    same = step_of(weights)
    one = story("one", same, same, same)
    assert first_difference(one, story("other", same, same, same)) is None
    off = step_of(weights, loss=2.0000000000000004)
    assert first_difference(one, story("other", same, off, same)) == (
        "one and other differ at step 2 in loss: 2.0 and 2.0000000000000004"
    )
    off = step_of({"a": weights["a"], "b": next_float(weights["b"], 2)})
    assert first_difference(one, story("other", same, same, off)) == "one and other differ at step 3 in b"
    nan = step_of(weights, grad_norm=float("nan"))
    assert first_difference(story("one", nan), story("other", nan)) is None
    assert "grad_norm" in str(first_difference(story("one", nan), story("other", same)))


def test_ranks_and_copies_that_disagree_are_found():
    weights = {"a": torch.ones(3)}
    assert joined("run", [rank_run(weights), rank_run(weights, replica=1)]).masters == weights
    with pytest.raises(AssertionError, match="ranks saw grad_norm"):
        joined("run", [rank_run(weights), rank_run(weights, replica=1, grad_norm=1.5)])
    with pytest.raises(AssertionError, match="copies of a differ"):
        joined("run", [rank_run(weights), rank_run({"a": next_float(weights["a"], 0)}, replica=1)])
