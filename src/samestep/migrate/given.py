"""Fields of the recipe that the user gives beside a configuration, as `--set FIELD=VALUE`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from samestep.migrate.samestep_table import samestep_table
from samestep.migrate.source import MigrationError
from samestep.recipe.document import parse_value
from samestep.recipe.fields import expected, field_at, sections_of
from samestep.recipe.suggest import did_you_mean


def given_values(texts: Sequence[str]) -> dict[str, Any]:
    """{field: value} of "field=value" texts; MigrationError for an unknown field or a value that it cannot have."""
    known = [row.path for row in samestep_table()]
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value_text = (part.strip() for part in text.partition("="))
        where = f"--set {name}"
        if not equals:
            raise MigrationError("needs a value.", where=where, remedy="Write FIELD=VALUE, such as train.steps=100.")
        if name not in known:
            what = f"the recipe has no such field{did_you_mean(name, known)}"
            raise MigrationError(what, where=where)
        try:
            values[name] = _checked(name, parse_value(value_text))
        except ValueError as error:
            raise MigrationError(str(error), where=where) from None
    return values


def _checked(name: str, value: Any) -> Any:
    annotation = field_at(tuple(name.split("."))).rebuild_annotation()
    # Sections bring a configuration of their own, and with it strictness.
    settings = None if sections_of(annotation) else ConfigDict(strict=True)
    try:
        TypeAdapter(annotation, config=settings).validate_python(value)
    except ValidationError:
        raise ValueError(f"expected {expected(annotation)}, got {value!r}") from None
    return value
