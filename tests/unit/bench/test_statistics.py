"""Medians, ratios over rounds, and the union of intervals, against values worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samestep.bench.rank import _Taken
from samestep.bench.statistics import Ratio, Spread
from samestep.bench.timing import Parts, covered
from samestep.errors import RunError


def test_quartiles_lie_between_the_values() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(median=3, lower_quartile=2, upper_quartile=4, count=5)
    assert Spread.of([1.0, 2.0]) == Spread(median=1.5, lower_quartile=1.25, upper_quartile=1.75, count=2)
    assert Spread.of([7.0]) == Spread(median=7, lower_quartile=7, upper_quartile=7, count=1)


def test_what_slows_both_in_one_round_cancels() -> None:
    ours = [[1.0, 1.0, 9.0], [10.0, 10.0, 10.0], [2.0, 2.0, 2.0]]
    theirs = [[2.0, 2.0, 2.0], [20.0, 20.0, 1.0], [2.0, 2.0, 4.0]]
    assert Ratio.of(ours, theirs) == Ratio(median=0.5, smallest=0.5, largest=1.0)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], None),
        ([(0.0, 1.0), (2.0, 3.0)], 2.0),
        ([(2.0, 3.0), (0.0, 2.5)], 3.0),
        ([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0)], 5.0),
        ([(1.0, 1.0)], 0.0),
    ],
)
def test_time_with_two_collectives_at_once_counts_once(spans: list[tuple[float, float]], expected: float) -> None:
    assert covered(spans) == expected


def test_a_loss_that_is_not_finite_ends_the_round() -> None:
    """Of a loop of another tool too, whose loss would otherwise count as equal to any."""
    trains: Any = SimpleNamespace(step=lambda data, index, lr: [2.0, float("nan")][index])
    loader: Any = SimpleNamespace(step=lambda index: None)
    here: Any = SimpleNamespace(device=torch.device("cpu"))
    taken = _Taken(trains, loader, [0.1] * 2, Parts(here.device), here)
    assert len(taken.steps(1)) == 1
    with pytest.raises(RunError, match="step 2 is not finite"):
        taken.steps(1)


def test_parts_add_up_only_while_they_are_on() -> None:
    parts = Parts(torch.device("cpu"))
    with parts("forward"):
        pass
    assert parts.seconds == {}
    parts.on = True
    for name in ("forward", "backward", "forward"):
        with parts(name):
            pass
    assert list(parts.seconds) == ["forward", "backward"]
    assert all(seconds > 0 for seconds in parts.seconds.values())
