"""Builds the recipe's optimizer over named tensors: torch's own, or our AdamW where bf16 weights need its rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

import torch

from samestep.optim.low_precision import LowPrecisionAdamW
from samestep.recipe.schema import Optimizer

OptimizerFactory = Callable[[Mapping[str, torch.Tensor]], torch.optim.Optimizer]


def factory(recipe: Optimizer, *, rounding: str = "nearest", seed: int = 0) -> OptimizerFactory:
    """What builds the recipe's optimizer over named tensors, in two groups: decayed and not decayed.

    `rounding` is how updates are rounded: nearest (torch's optimizers), stochastic or compensated (our bf16 AdamW).
    """

    def build(named: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
        groups = [
            {
                "params": [t for name, t in named.items() if is_decayed(name, recipe)],
                "weight_decay": recipe.weight_decay,
            },
            {"params": [t for name, t in named.items() if not is_decayed(name, recipe)], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if recipe.name == "sgd":
            return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum)
        beta1, beta2 = recipe.betas
        if rounding != "nearest":
            return LowPrecisionAdamW(
                groups, lr=recipe.lr, betas=(beta1, beta2), eps=recipe.eps, rounding=rounding, seed=seed
            )
        return torch.optim.AdamW(groups, lr=recipe.lr, betas=(beta1, beta2), eps=recipe.eps)

    return build


def is_decayed(name: str, recipe: Optimizer) -> bool:
    """Whether weight decay reaches the parameter of this name."""
    return not any(fnmatchcase(name, pattern) for pattern in recipe.no_decay)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def prepare_state(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], keys: Iterable[str], *, updates: int
) -> None:
    """Gives the optimizer the state it has after `updates` updates, with zeros for every tensor of `keys` that it
    lacks: a checkpoint is read into them. Does nothing for `updates` 0, where optimizers have no state yet."""
    if not updates:
        return
    for parameter in parameters:
        state = optimizer.state[parameter]
        if not isinstance(optimizer, torch.optim.SGD):
            state["step"] = torch.tensor(float(updates))
        for key in keys:
            if key not in state:
                state[key] = torch.zeros_like(parameter, requires_grad=False)
