"""What a run writes beside its steps: the precision report and the summary."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from samestep.data import PreparationReport
from samestep.dtypes import dtype_name
from samestep.precision.facts import Facts, Violation
from samestep.precision.plan import Plan, described
from samestep.recipe.schema import Recipe
from samestep.training import folder, machine
from samestep.training.monitor import Shares


def upcast_sentence(plan: Plan, *, shared_by: int) -> str:
    """What was upcast and what it costs, and what was rounded, for people. `shared_by` is the number of ranks that
    share one master copy."""
    total = sum(p.numel for p in plan.parameters)
    rounded = ""
    if plan.rounded:
        rounded = f" {len(plan.rounded)} tensors are rounded to {dtype_name(plan.rounded[0].held)}."
    if not plan.upcast:
        return f"No parameter is upcast ({total:,} parameters).{rounded}"
    upcast = sum(p.numel for p in plan.upcast)
    return (
        f"{len(plan.upcast)} tensors, {upcast:,} of {total:,} parameters, get {dtype_name(plan.master)} masters over "
        f"{', '.join(sorted({dtype_name(p.loaded) for p in plan.upcast}))} weights: "
        f"{plan.upcast_bytes / shared_by / 1e6:,.1f} MB more per rank.{rounded}"
    )


def rows_sentence(rows: PreparationReport, steps: int) -> str:
    """What became of the data, for people: data.json has the rest."""
    reasons = {
        "too long": rows.dropped_too_long,
        "empty": rows.dropped_empty,
        "without label tokens": rows.dropped_without_labels,
    }
    dropped = ", ".join(f"{count} dropped as {reason}" for reason, count in reasons.items() if count) or "0 dropped"
    return (
        f"{rows.kept:,} of {rows.rows_read:,} rows ({rows.truncated} truncated, {dropped}), "
        f"{rows.label_tokens:,} label tokens, {steps} steps."
    )


def float8_sentence(plan: Plan) -> str | None:
    """How many layers multiply in float8, and why the others do not, for people; None where none does."""
    if not plan.float8.names:
        return None
    reasons = Counter(plan.float8.left_out.values())
    others = "; ".join(f"{count} not: {reason}" for reason, count in reasons.items())
    return f"{len(plan.float8.names)} layers multiply in float8" + (f"; {others}." if others else ".")


def write_precision(
    path: Path,
    plan: Plan,
    *,
    shared_by: int,
    forecast: dict[str, Any] | None,
    facts: Facts | None,
    violations: Sequence[Violation],
) -> None:
    """Writes the plan, the forecast, what was observed (None before the first step) and where plan and facts differ."""
    described_plan = described(plan)
    described_plan["parameters"]["upcast_bytes_per_rank"] = plan.upcast_bytes // shared_by
    observed: dict[str, Any] | None = None
    if facts is not None:
        observed = {role: [dtype_name(d) for d in dtypes] for role, dtypes in facts.roles.items()}
        observed["float8_layers"] = sorted(facts.float8)
    content = {
        "plan": described_plan,
        "forecast": forecast,
        "facts": observed,
        "violations": [{"role": v.role, "what": str(v)} for v in violations],
        "upcast": upcast_sentence(plan, shared_by=shared_by),
    }
    folder.write_json(path, content)


def earlier_forecast(path: Path) -> dict[str, Any] | None:
    """The forecast that the first start of a run wrote to `path`; None when there is none.

    A run that goes on does not look ahead again: its weights are no longer those it started from.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))["forecast"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def vanished_sentences(recipe: Recipe, plan: Plan, shares: Shares | None, export: dict[str, Any] | None) -> list[str]:
    """What never moved and what the export drops, for people; nothing where nothing vanished."""
    sentences = []
    if shares is not None and shares.never_moved:
        shown = ", ".join(shares.never_moved[:3]) + (" and others" if len(shares.never_moved) > 3 else "")
        sentences.append(f"{len(shares.never_moved)} of {len(plan.trainable)} tensors never moved: {shown}.")
    if export is not None and export["dropped_share"] > 0:
        rounding = recipe.precision.export_rounding
        text = f"The export (rounding: {rounding}) drops {export['dropped_share']:.1%} of the changes, "
        text += f"{max(0.0, export['dropped_length']):.1%} of their length"
        if export.get("exported_loss") is not None:
            text += f"; held-out loss {export['trained_loss']:.4f} trained, {export['exported_loss']:.4f} exported"
        sentences.append(text + ".")
    return sentences


def summary(
    recipe: Recipe,
    *,
    status: str,
    first: folder.StepRecord | None,
    last: folder.StepRecord | None,
    evaluations: list[dict[str, Any]],
    shares: Shares | None,
    export: dict[str, Any] | None,
    weights_sha256: str | None,
    out: Path,
    seconds: float,
    device: torch.device,
) -> dict[str, Any]:
    """The run's last word. `status` is completed or interrupted; `seconds` is wall-clock, everything included; `shares`
    are the last that were measured, `export` what the exported weights lack of the trained ones. Memory is that of the
    main rank."""
    return {
        "name": recipe.name,
        "status": status,
        "engine": recipe.engine.name,
        "regime": recipe.precision.regime,
        "ranks": recipe.engine.ranks,
        "steps": last.step if last else 0,
        "planned_steps": recipe.train.steps,
        "first_loss": first.loss if first else None,
        "last_loss": last.loss if last else None,
        "evaluations": evaluations,
        "updates": asdict(shares) if shares else None,
        "export": export,
        "weights_sha256": weights_sha256,
        "run": str(out),
        "seconds": seconds,
        "versions": machine.versions(),
        "machine": {"system": platform.platform(), "device": device.type},
        "memory_bytes": machine.memory(device),
    }
