"""What a variant's run left, as the comparison reads it. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.compare.cause import facts_of
from samestep.compare.variants import Variant
from samestep.errors import OutputError, RecipeError
from samestep.recipe import Recipe, parse
from samestep.training.folder import read_lines


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One variant's run, or the log of another tool. `steps` are the objects of steps.jsonl, `summary` is that of
    summary.json ({} where a run did not end), `precision` that of precision.json. `recipe` is the resolved one; None
    for a log. `notes` say what a reader has to know of it."""

    variant: Variant
    run: Path
    steps: list[dict[str, Any]]
    summary: dict[str, Any]
    recipe: Recipe | None = None
    precision: dict[str, Any] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def masters(self) -> Path:
        """The file of the masters at the end of the run."""
        return self.run / "masters.safetensors"

    @property
    def device(self) -> str | None:
        return self.summary.get("machine", {}).get("device")

    @property
    def last_loss(self) -> float | None:
        return self.steps[-1]["loss"] if self.steps else None

    @property
    def lost_update_share(self) -> float | None:
        """Mean of the shares that were measured; None when none was."""
        return self._mean("lost_update_share")

    @property
    def facts(self) -> dict[str, Any] | None:
        return facts_of(self.precision, self.lost_update_share)

    def described(self) -> dict[str, Any]:
        """The variant's object in compare.json. `held_out` is the held-out loss before step 1 and at the end."""
        evaluations = self.summary.get("evaluations")
        memory = [s["peak_memory_bytes"] for s in self.steps if s.get("peak_memory_bytes") is not None]
        facts = self.facts
        return {
            "name": self.variant.name,
            "engine": self.variant.engine,
            "precision": self.variant.precision,
            "overrides": list(self.variant.overrides),
            "seed": self.variant.seed,
            "run": str(self.run),
            "steps": len(self.steps),
            "first_loss": self.steps[0]["loss"] if self.steps else None,
            "last_loss": self.last_loss,
            "held_out": {"before": evaluations[0]["loss"], "after": evaluations[-1]["loss"]} if evaluations else None,
            "lost_update_share": self.lost_update_share,
            "unseen_update_share": self._mean("unseen_update_share"),
            "forecast_lost_share": facts["forecast_lost_share"] if facts else None,
            "peak_memory_bytes": max(memory) if memory else None,
            "weights_sha256": self.summary.get("weights_sha256"),
            "device": self.device,
            "seconds": self.summary.get("seconds"),
            "roles": self._roles(),
            "notes": list(self.notes),
        }

    def _mean(self, quantity: str) -> float | None:
        values = [s[quantity] for s in self.steps if s.get(quantity) is not None]
        return sum(values) / len(values) if values else None

    def _roles(self) -> dict[str, Any] | None:
        """Planned and observed dtypes of every role; observed is None before the first step."""
        if not self.precision:
            return None
        seen = self.precision.get("facts")
        return {
            role: {"planned": entry["dtype"], "observed": seen.get(role) if seen else None}
            for role, entry in self.precision["plan"]["roles"].items()
        }


def read_outcome(variant: Variant, run: Path, notes: tuple[str, ...] = ()) -> Outcome:
    """Reads a finished run's folder. Raises OutputError when it is not complete."""
    return Outcome(
        variant=variant,
        run=run,
        steps=read_lines(run / "steps.jsonl"),
        summary=_read_object(run / "summary.json"),
        recipe=read_recipe(run),
        precision=read_precision(run),
        notes=notes,
    )


def read_recipe(run: Path) -> Recipe | None:
    """The resolved recipe of a run folder, its paths as written; None when there is none that can be read."""
    try:
        return parse((run / "recipe.yaml").read_text(encoding="utf-8"))
    except (RecipeError, OSError, ValueError):
        return None


def read_precision(run: Path) -> dict[str, Any] | None:
    """The content of a run folder's precision.json; None without one. Raises OutputError when it cannot be read."""
    path = run / "precision.json"
    if not path.exists():
        return None
    content = _read_object(path)
    if not isinstance(content.get("plan"), dict) or not isinstance(content["plan"].get("roles"), dict):
        raise OutputError("has no plan.", where=str(path), remedy="Is it of a run of samestep?")
    return content


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot be read: {error}.", where=str(path)) from error
    if not isinstance(content, dict):
        raise OutputError("does not hold an object.", where=str(path), remedy="Is it of a run of samestep?")
    return content
