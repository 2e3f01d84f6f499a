"""Seven engines, three regimes, a hundred steps: every loss, norm and master parameter in equal bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.equivalence.cases import SHARDED, make_examples, make_recipe
from tests.equivalence.trajectories import first_difference

REGIMES = ("full", "mixed", "low")
EXAMPLES = make_examples(50)  # 12 steps of 4 rows and a short one


def recipe_of(engine: str, model: str, regime: str) -> dict[str, Any]:
    return make_recipe(engine, model, regime=regime, steps=100, train__max_grad_norm=1.6)


pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("regime", REGIMES)
def test_single_learns(run, model_folder, regime):
    """The run that the others are compared with is a real one: the loss falls, clipping works at times."""
    single = run(recipe_of("single", model_folder(), regime), EXAMPLES, timeout_seconds=240)
    losses = [step.loss for step in single.steps]
    assert losses[0] == pytest.approx(math.log(515), rel=0.1)
    assert sum(losses[-10:]) / 10 < 0.8 * losses[0]
    clipped = [step.grad_norm_clipped < step.grad_norm for step in single.steps]
    assert any(clipped)
    assert not all(clipped)
    assert {tensor.dtype for tensor in single.masters.values()} == {
        torch.bfloat16 if regime == "low" else torch.float32
    }


@pytest.mark.parametrize("engine", SHARDED)
@pytest.mark.parametrize("regime", REGIMES)
def test_equal_for_a_hundred_steps(run, model_folder, regime, engine):
    single = run(recipe_of("single", model_folder(), regime), EXAMPLES, timeout_seconds=240)
    other = run(recipe_of(engine, model_folder(), regime), EXAMPLES, timeout_seconds=240)
    assert first_difference(single, other) is None
    for name, tensor in single.masters.items():
        assert torch.equal(tensor, other.masters[name]), name
