"""Recipes from files, texts and other recipes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.recipe.document import Document, parse_text, read_file
from samestep.recipe.overrides import apply_overrides
from samestep.recipe.schema import OffloadParts, Recipe
from samestep.recipe.validation import validate


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in the YAML file at `path`, with "a.b=value" overrides set, checked, its paths absolute.

    Relative paths in the file and in overrides are relative to the file's folder. Raises RecipeError with all
    problems at once.
    """
    file = Path(path)
    recipe = parse(read_file(file), source=str(file), overrides=overrides)
    return absolute_paths(recipe, Path(os.path.abspath(file)).parent)


def parse(text: str, *, source: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML text. Paths stay as written. Raises RecipeError with all problems at once."""
    return validate(apply_overrides(parse_text(text, source), overrides))


def override(recipe: Recipe, overrides: Sequence[str], *, source: str = "recipe") -> Recipe:
    """`recipe` with "a.b=value" overrides set and checked again. Raises RecipeError with all problems at once."""
    return validate(apply_overrides(Document(source=source, data=recipe.model_dump()), overrides))


def absolute_paths(recipe: Recipe, folder: Path) -> Recipe:
    """`recipe` with its relative paths taken from `folder`.

    A model or tokenizer is a path when it exists in `folder` or begins like one (., .., ~ or /); else a hub id.
    """
    model: dict[str, Any] = {}
    for name in ("path", "tokenizer"):
        value = getattr(recipe.model, name)
        if value is not None and _is_local(value, folder):
            model[name] = _absolute(value, folder)
    data: dict[str, Any] = {}
    for name in ("path", "held_out"):
        value = getattr(recipe.data, name)
        if isinstance(value, str):
            data[name] = _absolute(value, folder)
    engine: dict[str, Any] = {}
    offload = recipe.engine.offload
    if isinstance(offload, OffloadParts) and offload.nvme_path:
        engine["offload"] = offload.model_copy(update={"nvme_path": _absolute(offload.nvme_path, folder)})
    sections = {"model": model, "data": data, "engine": engine}
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=changes) for name, changes in sections.items()}
    )


def _is_local(value: str, folder: Path) -> bool:
    first = value.split("/", 1)[0]
    return first in ("", ".", "..") or first.startswith("~") or os.path.exists(folder / value)


def _absolute(value: str, folder: Path) -> str:
    return os.path.abspath(folder / os.path.expanduser(value))
