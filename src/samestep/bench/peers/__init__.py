"""Training loops that are not ours, for the same work: the same initial weights, batches, dtypes, optimizer and loss.

Each is what somebody who knows the library would write by hand. The sum of the loss over a rank's label tokens is
divided by those of the whole global batch and multiplied by the ranks, since all of them average gradients over ranks:
so the gradient is that of the mean over all label tokens. What they do not do: the exact gradient norm, its record, and
the count of updates that rounding loses.
"""

from __future__ import annotations

import importlib
from typing import Any

from samestep.bench.timing import Parts
from samestep.recipe.schema import Recipe
from samestep.world import World

_MODULES = {
    "fsdp2": "fsdp2",
    "deepspeed": "deepspeed",
    "accelerate-fsdp": "accelerate_fsdp",
    "accelerate-deepspeed": "accelerate_deepspeed",
    "fabric": "fabric",
}


def make(name: str, recipe: Recipe, here: World, parts: Parts) -> Any:
    """The peer's loop, around the recipe's model. Only its own library is imported."""
    module = importlib.import_module(f"samestep.bench.peers.{_MODULES[name]}")
    return module.Loop(recipe, here, parts)
