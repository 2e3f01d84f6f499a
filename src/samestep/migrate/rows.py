"""The words of a migration: rows of the tables, what a configuration means, and where its values end up.

A table has one row for every field of a tool. Reading, checking, the report, and the page of the documentation all
use the rows; there is no second list of fields anywhere.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["kept", "renamed", "computed", "not-needed", "lossy", "impossible"]
Severity = Literal["error", "warning", "note"]
Kind = Literal["int", "float", "bool", "text", "list", "texts", "any"]

# From harmless to worst: a field that goes through two tables has the worse of its two fates.
_ORDER: tuple[Status, ...] = ("kept", "renamed", "computed", "not-needed", "lossy", "impossible")


@dataclass(frozen=True)
class Row:
    """One field of a tool."""

    path: str
    """Dotted; a * at the end stands for all fields below."""
    kind: Kind
    status: Status
    """What happens to a value that is not harmless."""
    why: str
    """The rule, the reason, or what changes."""
    to: str = ""
    """Fields of the recipe that say the same, separated by blanks; empty when none does."""
    topic: str = "other"
    default: Any = None
    """What the tool does when the field is left out; None when that is nothing, or depends on other fields."""
    harmless: tuple[Any, ...] = ()
    """Values with which a field that cannot be said changes nothing."""
    choices: tuple[str, ...] = ()
    ignored: str = ""
    """Why the tool itself does not use the field; empty when it does."""
    deprecated: str = ""
    """What replaced the field."""
    family: str = ""
    """Tools that share this field; it is carried over unchanged between them."""


class Table:
    """The rows of one kind of configuration, found by path."""

    def __init__(self, tool: str, rows: Iterable[Row]) -> None:
        self.tool = tool
        self.rows = tuple(rows)
        self._exact = {row.path: row for row in self.rows if not row.path.endswith("*")}
        self._patterns = [row for row in self.rows if row.path.endswith("*")]
        if len(self._exact) + len(self._patterns) != len(self.rows):
            raise ValueError(f"a field has two rows in the table of {tool}")

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def find(self, path: str) -> Row | None:
        """The row of the field at `path`, or None when the tool has no such field."""
        if path in self._exact:
            return self._exact[path]
        return next((row for row in self._patterns if fnmatch.fnmatchcase(path, row.path)), None)

    def default(self, path: str) -> Any:
        """What the tool does when `path` is left out."""
        row = self.find(path)
        return None if row is None else row.default

    def siblings(self, path: str) -> list[str]:
        """Names of the fields beside `path`, and of the sections there."""
        section = path.rpartition(".")[0]
        prefix = f"{section}." if section else ""
        return sorted({row.path.removeprefix(prefix).split(".")[0] for row in self if row.path.startswith(prefix)})


@dataclass(frozen=True)
class Setting:
    """What some fields of a configuration mean, as one field of the recipe; `path` None: something no recipe says."""

    path: str | None
    value: Any
    sources: tuple[str, ...]
    """Fields that say it, given or left at their defaults."""
    rule: str
    status: Status = "computed"
    default: Any = None
    """The value of the first source, for the report, when none of them is given."""


@dataclass(frozen=True)
class Placement:
    """Where the value of one field of the recipe went in the target."""

    recipe_path: str
    target_path: str | None
    value: Any
    status: Status
    rule: str


@dataclass(frozen=True)
class Finding:
    """Something about the source that its owner should know."""

    path: str
    severity: Severity
    what: str
    line: int | None = None


@dataclass(frozen=True)
class Entry:
    """One line of the report."""

    path: str
    value: Any
    status: Status
    target_path: str | None
    target_value: Any
    rule: str


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """A configuration in terms of the recipe."""

    settings: tuple[Setting, ...]
    carried: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By family: given fields, under the names of the target, that only tools of the family understand."""
    origins: dict[str, dict[str, str]] = field(default_factory=dict)
    """By family: the field of the source that each carried field comes from."""
    whole: str = ""
    """The family whose tools can take the configuration over as it is."""
    findings: tuple[Finding, ...] = ()


def worst(statuses: Iterable[Status]) -> Status:
    """The status that says most about what is lost."""
    return max(statuses, key=_ORDER.index)
