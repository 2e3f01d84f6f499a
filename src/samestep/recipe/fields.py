"""What the schema says about one field: its type in words, its choices, its documentation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from samestep.recipe.document import FieldPath
from samestep.recipe.schema import Recipe, Section

# Bounds of a number, in the words of a message.
_BOUNDS = (("gt", "above"), ("ge", "of at least"), ("lt", "below"), ("le", "up to"))


def field_paths(section: type[Section] = Recipe, prefix: FieldPath = ()) -> Iterator[tuple[FieldPath, FieldInfo]]:
    """Every field of the schema with its path, sections before the fields in them."""
    for name, info in section.model_fields.items():
        path = (*prefix, name)
        yield path, info
        for inner in sections_of(info.rebuild_annotation()):
            yield from field_paths(inner, path)


def field_at(path: FieldPath) -> FieldInfo:
    """The schema's field at `path`; KeyError when there is none."""
    return _all_fields()[path]


@functools.cache
def _all_fields() -> dict[FieldPath, FieldInfo]:
    return dict(field_paths())


def documentation(path: FieldPath) -> str:
    """The text under the field in the schema."""
    return field_at(path).description or ""


def choices(annotation: Any) -> list[str]:
    """The names that a field may be set to, when it is a choice of names."""
    if get_origin(annotation) is Literal:
        return [name for name in get_args(annotation) if isinstance(name, str)]
    return [name for inner in alternatives(annotation) if inner is not annotation for name in choices(inner)]


def alternatives(annotation: Any) -> list[Any]:
    """The types that a field may have: [int, None] for `int | None`. Bounds stay with their type."""
    if get_origin(annotation) in (Union, UnionType):
        return [inner for part in get_args(annotation) for inner in alternatives(part)]
    return [annotation]


def sections_of(annotation: Any) -> list[type[Section]]:
    """The sections that a field may hold."""
    parts = map(bare, alternatives(annotation))
    return [part for part in parts if isinstance(part, type) and issubclass(part, Section)]


def bare(annotation: Any) -> Any:
    """The type without its bounds."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def item_type(annotation: Any, key: str | int) -> Any:
    """The type of the value at `key` inside a section, mapping or list of type `annotation`; None when unknown."""
    for part in map(bare, alternatives(annotation)):
        if isinstance(part, type) and issubclass(part, Section):
            if key in part.model_fields:
                return part.model_fields[key].rebuild_annotation()
        elif get_origin(part) is list and isinstance(key, int):
            return get_args(part)[0]
        elif get_origin(part) is dict:
            return get_args(part)[1]
    return None


def expected(annotation: Any) -> str:
    """The type in words: "a whole number above 0 or null"."""
    return " or ".join(_expected_one(part) for part in alternatives(annotation))


def _expected_one(annotation: Any) -> str:
    kind, limits = bare(annotation), _limits(annotation)
    if get_origin(kind) is Literal:
        return ", ".join(str(name) for name in get_args(kind))
    if get_origin(kind) is list:
        inner = expected(get_args(kind)[0])
        length = limits.get("min_length")
        return f"a list of {length} items, each {inner}" if length else f"a list of {inner}"
    if get_origin(kind) is dict:
        return "keys and values"
    if isinstance(kind, type) and issubclass(kind, Section):
        return f"keys under it ({', '.join(kind.model_fields)})"
    if kind is str and "pattern" in limits:
        return "a text of letters, digits, '.', '_' and '-' that starts with a letter or digit"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}
    # A bound that nobody meets but by a slip is not worth a word.
    bounds = [f"{word} {limits[bound]:g}" for bound, word in _BOUNDS if bound in limits and limits[bound] < 1e7]
    return " ".join([words.get(kind, "another value"), " and ".join(bounds)]).strip()


def _limits(annotation: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in get_args(annotation)[1:] if get_origin(annotation) is Annotated else ():
        for part in item.metadata if isinstance(item, FieldInfo) else (item,):
            found.update(_bounds_in(part))
    return found


def _bounds_in(limit: Any) -> dict[str, Any]:
    """The attributes of one of pydantic's limits (Gt, MinLen, ...)."""
    names = ("gt", "ge", "lt", "le", "min_length", "max_length", "pattern")
    return {name: getattr(limit, name) for name in names if hasattr(limit, name)}
