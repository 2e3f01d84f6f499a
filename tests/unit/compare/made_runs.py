"""Run folders made by hand, as a run of samestep leaves them, for comparisons that run nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from samestep.recipe import Recipe, override, parse, resolved_text

RECIPE = """\
name: story
model: {path: ./m}
data: {path: d.jsonl}
engine: {ranks: 2, unit_classes: [Block]}
precision: {export_rounding: nearest}
train: {steps: 40, optimizer: {lr: 1e-5}, schedule: {name: constant}}
"""
ROLES = ("master", "compute", "gradient", "reduce", "moments")


def made_recipe(*settings: str) -> Recipe:
    return override(parse(RECIPE), list(settings))


def falling(updates: float) -> float:
    """A loss after so many updates: exponential decay, 4 at first and 2 in the end."""
    return 2.0 + 2.0 * math.exp(-updates / 12)


def made_run(
    folder: Path,
    *settings: str,
    loss: Callable[[float], float | None] = falling,
    steps: int = 40,
    done: bool = True,
    master: str = "float32",
    lost: float | None = 0.0,
    digest: str = "0",
    **changes: Any,
) -> Path:
    """A run of `RECIPE` with these settings. `changes` replace values in every step."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = made_recipe(*settings)
    (folder / "recipe.yaml").write_text(resolved_text(recipe))
    rows = []
    for n in range(1, steps + 1):
        value = loss(n - 1)
        row = {"step": n, "loss": value, "grad_norm": None if value is None else value / 2, "lr": 1e-5}
        row |= {"label_tokens": 100, "tokens": 200, "peak_memory_bytes": 3_000_000}
        row |= {"lost_update_share": lost if n % 10 == 1 else None, "unseen_update_share": None}
        rows.append(row | changes)
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    roles = {role: {"dtype": [master if role in ("master", "moments") else "bfloat16"], "reason": ""} for role in ROLES}
    precision = {
        "plan": {"regime": recipe.precision.regime, "roles": roles},
        "facts": {role: entry["dtype"] for role, entry in roles.items()},
        "forecast": {"lost_share": lost},
    }
    (folder / "precision.json").write_text(json.dumps(precision))
    if done:
        summary = {
            "status": "completed",
            "steps": steps,
            "evaluations": [],
            "weights_sha256": digest,
            "seconds": 1.0,
            "machine": {"device": "cpu"},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def csv_log(path: Path, losses: Sequence[Any], header: str = "step,loss") -> Path:
    lines = [header, *(f"{n},{loss}" for n, loss in enumerate(losses, start=1))]
    path.write_text("\n".join(lines) + "\n")
    return path
