"""Before step 1: how many of the run's updates rounding will make vanish. Said at the start, and in precision.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from samestep.optim import lr_at
from samestep.precision.forecast import Forecast, Rounding, forecast, sampled
from samestep.precision.plan import Plan
from samestep.recipe.schema import Recipe

_WORTH_SAYING = 0.01


def learning_rates(recipe: Recipe, steps: int) -> list[float]:
    """The learning rate of every step of the run."""
    train = recipe.train
    return [
        lr_at(step, lr=train.optimizer.lr, schedule=train.schedule, total_steps=steps) for step in range(1, steps + 1)
    ]


def outlook(recipe: Recipe, plan: Plan, model: nn.Module, rates: Sequence[float]) -> Forecast | None:
    """The forecast for a model as it was loaded, whole; None for an optimizer whose updates have no known size.

    `rates` is the learning rate of every step.
    """
    if recipe.train.optimizer.name != "adamw":
        return None
    return forecast(sampled(model), rates, Rounding.of(recipe.precision, plan), betas=recipe.train.optimizer.betas)


def described(found: Forecast) -> dict[str, Any]:
    """The forecast as plain data for JSON."""
    return {
        "lost_share": found.first.lost,
        "unseen_share": found.first.unseen,
        "dropped_share": found.after[-1].dropped,
        "after": [asdict(shares) for shares in found.after],
        "never_move": list(found.never_move),
    }


def sentences(found: Forecast) -> list[str]:
    """What will vanish, for people; nothing where next to nothing will."""
    said = []
    first, last = found.after[0], found.after[-1]
    lost, unseen, dropped = (share or 0.0 for share in (found.first.lost, found.first.unseen, last.dropped))
    if lost >= _WORTH_SAYING:
        said.append(f"{lost:.0%} of the updates will be lost: the weights cannot move by so little.")
    if unseen >= _WORTH_SAYING:
        later = f", {last.unseen:.0%} at step {last.steps:,}" if last.steps > 1 and last.unseen is not None else ""
        still = f"; {last.copy_unchanged:.0%} of the copies will end as they were loaded" if last.copy_unchanged else ""
        said.append(
            f"{first.unseen or 0.0:.0%} of the first step's updates will not be seen by the forward pass{later}{still}."
        )
    if dropped >= _WORTH_SAYING:
        said.append(f"The export will show {dropped:.0%} of the changed weights as they were loaded.")
    if found.never_move:
        said.append(f"{len(found.never_move)} tensors cannot move at all, {found.never_move[0]} first.")
    return ["Forecast: " + " ".join(said)] if said else []
