"""The end of a run: the trained weights, and what an export has of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from samestep import models
from samestep.checkpoint import export as exports
from samestep.checkpoint.dropped import Dropped
from samestep.checkpoint.export import Put, Target, Wanted, gather_weights, keep_what_is_exported
from samestep.checkpoint.frozen import refuse_others
from samestep.checkpoint.manifest import intact_manifest, stored_recipe
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
    """A run whose `steps` steps are done, on one rank. `adapters` are those that it began with, on the main rank."""

    recipe: Recipe
    plan: Plan
    engine: Engine
    world: World
    steps: int
    out: Path
    adapters: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def random(self) -> Callable[[str], Stream] | None:
        """A parameter's random numbers for a stochastic export; None when it rounds to nearest."""
        return _random(self.recipe, self.steps)


def export(
    run: Trained, tokenizer: PreTrainedTokenizerBase, *, keep_masters: bool
) -> tuple[str | None, Dropped | None]:
    """Writes RUN/export when the recipe asks for it, and RUN/masters.safetensors with `keep_masters`; every rank must
    call it.

    On the main rank gives the digest of all masters, and what the export drops. Raises OutputError; RunError when the
    model that the masters belong to can no longer be loaded: then they are left in masters.safetensors.
    """
    asked = run.world.is_main and run.recipe.train.export
    dropped = Dropped()
    target, gone = _target(run, dropped) if asked else (None, None)
    masters = run.out / "masters.safetensors" if keep_masters or gone else None

    def gathered(put: Put | None = None) -> str | None:
        return gather_weights(run.engine, run.world, put=put, masters=masters)

    if target is None:
        try:
            digest = gathered()
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror or error}", where=str(masters)) from error
        if gone is not None:
            raise RunError(
                f"the model can no longer be loaded, so nothing is exported ({gone}); the trained weights are kept",
                where=str(masters),
                remedy="They are the masters, by parameter name, in safetensors.",
            ) from gone
        return digest, None
    digests: list[str | None] = []

    def fill(place: Path) -> None:
        with target.into(place) as put:
            digests.append(gathered(put))
        tokenizer.save_pretrained(place)

    folder.write_folder(run.out / "export", fill)
    return digests[0], dropped


def export_checkpoint(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    merge: bool | None = None,
    max_bytes: int = exports.FILE_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes what a run would have exported at a checkpoint into the folder `out`, in this one process.

    `dtype` and `merge` instead of the recipe's export dtype and export_merged; `max_bytes` of tensors in a file. Raises
    CheckpointError for a damaged checkpoint, OutputError when `out` is there already and not to be replaced, ModelError
    when the run's model cannot be loaded any more.
    """
    _refuse_place(out, overwrite=overwrite)
    manifest = intact_manifest(source)
    recipe = stored_recipe(source, manifest)
    if merge and recipe.model.lora is None:
        raise CheckpointError("has no adapters to merge", where=str(source), remedy="Leave out --merge.")
    tokenizer = models.load_tokenizer(recipe.model)
    random = _random(recipe, manifest.step)
    target = exports.open_target(_wanted(recipe, random, dtype=dtype, merge=merge, max_bytes=max_bytes))
    names = sorted(master_names(list(manifest.tensors)))
    for name in names:
        if name not in target.shapes:
            raise CheckpointError(f"the model has no parameter {name}", where=str(source))
        if target.shapes[name] != tuple(manifest.tensors[master_key(name)].shape):
            raise CheckpointError(f"{name} has another shape in the model", where=str(source))
    # Reading them all is for nothing where the checkpoint does not say what they were.
    if manifest.frozen_sha256 is not None and (frozen := target.frozen_sha256()) is not None:
        refuse_others(frozen, manifest.frozen_sha256, str(source))

    def fill(place: Path) -> None:
        with target.into(place) as put:
            masters = {master_key(name): manifest.tensors[master_key(name)] for name in names}
            for name, (_, whole) in zip(names, whole_tensors(source, masters), strict=True):
                put(name, whole)
        tokenizer.save_pretrained(place)

    folder.write_folder(out, fill)


def _refuse_place(out: Path, *, overwrite: bool) -> None:
    """Raises OutputError when a model is not to be written to this place."""
    if out.exists() and not overwrite:
        raise OutputError("is there already.", where=str(out), remedy="Choose another --out, or give --overwrite.")
    models_own = ("config.json", "adapter_config.json")
    if out.exists() and not any((out / name).is_file() for name in models_own):
        raise OutputError("is not a model's folder.", where=str(out), remedy="--overwrite replaces models only.")


def _wanted(
    recipe: Recipe,
    random: Callable[[str], Stream] | None,
    *,
    dtype: str | None = None,
    merge: bool | None = None,
    **others: Any,
) -> Wanted:
    lora = recipe.model.lora
    return Wanted(
        model=recipe.model,
        seed=recipe.train.seed,
        dtype=dtype or recipe.precision.export_dtype,
        merge=(lora is not None and lora.export_merged) if merge is None else merge,
        random=random,
        **others,
    )


def exported_losses(run: Trained, trained_loss: float | None, evaluate: Callable[[], float]) -> dict[str, Any]:
    """The held-out loss of the trained weights and of what the export has of them; empty where the two are the same,
    and for merged adapters, whose sum with the model's weights no engine holds.

    Every rank must call it, and nothing may be done with the engine after it: its masters are rounded.
    """
    dtype = run.recipe.precision.export_dtype
    dtypes = {p.name: p.loaded if dtype == "loaded" else DTYPES[dtype] for p in run.plan.trainable}
    merged = run.recipe.model.lora is not None and run.recipe.model.lora.export_merged
    if merged or not run.recipe.train.export or all(d.itemsize >= run.plan.master.itemsize for d in dtypes.values()):
        return {}
    keep_what_is_exported(run.engine, dtypes, run.random)
    return {"trained_loss": trained_loss, "exported_loss": folder.finite(evaluate())}


def _random(recipe: Recipe, steps: int) -> Callable[[str], Stream] | None:
    """A parameter's random numbers for a stochastic export after `steps` steps; None when it rounds to nearest."""
    if recipe.precision.export_rounding != "stochastic":
        return None
    return lambda name: stream(recipe.train.seed, steps, name, "export")


def _target(run: Trained, dropped: Dropped) -> tuple[Target | None, ModelError | None]:
    """Where the run's model goes, or why it cannot be loaded again: what was trained is still here then."""
    try:
        return exports.open_target(_wanted(run.recipe, run.random, dropped=dropped, adapters=run.adapters)), None
    except ModelError as error:
        return None, error
