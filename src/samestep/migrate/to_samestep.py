"""The target `samestep`: a recipe."""

from __future__ import annotations

from samestep.migrate.output import Output
from samestep.recipe.fields import field_paths
from samestep.recipe.schema import Recipe

# What a recipe cannot be without, and what no default may stand in for.
_NEEDED = (
    "model.path",
    "data.path",
    "engine.name",
    "engine.ranks",
    "precision.regime",
    "train.steps",
    "train.micro_batch",
    "train.accumulation",
    "train.optimizer.lr",
)
_INSTEAD = {"model.path": "model.config", "train.steps": "train.epochs"}
# Defaults that a tool's own file would decide and that change numbers, so they are worth a line.
_TOLD = (
    "data.format",
    "data.loss_on",
    "data.max_tokens",
    "train.optimizer.name",
    "train.optimizer.betas",
    "train.optimizer.weight_decay",
    "train.schedule.name",
    "train.schedule.warmup_steps",
    "train.max_grad_norm",
    "train.seed",
)


def write_samestep(out: Output) -> None:
    """Every field as it is."""
    order = {".".join(map(str, path)): place for place, (path, _) in enumerate(field_paths(Recipe))}
    for path in sorted(out.said, key=lambda path: order.get(path, len(order))):
        out.put(path, path, out.said[path], "kept")
    for path in _NEEDED:
        other = _INSTEAD.get(path)
        if out.get(path) is None and (other is None or out.get(other) is None):
            out.missing.append(path)


def defaults_left(out: Output) -> list[str]:
    """Fields that the source says nothing about and that keep the recipe's defaults, as "path = value"."""
    values = {".".join(map(str, path)): info.default for path, info in field_paths(Recipe)}
    return [f"{path} = {values[path]}" for path in _TOLD if path not in out.said]
