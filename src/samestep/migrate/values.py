"""The given values of a configuration under a table's names, with the field of the source that each comes from.

Values are read as their row says: "8" is 8, "false" is false. What the tool makes of such a value is a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from samestep.migrate.rows import Finding, Row, Setting, Severity, Status, Table
from samestep.recipe.suggest import nearest

AUTO = "auto"
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class Unreadable(ValueError):
    """A value that the field cannot have."""


@dataclass
class Values:
    """Reads fields by the names of `table`, and collects what they mean."""

    table: Table
    given: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    """The source's own name of a field, where it is another one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the recipe that the user gives beside the configuration."""
    settings: list[Setting] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Fields of the recipe that only the script knows."""

    def has(self, path: str) -> bool:
        """Whether the source gives a value for `path` (`auto` is none)."""
        return self.given.get(path) is not None and not self.is_auto(path)

    def is_auto(self, path: str) -> bool:
        """Whether somebody else has to fill in `path`; for a few fields `auto` is a value like others."""
        row = self.table.find(path)
        return self.given.get(path) == AUTO and not (row is not None and AUTO in row.harmless)

    def get(self, path: str) -> Any:
        """The value of `path`, or what the tool does without; None when that is unknown."""
        row = self.table.find(path)
        if not self.has(path) or row is None:
            return self.table.default(path)
        return read_value(row, self.given[path])

    def name(self, path: str) -> str:
        """The source's name of `path`."""
        return self.names.get(path, path)

    def say(
        self, recipe_path: str | None, value: Any, *paths: str, rule: str = "", status: Status = "computed"
    ) -> None:
        """Record that the fields `paths` mean `value`; the first one names the rule and the status."""
        row = self.table.find(paths[0])
        if not rule and row is not None:
            rule, status = row.why, row.status
        default = self.given.get(paths[0], self.table.default(paths[0]))
        # Of several fields, those that are given say it; when none is, the default of the first one does.
        given = tuple(self.name(path) for path in paths if path in self.given)
        sources = given or (self.name(paths[0]),)
        self.settings.append(Setting(recipe_path, value, sources, rule, status, default))

    def say_autos(self, paths: Iterable[str]) -> None:
        """Settle the fields among `paths` that are `auto`: from what the user gives, else they are asked for."""
        for path in paths:
            row = self.table.find(path)
            if not self.is_auto(path) or row is None:
                continue
            targets = row.to.split()
            if not targets or row.topic in ("prefetch", "sharding"):
                self.say(None, None, path, rule="auto: a size that does not change numbers", status="not-needed")
                continue
            known = [target for target in targets if target in self.extra]
            for target in known:
                self.say(target, self.extra[target], path, rule="auto: the value that --set gives")
            if not known:
                self.asked += targets[:1]
                rule = f"auto: only the script that fills it knows the value; give --set {targets[0]}=..."
                self.say(None, None, path, rule=rule, status="lossy")

    def find(self, path: str, severity: Severity, what: str) -> None:
        self.findings.append(Finding(self.name(path), severity, what))


def read_value(row: Row, value: Any) -> Any:
    """`value` as the row's kind; Unreadable with a reason otherwise."""
    if value is None or value == AUTO or row.kind == "any":
        return value
    reader = {"int": _integer, "float": _number, "bool": _boolean, "list": _list, "texts": _texts, "text": _text}[
        row.kind
    ]
    read = reader(value)
    known = {choice.lower(): choice for choice in row.choices}
    if known and str(read).lower() not in known:
        meant = nearest(str(read), known)
        hint = f" - did you mean {known[meant]}?" if meant else ""
        raise Unreadable(f"{value!r} is not one of {', '.join(row.choices)}{hint}")
    return read


def readable(row: Row, value: Any) -> Any:
    """`value` as the row's kind, or as it is when it cannot be read."""
    try:
        return read_value(row, value)
    except Unreadable:
        return value


def _integer(value: Any) -> int:
    number = _number(value)
    if not number.is_integer():
        raise Unreadable(f"expected a whole number, got {value!r}")
    return int(number)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Unreadable(f"expected a number, got {value!r}")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise Unreadable(f"expected a number, got {value!r}") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise Unreadable(f"expected a finite number, got {value!r}")
    return number


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int) and str(value).lower() in _WORDS:
        return _WORDS[str(value).lower()]
    raise Unreadable(f"expected true or false, got {value!r}")


def _list(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list):
        raise Unreadable(f"expected a list, got {value!r}")
    return value


def _texts(value: Any) -> list[str]:
    values = _list(value)
    if not all(isinstance(item, str) for item in values):
        raise Unreadable(f"expected a list of texts, got {value!r}")
    return values


def _text(value: Any) -> str:
    if isinstance(value, bool):
        # An unquoted `no` is false to YAML 1.1 readers.
        return "yes" if value else "no"
    if not isinstance(value, str | int):
        raise Unreadable(f"expected a text, got {value!r}")
    return str(value)
