"""Learning rate schedules: pure functions of the optimizer step. Nothing else advances them."""

from __future__ import annotations

import math

from samestep.recipe.schema import Schedule


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
