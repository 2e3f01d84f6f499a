"""Jobs on models so small that the right gradient and loss are known without a computation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from samestep import world
from samestep.data import Examples
from samestep.engines import build
from samestep.engines.protocol import Engine
from samestep.precision.plan import Plan
from samestep.recipe.schema import Recipe
from samestep.training.steps import Stepper
from tests.equivalence.trajectories import loader_of


class Weights(nn.Module):
    """The gradient of `forward(x)` in the weights is x."""

    def __init__(self, rows: int = 3, columns: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, columns))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight * factor).sum()


def accumulated(recipe: dict[str, Any], factors: list[list[float]]) -> list[float]:
    """A job: the gradients that arise when micro-batch m of rank r has the gradient `factors[m][r]` everywhere: their
    values without repetition, as this rank has them before the optimizer."""
    engine, _, plan = _engine(recipe, Weights())
    try:
        for turn in engine.turns(len(factors)):
            loss = engine.model(torch.tensor(factors[turn.micro][turn.rank], dtype=plan.compute))
            engine.backward(loss, turn, len(factors))
        return sorted({value for gradient in engine.gradients() for value in gradient.tolist()})
    finally:
        engine.close()


class Table(nn.Module):
    """A model of two tokens with known losses: predicting 1 after 0 costs `first`, 0 after 1 costs `second`."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        # Cross entropy of the smaller of two logits that are d apart: log(1 + exp(d)).
        gaps = [math.log(math.expm1(loss)) for loss in (first, second)]
        self.table = nn.Embedding.from_pretrained(torch.tensor([[gaps[0], 0.0], [0.0, gaps[1]]]), freeze=False)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutput:
        return CausalLMOutput(logits=self.table(input_ids))


def loss_of_table(recipe: dict[str, Any], rows: list[list[int]], first: float, second: float) -> float:
    """A job: the loss that a step on these rows reports. All tokens but the first of a row count."""
    engine, checked, plan = _engine(recipe, Table(first, second))
    try:
        stepper = Stepper(engine, checked, world.start(timeout_seconds=60), plan)
        lengths = [len(row) for row in rows]
        examples = Examples(
            tokens=np.array([token for row in rows for token in row], dtype=np.int32),
            counts=np.array([place > 0 for row in rows for place in range(len(row))]),
            row_starts=np.cumsum([0, *lengths], dtype=np.int64),
        )
        data = loader_of(checked, examples).step(0)
        return stepper.step(data, index=0, lr=0.0, measure=False, stop=False, facts=False).loss
    finally:
        engine.close()


def _engine(recipe: dict[str, Any], model: nn.Module) -> tuple[Engine, Recipe, Plan]:
    checked = Recipe.model_validate(recipe)
    plan = build.resolve_plan(checked, model)
    return build.build(checked, model, plan, world.start(timeout_seconds=60)), checked, plan
