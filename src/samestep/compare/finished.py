"""Runs that have ended, and logs of other tools, compared without running anything."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.compare.fields import FieldDifference, unequal_work
from samestep.compare.logs import read_log
from samestep.compare.outcome import Outcome, read_outcome, read_precision, read_recipe
from samestep.compare.report import make_report, work_between
from samestep.compare.variants import Variant
from samestep.errors import OutputError, SamestepError
from samestep.training.folder import read_lines

# Two engines are what a comparison is usually of.
DEFAULT_TESTED = ("engine.name",)
_AS_LOG = "Give its steps.jsonl itself to read it as a log."


def compare_finished(
    sources: Sequence[Path],
    *,
    tested: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
    allow_unequal: bool = False,
) -> tuple[dict[str, Any], list[Outcome]]:
    """Compares run folders of samestep and logs. `tested` are fields or sections of the recipe under test, besides the
    engine. Gives the content of compare.json and what was read.

    Raises SamestepError when two runs did not do the same work, unless `allow_unequal`, and when something cannot be
    read. A run that has not ended is compared as far as it came, and the report says so.
    """
    if len(sources) < 2:
        raise SamestepError(
            "a comparison needs at least two runs.", where="compare", remedy="Give two folders or logs."
        )
    names = _names(sources)
    outcomes = [_read(source, name, columns) for source, name in zip(sources, names, strict=True)]
    fields = (*DEFAULT_TESTED, *tested)
    if not allow_unequal:
        _refuse_unequal(outcomes, fields)
    return make_report(" and ".join(names), outcomes, tested=fields), outcomes


def is_run(source: Path) -> bool:
    return (source / "steps.jsonl").is_file() or (source / "recipe.yaml").is_file()


def _read(source: Path, name: str, columns: Mapping[str, str] | None) -> Outcome:
    if not source.exists():
        raise OutputError("is not there.", where=str(source), remedy="Give a run folder or a log file.")
    return _read_run(source, name) if is_run(source) else _read_log(source, name, columns)


def _read_run(run: Path, name: str) -> Outcome:
    recipe = read_recipe(run)
    unknown: tuple[str, ...] = ()
    if recipe is None:
        if (run / "recipe.yaml").exists():
            raise OutputError("is no recipe that can be read.", where=str(run / "recipe.yaml"), remedy=_AS_LOG)
        unknown = ("its recipe is not there: what was run is not known",)
    variant = Variant(
        name=name,
        engine=recipe.engine.name if recipe else "-",
        precision=recipe.precision.regime if recipe else "-",
        arm=name,
    )
    if (run / "summary.json").is_file():
        outcome = read_outcome(variant, run)
        status = outcome.summary.get("status")
        notes = () if status == "completed" else (f"the run was {status} after {len(outcome.steps)} steps",)
        return _checked(replace(outcome, notes=(*unknown, *notes)))
    steps = read_lines(run / "steps.jsonl") if (run / "steps.jsonl").is_file() else []
    planned = f" of {recipe.train.steps}" if recipe and recipe.train.steps else ""
    note = f"the run has not ended: {len(steps)}{planned} steps are there"
    return _checked(
        Outcome(
            variant=variant,
            run=run,
            steps=steps,
            summary={},
            recipe=recipe,
            precision=read_precision(run),
            notes=(*unknown, note),
        )
    )


def _checked(outcome: Outcome) -> Outcome:
    """Raises OutputError when there is no step to compare, or steps are not of samestep."""
    where = str(outcome.run / "steps.jsonl")
    if not outcome.steps:
        raise OutputError("has no step.", where=where, remedy="Wait for the run's first step, or leave it out.")
    for number, record in enumerate(outcome.steps, start=1):
        if not _is_step(record):
            raise OutputError(f"line {number} is no step of samestep.", where=where, remedy=_AS_LOG)
    for one, other in itertools.pairwise(step["step"] for step in outcome.steps):
        if other != one + 1:
            raise OutputError(f"step {other} follows step {one}; the record is not whole.", where=where, remedy=_AS_LOG)
    return outcome


def _is_step(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return False
    return all(name in record and isinstance(record[name], int | float | None) for name in ("loss", "grad_norm"))


def _read_log(path: Path, name: str, columns: Mapping[str, str] | None) -> Outcome:
    steps = read_log(path, columns)
    missing = sum(step["loss"] is None for step in steps)
    notes = ["a log: what was run is not known, and there are no weights"]
    if missing:
        notes.append(f"{missing} of {len(steps)} losses are not finite")
    return Outcome(
        variant=Variant(name=name, engine="-", precision="-", arm=name),
        run=path,
        steps=steps,
        summary={},
        notes=tuple(notes),
    )


def _refuse_unequal(outcomes: Sequence[Outcome], tested: Sequence[str]) -> None:
    """Raises SamestepError that lists every field in which the runs did other work than the first."""
    first = outcomes[0]
    for other in outcomes[1:]:
        found = work_between(first, other, tested)
        work = unequal_work(found)
        if work:
            listed = "; ".join(map(str, work))
            raise SamestepError(
                f"{first.name} and {other.name} did not do the same work: {listed}.",
                where="compare",
                remedy=f"{_remedy(work)} To see the curves all the same, give --allow-unequal.",
            )


def _remedy(work: Sequence[FieldDifference]) -> str:
    fields = [difference.field for difference in work if " " not in difference.field]
    if not fields:
        return "Compare runs over the same data and schedule."
    return f"If that is what is under test, say so: {' '.join(f'--under-test {field}' for field in fields[:3])}."


def _names(sources: Sequence[Path]) -> list[str]:
    """Short names that tell the sources apart: as few last parts of their paths as do."""
    parts = [source.absolute().parts for source in sources]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise SamestepError(f"{sources[0]} is given twice.", where="compare", remedy="Give two different runs.")
