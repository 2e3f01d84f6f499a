"""Whole runs as jobs for ranks: what `samestep train` does on each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samestep import models, world
from samestep.engines import build
from samestep.recipe import Recipe
from samestep.training import folder
from samestep.training.rank import Request, run


def train(recipe: dict[str, Any], out: str, keep_masters: bool = False) -> dict[str, Any] | None:
    """Runs a recipe into `out`; the summary on rank 0."""
    here = world.start(timeout_seconds=60)
    if here.is_main:
        folder.prepare(Path(out), overwrite=False)
    world.gather_numbers([0.0], here)
    return run(Request(recipe=Recipe.model_validate(recipe), out=Path(out), keep_masters=keep_masters))


def engine_made(recipe: dict[str, Any]) -> dict[str, Any]:
    """What is there after an engine was built, seen on this rank: the classes in it, and how much this rank holds."""
    checked = Recipe.model_validate(recipe)
    here = world.start(timeout_seconds=60)
    model = models.load_model(checked.model, seed=0)
    engine = build.build(checked, model, build.resolve_plan(checked, model), here)
    try:
        parameters = list(engine.model.parameters())
        return {
            "engine": type(engine).__name__,
            "stage": getattr(engine, "stage", None),
            "sharded_modules": sum(type(m).__name__.startswith("FSDP") for m in engine.model.modules()),
            "mesh_sizes": sorted({p.device_mesh.size() for p in parameters if hasattr(p, "device_mesh")}),
            "masters": sum(shard.values.numel() for shard in engine.masters()),
            "parameters": sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in parameters),
            "device": here.device.type,
        }
    finally:
        engine.close()
