"""Checkpoints of runs that never ran: of a small model, with masters that are its weights and something added."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from samestep import models
from samestep.checkpoint import store
from samestep.checkpoint.manifest import stored_file
from samestep.checkpoint.tensors import write_tensors
from samestep.recipe import Recipe
from tests.small_runs import make_model, make_tokenizer
from tests.unit.checkpoint.small import manifest, shards

LORA: dict[str, Any] = {"rank": 2, "alpha": 6.0, "target_modules": ["q_proj", "down_proj"]}


def source(folder: Path, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """A stored model with a tokenizer that has a chat template."""
    make_model(dtype=dtype, **settings).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def recipe_of(model: dict[str, Any], **sections: Any) -> Recipe:
    return Recipe.model_validate({"model": model, "data": {"path": "none"}, "train": {"steps": 1}} | sections)


def checkpoint(folder: Path, recipe: Recipe) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of step 1 in the run folder `folder`, and the fp32 masters that are in it, by parameter."""
    generator = torch.Generator().manual_seed(5)
    masters = {
        name: p.detach().float() + 0.01 * torch.randn(p.shape, generator=generator)
        for name, p in models.load_model(recipe.model, seed=recipe.train.seed).named_parameters()
        if p.requires_grad
    }
    whole = {f"model.{name}": values for name, values in masters.items()}
    partial = store.begin(folder / "checkpoints", 1)
    write_tensors(partial, shards(whole))
    files = {path.name: stored_file(path) for path in partial.iterdir()}
    complete = replace(manifest(1, whole), recipe=recipe.model_dump(mode="json"), files=files)
    return store.publish(partial, complete, keep=1), masters
