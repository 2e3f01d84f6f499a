"""What all peers' loops share: the model as the recipe gives it, its loss on a step's batch, the optimizer's groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samestep import models, optim
from samestep.bench.timing import Parts
from samestep.data import GlobalStep
from samestep.recipe.schema import Recipe
from samestep.training.steps import on_device
from samestep.world import World


def load(recipe: Recipe) -> tuple[nn.Module, list[nn.Module]]:
    """The model, with fp32 trainable weights, on the CPU, and the modules to shard by."""
    model = models.load_model(recipe.model, seed=recipe.train.seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    units = models.unit_modules(model, recipe.engine.unit_classes)
    if recipe.train.activation_checkpointing:
        models.checkpoint_activations(units)
    return model, units


def optimizer_for(named: Iterable[tuple[str, Any]], recipe: Recipe) -> torch.optim.Optimizer:
    """torch's own optimizer, with the groups of the recipe."""
    return optim.factory(recipe.train.optimizer)({name: p for name, p in named if p.requires_grad})


class Losses:
    """The loss of this rank's batch of a step, scaled for an engine that averages gradients over ranks."""

    def __init__(self, recipe: Recipe, here: World, parts: Parts) -> None:
        self._recipe, self._here, self._parts = recipe, here, parts

    def __call__(self, model: nn.Module, data: GlobalStep) -> torch.Tensor:
        with self._parts("data"):
            inputs = on_device(data.batch(0, self._here.rank), self._here.device)
        with self._parts("forward"):
            total, _ = models.loss_sum(model, inputs, attention=self._recipe.model.attention)
            return total / data.label_tokens * self._here.size


def mean_over_ranks(loss: torch.Tensor) -> float:
    """What the ranks log: the mean of their losses."""
    value = loss.detach().float()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()
