"""Dynamic loss scaling: a rule that can be followed by hand."""

from __future__ import annotations

import pytest

from samestep.recipe.schema import LossScale
from samestep.training.loss_scale import DynamicScale


def values(scale: DynamicScale, story: str) -> list[float]:
    """The scale after each step: g went well, o overflowed."""
    seen = []
    for step in story:
        scale.went_well() if step == "g" else scale.overflowed()
        seen.append(scale.value)
    return seen


def test_halves_at_an_overflow_and_doubles_after_a_quiet_spell():
    scale = DynamicScale(LossScale(initial=16.0, growth_interval=3, minimum=1.0))
    assert scale.value == 16.0
    assert values(scale, "oog") == [8.0, 4.0, 4.0]
    assert values(scale, "gg") == [4.0, 8.0]
    # An overflow starts the count again, and so does a growth.
    assert values(scale, "ggoggg") == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0]


def test_never_below_the_minimum():
    scale = DynamicScale(LossScale(initial=3.0, growth_interval=100, minimum=1.0))
    assert scale.can_shrink
    assert values(scale, "ooo") == [1.5, 1.0, 1.0]
    assert not scale.can_shrink


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_growth_interval(interval):
    scale = DynamicScale(LossScale(initial=1.0, growth_interval=interval))
    assert values(scale, "g" * 10)[-1] == 2.0 ** (10 // interval)
