"""Checkpoints of other tools into ours, in one process and without ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep import models
from samestep.checkpoint import store
from samestep.checkpoint.importing import recognise
from samestep.checkpoint.importing.match import Matched, match, same_value, target_of
from samestep.checkpoint.importing.source import Source, Stored, stored
from samestep.checkpoint.importing.writing import write
from samestep.checkpoint.manifest import Manifest, StoredTensor, stored_file
from samestep.checkpoint.state import master_key, state_key
from samestep.data import prepare
from samestep.dtypes import dtype_name
from samestep.engines import build
from samestep.errors import CheckpointError, OutputError, SamestepError
from samestep.precision.plan import Plan, described
from samestep.recipe.schema import Optimizer, Recipe
from samestep.training import setup
from samestep.training.checkpoints import Course
from samestep.training.machine import versions


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an import made: the checkpoint's folder, and in words what is another than in the source (`changed`) and
    what of it is not there (`left`)."""

    folder: Path
    kind: str
    step: int
    updates: int
    parameters: int
    changed: list[str]
    left: list[str]


def import_checkpoint(
    path: Path,
    recipe: Recipe,
    out: Path,
    *,
    kind: str | None = None,
    step: int | None = None,
    order: Path | None = None,
) -> Imported:
    """Writes the checkpoint of another tool at `path` as one of this recipe's run, into `out`/checkpoints.

    `kind` is what to read it as, `step` the step of the run that it is taken for (by default the source's own count),
    `order` a file with the names of the optimizer's parameters by position, one a line. Holds one tensor at a time, the
    source's largest files where they are not in a format that can be mapped, and the recipe's model when parts of it
    are frozen. Raises SamestepError, and leaves nothing then.
    """
    if out.is_dir() and any(out.iterdir()):
        raise OutputError("is not empty.", where=str(out), remedy="Choose another --out.")
    source = recognise.read(path, kind)
    course, model = _course(recipe)
    recipe, plan = course.recipe, course.plan
    try:
        target = target_of(model, keys=_keys(recipe.train.optimizer), dtype=plan.master)
        matched = match(source, target, order=_order(order))
        updates = _updates(source, matched, recipe, step)
        done = step if step is not None else source.step if source.step is not None else updates
        _compare_frozen(recipe, matched)
        tensors = _tensors(matched, plan)
        manifest = _manifest(course, source, tensors, step=done, updates=updates)
        folder = _write(out, manifest, tensors)
    except CheckpointError as error:
        if error.where is None:
            raise CheckpointError(error.what, where=str(path), remedy=error.remedy) from error
        raise
    return Imported(
        folder=folder,
        kind=source.kind,
        step=done,
        updates=updates,
        parameters=len(matched.weights),
        changed=[*_changed(source, matched, recipe, plan)],
        left=[*matched.left, f"the data position: the run goes on with row order and step {done + 1} of the recipe"],
    )


def _course(recipe: Recipe) -> tuple[Course, nn.Module]:
    """What a run of the recipe would be, but for its weights, and its model on the meta device."""
    models.check_config(recipe.model)
    tokenizer = models.load_tokenizer(recipe.model)
    loader = setup.training_loader(prepare(recipe.data, tokenizer, seed=recipe.train.seed), recipe, tokenizer)
    model = models.load_meta_model(recipe.model, attention=recipe.model.attention)
    resolved = setup.resolved(recipe, model, setup.total_steps(recipe, loader))
    return Course(recipe=resolved, plan=build.resolve_plan(resolved, model), loader=loader), model


def _keys(optimizer: Optimizer) -> tuple[str, ...]:
    if optimizer.name == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if optimizer.momentum else ()


def _order(path: Path | None) -> list[str] | None:
    if path is None:
        return None
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path), remedy="Give a text file.") from error


def _updates(source: Source, matched: Matched, recipe: Recipe, step: int | None) -> int:
    if matched.updates is not None:
        return matched.updates
    known = source.step if step is None else step
    if recipe.train.optimizer.name == "adamw":
        raise CheckpointError(
            "does not say how many updates its optimizer made, which AdamW needs to go on",
            remedy="Save the whole state dict of the optimizer.",
        )
    if known is None:
        raise CheckpointError("does not say of which step it is", remedy="Say it with --step.")
    return known


