"""Whole runs as jobs for ranks: what `samestep train` does on each of them."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

from samestep import models, world
from samestep.checkpoint import store
from samestep.engines import build
from samestep.errors import SamestepError
from samestep.recipe import Recipe
from samestep.training import folder
from samestep.training.checkpoints import Checkpoints, Course
from samestep.training.rank import run
from samestep.training.request import Request


def train(
    recipe: dict[str, Any],
    out: str,
    keep_masters: bool = False,
    resume: str | None = None,
    stop_after: int | None = None,
) -> dict[str, Any] | None:
    """Runs a recipe into `out`; the summary on rank 0. `resume` is the run folder to go on from, which may be `out`."""
    here = world.start(timeout_seconds=60)
    source = store.newest(Path(resume)) if resume else None
    if here.is_main:
        folder.reopen(Path(out)) if resume == out else folder.prepare(Path(out), overwrite=False)
    world.gather_numbers([0.0], here)
    return run(
        Request(
            recipe=Recipe.model_validate(recipe),
            out=Path(out),
            keep_masters=keep_masters,
            resume=source,
            stop_after=stop_after,
        )
    )


def refusal(**arguments: Any) -> str:
    """What `train` refuses with, on this rank."""
    try:
        train(**arguments)
    except SamestepError as error:
        return str(error)
    return "not refused"


def cannot_save(recipe: dict[str, Any], out: str) -> str:
    """What a run says that finds a file where its checkpoints should go."""
    here = world.start(timeout_seconds=60)
    if here.is_main:
        folder.prepare(Path(out), overwrite=False)
        (Path(out) / store.FOLDER).write_text("in the way")
    world.gather_numbers([0.0], here)
    try:
        run(Request(recipe=Recipe.model_validate(recipe), out=Path(out)))
    except SamestepError as error:
        return str(error)
    return "not refused"


def full_disk(recipe: dict[str, Any], out: str, rank: int, bytes_left: int) -> str:
    """What a run that goes on in `out` says on this rank when no file of one rank may grow beyond so many bytes."""
    here = world.start(timeout_seconds=60)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, before[1]))
    try:
        return refusal(recipe=recipe, out=out, resume=out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def late_for_a_checkpoint(out: str) -> str:
    """Rank 1 comes too late to save: what rank 0 says of it."""
    here = world.start(timeout_seconds=60)
    checked = Recipe.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d"}, "engine": {"timeout_seconds": 2}, "train": {"steps": 1}}
    )
    nothing: Any = None
    course = Course(recipe=checked, plan=nothing, loader=nothing)
    checkpoints = Checkpoints(course, nothing, Path(out), here)
    if not here.is_main:
        time.sleep(4)
        return ""
    try:
        checkpoints.save(1)
    except SamestepError as error:
        return str(error)
    return "not refused"


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
