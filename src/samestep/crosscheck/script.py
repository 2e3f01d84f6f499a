"""A plain training script's part: what other tools leave to it, the same under each of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from samestep import optim
from samestep.recipe.schema import Recipe
from samestep.world import World, gather_numbers


def loss(model: Any, inputs: Any) -> torch.Tensor:
    """The loss of a rank's micro-batch, as scripts write it: a mean over its tokens."""
    logits = model(input_ids=inputs.input_ids, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), inputs.labels.flatten(), ignore_index=-100)


def optimizer(recipe: Recipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    """torch's optimizer, as the recipe describes it."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return optim.factory(recipe.train.optimizer, rounding="nearest", seed=recipe.train.seed)(named)


def set_rate(built: Any, rate: float) -> None:
    """Gives an optimizer its learning rate."""
    for group in built.param_groups:
        group["lr"] = rate


def rate_of(built: Any) -> float:
    """The learning rate that an optimizer has."""
    return float(built.param_groups[0]["lr"])


def mean_over_ranks(losses: list[float], here: World) -> float:
    """The mean of all ranks' losses of their micro-batches."""
    rows = gather_numbers(losses, here)
    return sum(value for row in rows for value in row) / sum(map(len, rows))
