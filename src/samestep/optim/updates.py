"""What an optimizer means to do to a weight, worked out again from its state: to compare with what came of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from samestep.recipe.schema import Optimizer


def wanted_update(
    recipe: Optimizer,
    *,
    lr: float,
    step: int,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: Mapping[str, torch.Tensor],
    decay: torch.Tensor | float,
) -> torch.Tensor:
    """The update of optimizer step `step` (from 1) before any rounding: fp64 [n].

    `weight` and `gradient` (after clipping) are those before the step, `moments` the optimizer's after it, by torch's
    keys; all [n]. `decay` is the weight decay of each. The formulas are those of torch.optim.AdamW and torch.optim.SGD.
    """
    weight = weight.double()
    if recipe.name == "sgd":
        buffer = moments.get("momentum_buffer")
        direction = gradient.double() + decay * weight if buffer is None else buffer.double()
        return -lr * direction
    beta1, beta2 = recipe.betas
    root = (moments["exp_avg_sq"].double() / (1 - beta2**step)).sqrt_().add_(recipe.eps)
    update = moments["exp_avg"].double().div_(root).mul_(-lr / (1 - beta1**step))
    return update - lr * decay * weight
