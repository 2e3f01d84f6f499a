"""Optimizers and learning rate schedules. The optimizer is torch's own on every engine; a schedule is a pure
function of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch

from samestep.recipe.schema import Optimizer, Schedule

OptimizerFactory = Callable[[Mapping[str, torch.Tensor]], torch.optim.Optimizer]


def factory(recipe: Optimizer) -> OptimizerFactory:
    """What builds the recipe's optimizer over named tensors, in two groups: decayed and not decayed."""

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
        return torch.optim.AdamW(groups, lr=recipe.lr, betas=(beta1, beta2), eps=recipe.eps)

    return build


def is_decayed(name: str, recipe: Optimizer) -> bool:
    """Whether weight decay reaches the parameter of this name."""
    return not any(fnmatchcase(name, pattern) for pattern in recipe.no_decay)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_at(step: int, *, lr: float, schedule: Schedule, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1 to `total_steps`.

    Warm-up: lr * step / w with w = warmup_steps, so that no step is taken at 0. Then with p = (step - 1 - w) /
    (total_steps - w): linear lr * (1 - p * (1 - f)), cosine lr * (f + (1 - f) * (1 + cos(pi * p)) / 2), f the final
    factor. After the warm-up these are transformers' get_linear_ and get_cosine_schedule_with_warmup.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return lr * step / warmup
    progress = (step - 1 - warmup) / max(1, total_steps - warmup)
    low = schedule.final_factor
    if schedule.name == "linear":
        return lr * (1 - progress * (1 - low))
    if schedule.name == "cosine":
        return lr * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)
    return lr
