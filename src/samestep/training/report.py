"""What a run writes beside its steps: the precision report and the summary."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.dtypes import dtype_name
from samestep.precision.facts import Facts, Violation
from samestep.precision.plan import Plan, described
from samestep.recipe.schema import Recipe
from samestep.training import folder, machine


def upcast_sentence(plan: Plan, *, shared_by: int) -> str:
    """What was upcast and what it costs, for people. `shared_by` is the number of ranks that share one master copy."""
    total = sum(p.numel for p in plan.parameters)
    if not plan.upcast:
        return f"No parameter is upcast ({total:,} parameters)."
    upcast = sum(p.numel for p in plan.upcast)
    return (
        f"{len(plan.upcast)} tensors, {upcast:,} of {total:,} parameters, get {dtype_name(plan.master)} masters over "
        f"{', '.join(sorted({dtype_name(p.loaded) for p in plan.upcast}))} weights: "
        f"{plan.upcast_bytes / shared_by / 1e6:,.1f} MB more per rank."
    )


def float8_sentence(plan: Plan) -> str | None:
    """How many layers multiply in float8, and why the others do not, for people; None where none does."""
    if not plan.float8.names:
        return None
    reasons = Counter(plan.float8.left_out.values())
    others = "; ".join(f"{count} not: {reason}" for reason, count in reasons.items())
    return f"{len(plan.float8.names)} layers multiply in float8" + (f"; {others}." if others else ".")


def write_precision(
    path: Path, plan: Plan, *, shared_by: int, facts: Facts | None, violations: Sequence[Violation]
) -> None:
    """Writes the plan, what was observed (None before the first step) and where the two differ."""
    described_plan = described(plan)
    described_plan["parameters"]["upcast_bytes_per_rank"] = plan.upcast_bytes // shared_by
    observed: dict[str, Any] | None = None
    if facts is not None:
        observed = {role: [dtype_name(d) for d in dtypes] for role, dtypes in facts.roles.items()}
        observed["float8_layers"] = sorted(facts.float8)
    content = {
        "plan": described_plan,
        "facts": observed,
        "violations": [{"role": v.role, "what": str(v)} for v in violations],
        "upcast": upcast_sentence(plan, shared_by=shared_by),
    }
    folder.write_json(path, content)


def summary(
    recipe: Recipe,
    *,
    status: str,
    first: folder.StepRecord | None,
    last: folder.StepRecord | None,
    evaluations: list[dict[str, Any]],
    weights_sha256: str | None,
    out: Path,
    seconds: float,
    device: str,
) -> dict[str, Any]:
    """The run's last word. `status` is completed or interrupted; `seconds` is wall-clock, everything included."""
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
        "weights_sha256": weights_sha256,
        "run": str(out),
        "seconds": seconds,
        "versions": machine.versions(),
        "machine": {"system": platform.platform(), "device": device},
    }
