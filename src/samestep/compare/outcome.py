"""What a variant's run left, as the comparison reads it. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.compare.variants import Variant
from samestep.errors import OutputError
from samestep.training.folder import read_lines


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One variant's run. `steps` are the objects of steps.jsonl, `summary` that of summary.json."""

    variant: Variant
    run: Path
    steps: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def masters(self) -> Path:
        """The file of the masters at the end of the run."""
        return self.run / "masters.safetensors"

    @property
    def device(self) -> str:
        return self.summary["machine"]["device"]

    @property
    def lost_update_share(self) -> float | None:
        """Mean of the shares that were measured; None when none was."""
        shares = [s["lost_update_share"] for s in self.steps if s["lost_update_share"] is not None]
        return sum(shares) / len(shares) if shares else None

    def described(self) -> dict[str, Any]:
        """The variant's object in compare.json. `held_out` is the held-out loss before step 1 and at the end."""
        evaluations = self.summary["evaluations"]
        return {
            "name": self.variant.name,
            "engine": self.variant.engine,
            "precision": self.variant.precision,
            "overrides": list(self.variant.overrides),
            "run": str(self.run),
            "steps": len(self.steps),
            "first_loss": self.summary["first_loss"],
            "last_loss": self.summary["last_loss"],
            "held_out": {"before": evaluations[0]["loss"], "after": evaluations[-1]["loss"]} if evaluations else None,
            "lost_update_share": self.lost_update_share,
            "weights_sha256": self.summary["weights_sha256"],
            "device": self.device,
            "seconds": self.summary["seconds"],
        }


def read_outcome(variant: Variant, run: Path) -> Outcome:
    """Reads a finished run's folder. Raises OutputError when it is not complete."""
    summary = run / "summary.json"
    try:
        content = json.loads(summary.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot be read: {error}.", where=str(summary)) from error
    return Outcome(variant=variant, run=run, steps=read_lines(run / "steps.jsonl"), summary=content)
