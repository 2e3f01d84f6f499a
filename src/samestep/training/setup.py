"""What a run needs besides an engine, worked out from the recipe once data and model are known."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from samestep import models
from samestep.data import Loader, Prepared
from samestep.errors import DataError, ModelError
from samestep.recipe.schema import Recipe

_MOST_STEPS = 10_000_000


def training_loader(data: Prepared, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Loader:
    """Cuts the training data into the recipe's steps. Raises DataError when there is too little."""
    return Loader(
        data.train,
        ranks=recipe.engine.ranks,
        micro_batch=recipe.train.micro_batch,
        accumulation=recipe.train.accumulation,
        seed=recipe.train.seed,
        shuffle=recipe.data.shuffle,
        drop_last=recipe.data.drop_last,
        pad_id=tokenizer.pad_token_id or 0,
    )


def evaluation_loader(data: Prepared, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Loader | None:
    """Cuts the held-out data into batches that hold every row once; None without held-out data."""
    if data.held_out is None:
        return None
    return Loader(
        data.held_out,
        ranks=recipe.engine.ranks,
        micro_batch=recipe.train.micro_batch,
        accumulation=1,
        seed=0,
        shuffle=False,
        drop_last=False,
        pad_id=tokenizer.pad_token_id or 0,
        idle_ranks=True,
    )


def total_steps(recipe: Recipe, loader: Loader) -> int:
    """Optimizer steps of the whole run."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    assert recipe.train.epochs is not None
    steps = max(1, math.ceil(recipe.train.epochs * loader.steps_per_epoch))
    if steps > _MOST_STEPS:
        raise DataError(
            f"{recipe.train.epochs:g} epochs are {steps:,} steps; at most {_MOST_STEPS:,} can be made",
            where="train.epochs",
            remedy="Ask for fewer.",
        )
    return steps


def check_embeddings(model: torch.nn.Module, data: Prepared) -> None:
    """Raises ModelError when the data has tokens, or rows so long, that the model has no embedding for."""
    largest = max(part.largest_token_id for part in (data.train, data.held_out) if part is not None)
    size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if largest >= size:
        raise ModelError(
            f"the tokenizer makes token {largest}, but the model's vocabulary has {size}",
            where="model.tokenizer",
            remedy="Use the tokenizer that belongs to the model.",
        )
    longest = max(part.longest for part in (data.train, data.held_out) if part is not None)
    learned = models.learned_positions(model)
    if learned is not None and longest > learned:
        raise ModelError(
            f"a row has {longest} tokens, but the model has learned {learned} positions",
            where="data.max_tokens",
            remedy=f"Set it to {learned} or less.",
        )


def resolved(recipe: Recipe, model: torch.nn.Module, steps: int) -> Recipe:
    """The recipe with what was only known now: steps, shard units and group sizes."""
    engine = recipe.engine
    units = sorted({type(m).__name__ for m in models.unit_modules(model, engine.unit_classes)})
    changes: dict[str, Any] = {"unit_classes": units or None}
    if engine.name == "hsdp":
        changes["shard_ranks"] = engine.sharing_ranks
    precision = recipe.precision
    if precision.export_rounding is None:
        rounding = "stochastic" if precision.regime.endswith("stochastic") else "nearest"
        precision = precision.model_copy(update={"export_rounding": rounding})
    return recipe.model_copy(
        update={
            "precision": precision,
            "engine": engine.model_copy(update=changes),
            "train": recipe.train.model_copy(update={"steps": steps, "epochs": None}),
        }
    )
