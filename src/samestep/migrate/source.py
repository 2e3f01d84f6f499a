"""A configuration file as flat fields, each with its line and its comments. Reads YAML, JSON and TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from samestep.errors import Problem, RecipeError, SamestepError
from samestep.migrate.rows import Finding
from samestep.recipe.document import dotted, parse_text, read_file

# Keys whose values are one thing, whatever they hold.
_WHOLE = frozenset({"lora", "config", "columns", "offload"})


class MigrationError(SamestepError):
    """A configuration that cannot be read, recognised or expressed; `details` stand under the message, one a line."""

    def __init__(
        self, what: str, *, where: str | None = None, remedy: str | None = None, details: Sequence[str] = ()
    ) -> None:
        self.details = tuple(details)
        super().__init__(what, where=where, remedy=remedy)
        headline = super().__str__()
        self.args = (headline,)

    def __str__(self) -> str:
        if len(self.details) == 1:
            return f"{super().__str__()} {self.details[0]}"
        return "\n".join(self.details) or super().__str__()


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file."""

    path: Path
    syntax: str
    """yaml, json or toml."""
    data: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    comments: dict[str, tuple[list[str], str]] = field(default_factory=dict)
    """By field: the comment lines above it and the comment beside it, with their #."""
    findings: tuple[Finding, ...] = ()

    def leaves(self) -> dict[str, Any]:
        """Every field with its value; lists, and the mappings that are one value, are not taken apart."""
        return dict(flatten(self.data))


def flatten(data: dict[str, Any], prefix: str = "", whole: frozenset[str] = frozenset()) -> list[tuple[str, Any]]:
    """(dotted path, value) of everything in `data`; an empty section is a value itself.

    MigrationError for a key with a dot: it would be taken for a field of a section, and no tool has such a key.
    """
    found: list[tuple[str, Any]] = []
    for key, value in data.items():
        path = f"{prefix}{key}"
        if "." in key:
            what = f"the key {key!r} holds a dot, and no tool reads it as a section and its field."
            raise MigrationError(what, where=prefix.rstrip(".") or None, remedy="Write them one below the other.")
        if isinstance(value, dict) and value and key not in whole:
            found += flatten(value, f"{path}.", whole)
        else:
            found.append((path, value))
    return found


