"""The update that an optimizer wants, against the one that torch's optimizers make in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samestep.optim import factory, wanted_update
from samestep.recipe.schema import Optimizer

RECIPES: list[dict[str, Any]] = [
    {"name": "adamw", "lr": 1e-2},
    {"name": "adamw", "lr": 1e-3, "betas": [0.8, 0.95], "eps": 1e-4, "weight_decay": 0.1},
    {"name": "sgd", "lr": 0.1},
    {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    {"name": "sgd", "lr": 0.1, "weight_decay": 0.01},
]


@pytest.mark.parametrize("settings", RECIPES)
def test_it_is_what_torch_does_without_rounding(settings: dict[str, Any]) -> None:
    recipe = Optimizer(**settings)
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(50, generator=random, dtype=torch.float64).requires_grad_()
    optimizer = factory(recipe)({"w": weight})
    for step in range(1, 5):
        weight.grad = torch.randn(50, generator=random, dtype=torch.float64)
        before, gradient = weight.detach().clone(), weight.grad.clone()
        optimizer.step()
        state = {key: value for key, value in optimizer.state[weight].items() if key != "step" and value is not None}
        wanted = wanted_update(
            recipe,
            lr=recipe.lr,
            step=step,
            weight=before,
            gradient=gradient,
            moments=state,
            decay=recipe.weight_decay,
        )
        torch.testing.assert_close(wanted, weight.detach() - before, rtol=1e-10, atol=1e-14)