def _compare_frozen(recipe: Recipe, matched: Matched) -> None:
    """Frozen weights are no part of a checkpoint: those of the source must be those that the run will have."""
    if not matched.frozen:
        return
    model = models.load_model(recipe.model, seed=recipe.train.seed)
    ours = dict(model.named_parameters())
    for name, theirs in matched.frozen.items():
        if not same_value(ours[name].detach(), theirs.read()):
            raise CheckpointError(
                f"has another {name} than the recipe's model, and the recipe freezes it",
                remedy="Give the model that was trained as model.path.",
            )


def _tensors(matched: Matched, plan: Plan) -> dict[str, Stored]:
    tensors = {master_key(name): weight for name, weight in matched.weights.items()}
    for name, state in matched.states.items():
        tensors |= {state_key(name, key): value for key, value in state.items()}
    if plan.update == "compensated":
        for name, weight in matched.weights.items():
            tensors[state_key(name, "compensation")] = stored(torch.zeros((), dtype=plan.master).expand(weight.shape))
    return tensors


def _manifest(course: Course, source: Source, tensors: Mapping[str, Stored], *, step: int, updates: int) -> Manifest:
    return Manifest(
        step=step,
        updates=updates,
        engine=source.kind,
        ranks=source.ranks,
        regime=course.recipe.precision.regime,
        rows_per_step=course.loader.rows_per_step,
        data_sha256=course.loader.examples.sha256,
        loss_scale=None,
        moved=[],
        tensors={
            name: StoredTensor(shape=list(tensor.shape), dtype=dtype_name(tensor.dtype))
            for name, tensor in tensors.items()
        },
        recipe=course.recipe.model_dump(mode="json"),
        plan=described(course.plan),
        versions={**versions(), **{f"{name} of the source": version for name, version in source.versions.items()}},
    )


def _write(out: Path, manifest: Manifest, tensors: Mapping[str, Stored]) -> Path:
    checkpoints = out / store.FOLDER
    partial = store.begin(checkpoints, manifest.step)
    try:
        write(partial, tensors)
        files = {file.name: stored_file(file) for file in sorted(partial.iterdir())}
        return store.publish(partial, replace(manifest, files=files), keep=1)
    except (SamestepError, OSError) as error:
        store.abandon(partial)
        for empty in (checkpoints, out):
            with contextlib.suppress(OSError):
                empty.rmdir()
        if isinstance(error, OSError):
            raise OutputError(f"cannot be written: {error.strerror}", where=str(partial)) from error
        raise


def _changed(source: Source, matched: Matched, recipe: Recipe, plan: Plan) -> Iterator[str]:
    """What the run will do otherwise than the source did."""
    if others := sorted(dtype_name(dtype) for dtype in matched.dtypes - {plan.master}):
        yield f"masters are {dtype_name(plan.master)} now, of the values that were {' and '.join(others)}"
    if plan.update == "compensated":
        yield "the compensation of low-kahan starts at zero"
    optimizer = recipe.train.optimizer
    wanted: dict[str, Any] = {"weight_decay": optimizer.weight_decay}
    wanted |= {"betas": tuple(optimizer.betas), "eps": optimizer.eps} if optimizer.name == "adamw" else {}
    wanted |= {"momentum": optimizer.momentum} if optimizer.name == "sgd" else {}
    for key, ours in wanted.items():
        theirs = {_plain(group[key]) for group in source.settings if key in group}
        if key == "weight_decay":
            theirs -= {0.0} if ours else set()
        if theirs and theirs != {ours}:
            yield f"{key} was {' and '.join(map(str, sorted(theirs)))}, the recipe's {ours} counts"
    if recipe.train.steps is not None and source.step is not None and source.step >= recipe.train.steps:
        yield f"the recipe has {recipe.train.steps} steps, and {source.step} are done: nothing is left to train"


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) else value