def recipe_leaves(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a recipe: like `flatten`, but adapters, offload parts, columns and configs stay whole."""
    found = dict(flatten(data, whole=_WHOLE))
    hub = {path: value for path, value in found.items() if path.startswith("data.path.")}
    if hub:
        found = {path: value for path, value in found.items() if path not in hub}
        found["data.path"] = data["data"]["path"]
    return found


def nest(leaves: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    data: dict[str, Any] = {}
    for path, value in leaves.items():
        *sections, key = path.split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return data


def read(path: Path) -> Source:
    """The configuration in the file at `path`. MigrationError when it is none."""
    if path.is_dir():
        raise MigrationError("is a folder.", where=str(path), remedy="Give the configuration file in it.")
    try:
        text = read_file(path)
    except RecipeError as error:
        raise _refusal(error) from None
    if not text.strip():
        raise MigrationError("is empty.", where=str(path), remedy="Give a configuration file.")
    if path.suffix == ".toml":
        source = _toml(path, text)
    elif path.suffix == ".json" or text.lstrip()[:1] == "{":
        source = _json(path, text)
    else:
        source = _yaml(path, text)
    _require_plain(source)
    return source


def _require_plain(source: Source) -> None:
    """MigrationError for what no report could show: dates of TOML, and half a character of a JSON escape."""

    def refuse(value: Any) -> None:
        raise MigrationError(
            f"{value} is read as a date or a time.", where=str(source.path), remedy="Put it in quotes."
        )

    try:
        json.dumps(source.data, ensure_ascii=False, default=refuse).encode()
    except UnicodeEncodeError:
        what = "holds half of a character pair (a lone surrogate), which is no valid text."
        raise MigrationError(what, where=str(source.path), remedy="Write the whole character.") from None


def _yaml(path: Path, text: str) -> Source:
    try:
        document = parse_text(text, str(path))
    except RecipeError as error:
        raise _refusal(error) from None
    if document.problems:
        raise _refusal(RecipeError(str(path), list(document.problems)))
    lines = {dotted(place): line for place, line in document.lines.items() if place}
    return Source(path=path, syntax="yaml", data=document.data, lines=lines, comments=_comments(text))


def _json(path: Path, text: str) -> Source:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        for key in (names := [name for name, _ in items]):
            if names.count(key) > 1:
                raise MigrationError(f"the key {key!r} is given twice.", where=str(path), remedy="Keep one of them.")
        return dict(items)

    def number(name: str) -> Any:
        raise MigrationError(f"{name} is not a number of JSON.", where=str(path), remedy="Write a finite number.")

    try:
        data = json.loads(text, object_pairs_hook=pairs, parse_constant=number)
    except json.JSONDecodeError as error:
        raise MigrationError(
            f"not valid JSON: {error.msg}.", where=f"{path}:{error.lineno}", remedy="Mend the file and try again."
        ) from None
    except (RecursionError, ValueError):
        raise MigrationError("not valid JSON.", where=str(path), remedy="Mend the file and try again.") from None
    if not isinstance(data, dict):
        raise MigrationError("holds no keys and values.", where=str(path), remedy="Give a configuration file.")
    return Source(path=path, syntax="json", data=data, lines=_json_lines(text))


def _json_lines(text: str) -> dict[str, int]:
    """Lines of the fields, as far as a YAML reader finds them: JSON is YAML but for tabs and a few signs."""
    try:
        document = parse_text(text.replace("\t", " "), "")
    except RecipeError:
        return {}
    return {dotted(place): line for place, line in document.lines.items() if place}


def _toml(path: Path, text: str) -> Source:
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise MigrationError(
            f"not valid TOML: {error}.", where=str(path), remedy="Mend the file and try again."
        ) from None
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("[") and "]" in stripped:
            section = stripped.strip("[").split("]")[0].strip() + "."
        elif "=" in stripped and not stripped.startswith("#"):
            lines[section + stripped.split("=")[0].strip()] = number
    return Source(path=path, syntax="toml", data=data, lines=lines)


def _comments(text: str) -> dict[str, tuple[list[str], str]]:
    rows = text.splitlines()
    found: dict[str, tuple[list[str], str]] = {}

    def walk(node: Node, prefix: str) -> None:
        if not isinstance(node, MappingNode):
            return
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            first = key.start_mark.line
            above: list[str] = []
            while first - 1 - len(above) >= 0 and rows[first - 1 - len(above)].lstrip().startswith("#"):
                above.insert(0, rows[first - 1 - len(above)].strip())
            mark = value.end_mark if isinstance(value, ScalarNode) else key.end_mark
            rest = rows[mark.line][mark.column :] if mark.line < len(rows) else ""
            beside = rest[rest.index("#") :].strip() if " #" in rest else ""
            if above or beside:
                found[path] = (above, beside)
            walk(value, f"{path}.")

    try:
        walk(YAML(typ="safe", pure=True).compose(text), "")
    except (YAMLError, RecursionError):
        return {}
    return found


def _refusal(error: RecipeError) -> MigrationError:
    if len(error.problems) > 1:
        return MigrationError(*error.args, details=str(error).splitlines())
    problem: Problem = error.problems[0]
    place = f"{error.source}:{problem.line}" if problem.line else error.source
    what = f"{problem.field}: {problem.what}" if problem.field else problem.what
    words = {
        "merging with << is not part of recipes": "merging with << is not read here",
        "the recipe file": "the file",
        "of recipes": "of configurations",
        "a recipe": "a configuration",
    }
    for said, meant in words.items():
        what = what.replace(said, meant)
    return MigrationError(what, where=place)
