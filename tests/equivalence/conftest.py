"""Runs of the equivalence tests, each made once per session."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samestep.data import Examples
from samestep.recipe.checks import findings
from samestep.recipe.schema import Recipe
from tests.equivalence.cases import save_model
from tests.equivalence.trajectories import Trajectory, joined, train

Run = Callable[..., Trajectory]
Models = Callable[..., str]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Gives the folder of a small model with the changes asked for, written once."""
    folders: dict[str, str] = {}

    def folder(**changes: Any) -> str:
        key = repr(sorted(changes.items()))
        if key not in folders:
            folders[key] = save_model(Path(tmp_path_factory.mktemp("model")), **changes)
        return folders[key]

    return folder


@pytest.fixture(scope="session")
def run(ranks: Any) -> Run:
    """Trains a recipe on its ranks and gives the trajectory; keeps those of `single`, which many tests compare with."""
    kept: dict[tuple[str, int, int], Trajectory] = {}

    def go(
        recipe: dict[str, Any], examples: Examples, *, timeout_seconds: float = 90.0, **arguments: Any
    ) -> Trajectory:
        checked = Recipe.model_validate(recipe)
        assert findings(checked) == []
        single = checked.engine.name == "single"
        places = repr(sorted((name, value if isinstance(value, str) else None) for name, value in arguments.items()))
        key = (json.dumps(recipe, sort_keys=True), hash(examples.tokens.tobytes()), hash(places))
        if key not in kept:
            size = 1 if single else checked.engine.ranks
            name = f"{checked.engine.name}+{checked.precision.regime} on {checked.engine.ranks} ranks"
            results = ranks.run(
                size, train, recipe=recipe, examples=examples, timeout_seconds=timeout_seconds, **arguments
            )
            trajectory = joined(name, results)
            if not single:
                return trajectory
            kept[key] = trajectory
        return kept[key]

    return go
