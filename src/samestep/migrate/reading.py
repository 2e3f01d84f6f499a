"""A source as the migration needs it: its fields, the row of each, what they mean, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from samestep.migrate.rows import Finding, Meaning, Row, Table
from samestep.migrate.source import Source
from samestep.migrate.values import AUTO, Unreadable, Values, read_value
from samestep.recipe.suggest import did_you_mean

LookedUp = tuple[dict[str, Row | None], list[Finding], dict[str, str]]
"""What `look_up` gives."""


@dataclass
class Reading:
    """One source, read."""

    kind: str
    leaves: dict[str, Any]
    rows: dict[str, Row | None]
    """The row of each leaf; None for a field that the tool does not know."""
    meaning: Meaning
    findings: list[Finding] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Fields of the recipe that the source leaves to its script."""
    unknown: dict[str, str] = field(default_factory=dict)
    """What to say about leaves without a row."""


def read_with(kind: str, leaves: dict[str, Any], looked_up: LookedUp, values: Values, meaning: Meaning) -> Reading:
    """The reading of a source whose fields `values` has given their meaning."""
    rows, findings, unknown = looked_up
    return Reading(
        kind=kind,
        leaves=leaves,
        rows=rows,
        meaning=meaning,
        findings=findings + values.findings,
        asked=values.asked,
        unknown=unknown,
    )


@dataclass(frozen=True, kw_only=True)
class Part:
    """Leaves of a source that one table describes."""

    table: Table
    leaves: Mapping[str, Any]
    """Under the table's names."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The source's own names, where they are others."""
    texts_are_numbers: bool = False
    """Whether the tool itself reads "8" as 8."""
    unknown_is: str = "ignores it"

    def name(self, path: str) -> str:
        return self.names.get(path, path)


def look_up(source: Source, parts: list[Part]) -> LookedUp:
    """The rows of all leaves, what is wrong with each leaf by itself, and what to say about unknown ones."""
    rows: dict[str, Row | None] = {}
    findings: list[Finding] = []
    unknown: dict[str, str] = {}
    for part in parts:
        for path, value in part.leaves.items():
            name = part.name(path)
            row = part.table.find(path)
            rows[name] = row
            if not _finite(value):
                findings.append(Finding(name, "error", f"expected finite numbers, got {value}"))
                unknown[name] = "not finite"
                continue
            if row is None:
                what, severity = _unknown(part, path, value)
                unknown[name] = what
                if what:
                    findings.append(Finding(name, severity, what))
                continue
            findings += [replace(found, path=name) for found in _value_findings(part, row, path, value)]
    return rows, [replace(found, line=found.line or source.lines.get(found.path)) for found in findings], unknown


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return all(map(_finite, value)) if isinstance(value, list) else not isinstance(value, float) or isfinite(value)


def _unknown(part: Part, path: str, value: Any) -> tuple[str, Any]:
    inner = [row for row in part.table if row.path.startswith(f"{path}.")]
    if inner and value in ({}, None):
        return "", "note"
    if inner:
        keys = ", ".join(sorted({row.path.removeprefix(f"{path}.") for row in inner})[:6])
        return f"expected keys under it ({keys}), got {value!r}", "error"
    key = path.rpartition(".")[2]
    guess = did_you_mean(key, part.table.siblings(path))
    return f"unknown key{guess}; {part.table.tool} {part.unknown_is}", "warning"


def _value_findings(part: Part, row: Row, path: str, value: Any) -> list[Finding]:
    found = []
    if row.ignored:
        found.append(Finding(path, "warning", row.ignored))
    if row.deprecated:
        found.append(Finding(path, "warning", f"is deprecated; use {row.deprecated}"))
    if value == AUTO:
        return found
    try:
        read = read_value(row, value)
    except Unreadable as error:
        return [*found, Finding(path, "error", str(error))]
    if isinstance(value, str) and isinstance(read, int | float) and not part.texts_are_numbers:
        kind = "true or false" if isinstance(read, bool) else "a number"
        found.append(
            Finding(path, "warning", f"{value!r} is a text, not {kind}: {part.table.tool} fails on it; read as {read}")
        )
    return found
