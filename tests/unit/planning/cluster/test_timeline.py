"""Overlap on hand-made units."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from samestep.planning.cluster.timeline import StepSeconds, UnitSeconds

ROOT = UnitSeconds(forward=1.0, backward=2.0)


def step(block: UnitSeconds, blocks: int = 3, root: UnitSeconds = ROOT, **settings: Any) -> StepSeconds:
    given: dict[str, Any] = {
        "micro_batches": 1,
        "reduces_every_micro_batch": True,
        "reduces_in_backward": True,
        "after": 0.5,
    }
    return StepSeconds(root=root, blocks=[block] * blocks, **{**given, **settings})


def test_without_links_only_computing_is_left() -> None:
    made = step(UnitSeconds(forward=10.0, backward=20.0))
    assert made.overlapped == made.serial == 3 + 3 * 30 + 0.5


def test_without_computing_only_the_links_are_left() -> None:
    nothing = UnitSeconds(forward=0.0, backward=0.0)
    block = replace(nothing, gather=4.0, gather_again=5.0, reduce=7.0)
    made = step(block, root=replace(nothing, gather=1.0, reduce=2.0))
    assert made.overlapped == made.serial == pytest.approx(3 * (4 + 5 + 7) + 1 + 2 + 0.5)


def test_hidden_communication_leaves_its_ends() -> None:
    block = UnitSeconds(forward=10.0, backward=20.0, gather=4.0, gather_again=5.0, reduce=7.0)
    made = step(block, root=replace(ROOT, gather=0.25, reduce=0.125))
    # Before: the root's and the first block's gather. In the middle: the gather of the last block, longer than the
    # head's backward pass. After: the last reductions.
    assert made.overlapped == pytest.approx(0.25 + 4 + 1 + 3 * 10 + 5 + 3 * 20 + 7 + 0.125 + 0.5)
    assert made.serial == pytest.approx(3 * (10 + 20 + 4 + 5 + 7) + 3 + 0.25 + 0.125 + 0.5)


def test_a_gather_and_a_reduction_share_the_links() -> None:
    block = UnitSeconds(forward=10.0, backward=10.0, gather_again=6.0, reduce=7.0)
    # Backward: the first of three gathers; 10 beside a gather; 13 for both; 10 beside a reduction; the last reduction.
    assert step(block).overlapped == pytest.approx(1 + 3 * 10 + 6 + 10 + 13 + 10 + 7 + 0.5)


def test_accumulation() -> None:
    block = UnitSeconds(forward=1.0, backward=1.0, gather=1.0, gather_again=1.0, reduce=100.0)
    every, last = (step(block, micro_batches=4, reduces_every_micro_batch=often) for often in (True, False))
    assert every.serial - last.serial == pytest.approx(3 * 3 * 100.0)
    assert every.overlapped > last.overlapped > step(block).overlapped
    free = UnitSeconds(forward=1.0, backward=1.0)
    assert step(free, micro_batches=4).overlapped == 4 * (step(free).overlapped - 0.5) + 0.5


def test_reductions_after_the_backward_pass_are_not_hidden() -> None:
    block = UnitSeconds(forward=10.0, backward=20.0, reduce=7.0)
    root = replace(ROOT, reduce=2.0)
    late = step(block, root=root, reduces_in_backward=False)
    assert late.overlapped == late.serial == pytest.approx(3 + 3 * 30 + 3 * 7 + 2 + 0.5)
    assert step(block, root=root).overlapped == pytest.approx(late.overlapped - 2 * 7)
