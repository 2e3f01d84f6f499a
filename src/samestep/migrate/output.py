"""What a target makes of the recipe's fields, and the text of its file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from samestep.migrate.rows import Placement, Status
from samestep.migrate.source import nest
from samestep.recipe.writing import flow

Comments = Mapping[str, tuple[list[str], str]]


@dataclass
class Output:
    """A target being written."""

    said: dict[str, Any]
    """Values of recipe fields, as far as the source says them."""
    leaves: dict[str, Any] = field(default_factory=dict)
    """Values of the target, by dotted path."""
    placements: dict[str, Placement] = field(default_factory=dict)
    extra: list[Placement] = field(default_factory=list)
    """What the target needs beside the recipe's fields, such as a default of its own switched off."""
    missing: list[str] = field(default_factory=list)
    """Fields of the recipe without which the target cannot be written."""

    def has(self, recipe_path: str) -> bool:
        return recipe_path in self.said

    def get(self, recipe_path: str, default: Any = None) -> Any:
        return self.said.get(recipe_path, default)

    def put(
        self, recipe_path: str, target: str, value: Any, status: Status, rule: str = "", *, shown: Any = None
    ) -> None:
        """Write `value` at `target` and note that it says `recipe_path`; `shown` is what the report shows instead."""
        self.leaves[target] = value
        self.note(recipe_path, target, value if shown is None else shown, status, rule)

    def note(self, recipe_path: str, target: str | None, value: Any, status: Status, rule: str) -> None:
        """Note where `recipe_path` went, without writing anything."""
        if self.has(recipe_path):
            self.placements.setdefault(recipe_path, Placement(recipe_path, target, value, status, rule))

    def add(self, target: str, value: Any, rule: str) -> None:
        """Write something that stands for no field of the recipe."""
        self.leaves[target] = value
        self.extra.append(Placement("", target, value, "computed", rule))

    def data(self) -> dict[str, Any]:
        return nest(self.leaves)


def json_text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


def yaml_text(data: Mapping[str, Any], comments: Comments, header: list[str]) -> str:
    """`data` as YAML, with the comments that belong to its fields."""
    return "\n".join([*header, *_block(data, comments, "", "")]) + "\n"


def _block(data: Mapping[str, Any], comments: Comments, path: str, indent: str) -> Iterator[str]:
    for key, value in data.items():
        place = f"{path}{key}"
        above, beside = comments.get(place, ([], ""))
        yield from (f"{indent}{line}" for line in above)
        end = f"  {beside}" if beside else ""
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:{end}"
            yield from _block(value, comments, f"{place}.", indent + "  ")
        elif isinstance(value, str) and "\n" in value:
            yield f"{indent}{key}: |{end}"
            yield from (f"{indent}  {line}" for line in value.rstrip("\n").split("\n"))
        else:
            yield f"{indent}{key}: {flow(value)}{end}"
