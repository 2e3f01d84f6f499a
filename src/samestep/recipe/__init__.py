"""Recipes: what a run does, as checked, frozen data. No torch, no environment.

`load` reads a file, `override` changes single fields, `resolved_text` writes one that reproduces the run.
"""

from __future__ import annotations

from samestep.recipe.loading import load, override, parse
from samestep.recipe.schema import (
    Checkpoint,
    Data,
    Engine,
    HubData,
    Log,
    Lora,
    LossScale,
    Model,
    OffloadParts,
    Optimizer,
    Precision,
    Recipe,
    Schedule,
    Train,
)
from samestep.recipe.writing import json_schema, resolved_text, template_text

__all__ = [
    "Checkpoint",
    "Data",
    "Engine",
    "HubData",
    "Log",
    "Lora",
    "LossScale",
    "Model",
    "OffloadParts",
    "Optimizer",
    "Precision",
    "Recipe",
    "Schedule",
    "Train",
    "json_schema",
    "load",
    "override",
    "parse",
    "resolved_text",
    "template_text",
]
