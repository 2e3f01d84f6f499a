"""The end of a run: the trained weights, and what an export has of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from samestep import models
from samestep.checkpoint.dropped import Dropped
from samestep.checkpoint.export import (
    cast_for_export,
    gather_weights,
    keep_what_is_exported,
    round_into,
    write_export,
)
from samestep.checkpoint.manifest import damages, read_manifest
from samestep.checkpoint.state import master_key, master_names
from samestep.checkpoint.tensors import whole_tensors
from samestep.dtypes import DTYPES
from samestep.engines.protocol import Engine
from samestep.errors import CheckpointError, ModelError, OutputError, RunError
from samestep.precision.plan import Plan
from samestep.recipe.schema import Recipe
from samestep.rounding import Stream, stream
from samestep.training import folder
from samestep.world import World


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run whose `steps` steps are done, on one rank."""

    recipe: Recipe
    plan: Plan
    engine: Engine
    world: World
    steps: int
    out: Path

    @property
    def random(self) -> Callable[[str], Stream] | None:
        """A parameter's random numbers for a stochastic export; None when it rounds to nearest."""
        return _random(self.recipe, self.steps)


def export(
    run: Trained, tokenizer: PreTrainedTokenizerBase, *, keep_masters: bool
) -> tuple[str | None, Dropped | None]:
    """Writes RUN/export when the recipe asks for it, and RUN/masters.safetensors with `keep_masters`; every rank must
    call it.

    On the main rank gives the digest of all masters, and what the export drops. Raises RunError when the model that the
    masters belong to can no longer be loaded: then they are left in masters.safetensors.
    """
    asked = run.world.is_main and run.recipe.train.export
    model, gone = _model(run.recipe) if asked else (None, None)
    dropped, loaded, into = Dropped(), _tensors(model, trainable=True), {}
    if model is not None:
        loaded = {name: tensor.clone() for name, tensor in loaded.items()}
        cast_for_export(model, run.recipe.precision.export_dtype)
        into = _tensors(model)
    masters = run.out / "masters.safetensors" if keep_masters or gone else None
    digest = gather_weights(
        run.engine,
        run.world,
        into=into,
        random=run.random,
        masters=masters,
        counted=lambda name, whole: dropped.add(loaded=loaded.pop(name), trained=whole, exported=into[name]),
    )
    if gone is not None:
        raise RunError(
            f"the model can no longer be loaded, so nothing is exported ({gone}); the trained weights are kept",
            where=str(masters),
            remedy="They are the masters, by parameter name, in safetensors.",
        ) from gone
    if model is None:
        return digest, None
    folder.write_folder(run.out / "export", partial(write_export, model, tokenizer))
    return digest, dropped


def export_checkpoint(source: Path, out: Path, *, dtype: str | None, overwrite: bool) -> None:
    """Writes what a run would have exported at a checkpoint into the folder `out`, in this one process.

    `dtype` instead of the recipe's export dtype. Raises CheckpointError for a damaged checkpoint, OutputError when
    `out` is there already and not to be replaced, ModelError when the run's model cannot be loaded any more.
    """
    if out.exists() and not overwrite:
        raise OutputError("is there already.", where=str(out), remedy="Choose another --out, or give --overwrite.")
    if out.exists() and not (out / "config.json").is_file():
        raise OutputError("is not a model's folder.", where=str(out), remedy="--overwrite replaces models only.")
    manifest = read_manifest(source)
    if found := damages(source, manifest):
        raise CheckpointError(f"is damaged: {found[0]}", where=str(source), remedy="Take another checkpoint.")
    recipe = Recipe.model_validate(manifest.recipe)
    model = models.load_model(recipe.model, seed=recipe.train.seed)
    tokenizer = models.load_tokenizer(recipe.model)
    cast_for_export(model, dtype or recipe.precision.export_dtype)
    into = _tensors(model)
    random = _random(recipe, manifest.step)
    names = sorted(master_names(list(manifest.tensors)))
    if strange := [name for name in names if name not in into]:
        raise CheckpointError(f"the model has no parameter {strange[0]}", where=str(source))
    masters = {master_key(name): manifest.tensors[master_key(name)] for name in names}
    for name, (_, whole) in zip(names, whole_tensors(source, masters), strict=True):
        if whole.shape != into[name].shape:
            raise CheckpointError(f"{name} has another shape in the model", where=str(source))
        round_into(into[name], whole, random(name) if random else None)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder.write_folder(out, partial(write_export, model, tokenizer))


def exported_losses(run: Trained, trained_loss: float | None, evaluate: Callable[[], float]) -> dict[str, Any]:
    """The held-out loss of the trained weights and of what the export has of them; empty where the two are the same.

    Every rank must call it, and nothing may be done with the engine after it: its masters are rounded.
    """
    dtype = run.recipe.precision.export_dtype
    dtypes = {p.name: p.loaded if dtype == "loaded" else DTYPES[dtype] for p in run.plan.trainable}
    if not run.recipe.train.export or all(d.itemsize >= run.plan.master.itemsize for d in dtypes.values()):
        return {}
    keep_what_is_exported(run.engine, dtypes, run.random)
    return {"trained_loss": trained_loss, "exported_loss": folder.finite(evaluate())}


def _random(recipe: Recipe, steps: int) -> Callable[[str], Stream] | None:
    """A parameter's random numbers for a stochastic export after `steps` steps; None when it rounds to nearest."""
    if recipe.precision.export_rounding != "stochastic":
        return None
    return lambda name: stream(recipe.train.seed, steps, name, "export")


def _model(recipe: Recipe) -> tuple[nn.Module | None, ModelError | None]:
    """The model as the run loaded it, or why it cannot be loaded again: what was trained is still here then."""
    try:
        return models.load_model(recipe.model, seed=recipe.train.seed), None
    except ModelError as error:
        return None, error


def _tensors(model: nn.Module | None, *, trainable: bool = False) -> dict[str, torch.Tensor]:
    if model is None:
        return {}
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad or not trainable}
