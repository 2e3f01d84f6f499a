"""Checkpoints of runs as those of other tools, in one process and without ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from samestep import models, optim
from samestep.checkpoint.converting import torch_state, universal
from samestep.checkpoint.converting.contents import Contents, Group
from samestep.checkpoint.frozen import frozen_sha256, refuse_others
from samestep.checkpoint.importing.match import target_of
from samestep.checkpoint.manifest import Manifest, intact_manifest, stored_recipe
from samestep.checkpoint.state import master_names
from samestep.engines import build
from samestep.errors import CheckpointError, OutputError
from samestep.recipe.schema import Recipe
from samestep.training import folder

FORMATS: dict[str, Callable[[Contents, Path], None]] = {
    "deepspeed-universal": universal.write,
    "torch": torch_state.write,
}


def convert(source: Path, out: Path, *, to: str, overwrite: bool) -> list[str]:
    """Writes a checkpoint folder in another format, one of FORMATS, into the folder `out`.

    What that format has no place for is returned, in words. Loads the run's model only where parts of it are frozen or
    buffers belong to it. Raises CheckpointError for a damaged checkpoint, OutputError when `out` is there already and
    not to be replaced, ModelError when the model is needed and cannot be loaded.
    """
    if out.exists() and not overwrite:
        raise OutputError("is there already.", where=str(out), remedy="Choose another --out, or give --overwrite.")
    if out.exists() and not any((out / name).is_file() for name in (torch_state.FILE, "latest_universal")):
        raise OutputError("is not a converted checkpoint.", where=str(out), remedy="--overwrite replaces those only.")
    manifest = intact_manifest(source)
    contents = _contents(source, manifest, stored_recipe(source, manifest))
    if to == "deepspeed-universal" and contents.keys != ["exp_avg", "exp_avg_sq"]:
        raise CheckpointError(
            f"has {' and '.join(contents.keys) or 'no optimizer state'}; universal checkpoints are of AdamW",
            where=str(source),
            remedy="Convert it --to torch.",
        )
    folder.write_folder(out, partial(FORMATS[to], contents))
    return contents.left


def _contents(source: Path, manifest: Manifest, recipe: Recipe) -> Contents:
    model = models.load_meta_model(recipe.model, attention=recipe.model.attention)
    target = target_of(model, keys=(), dtype=torch.float32)
    if strange := sorted(master_names(list(manifest.tensors)) ^ target.trainable.keys()):
        raise CheckpointError(f"trains other parameters than its recipe's model: {strange[0]}", where=str(source))
    state = model.state_dict()
    ties = {name: target.aliases[name] for name in state if target.aliases.get(name) in target.trainable}
    missing = [name for name in state if name not in target.trainable and name not in ties]
    return Contents(
        folder=source,
        manifest=manifest,
        groups=_groups(recipe, model, manifest.step),
        others=_loaded(recipe, missing, manifest, source),
        ties=ties,
        compute=build.resolve_plan(recipe, model).compute,
    )


def _groups(recipe: Recipe, model: nn.Module, step: int) -> list[Group]:
    """The optimizer's parameter groups as torch's own optimizer keeps them, with the learning rate of the step."""
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    names = {id(tensor): name for name, tensor in named.items()}
    optimizer = optim.factory(recipe.train.optimizer)(named)
    total = recipe.train.steps or step
    rate = optim.lr_at(max(1, step), lr=recipe.train.optimizer.lr, schedule=recipe.train.schedule, total_steps=total)
    return [
        Group(
            settings={**{key: value for key, value in group.items() if key != "params"}, "lr": rate},
            names=[names[id(tensor)] for tensor in group["params"]],
        )
        for group in optimizer.param_groups
    ]


def _loaded(recipe: Recipe, names: list[str], manifest: Manifest, source: Path) -> dict[str, torch.Tensor]:
    """The entries of the run's model, as it was loaded, that its checkpoints do not have."""
    if not names:
        return {}
    model = models.load_model(recipe.model, seed=recipe.train.seed)
    refuse_others(frozen_sha256(model), manifest.frozen_sha256, str(source))
    state = model.state_dict()
    return {name: state[name] for name in names}
