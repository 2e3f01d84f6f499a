"""Formats: how a row becomes text, and which parts of the text count in the loss."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from string import Formatter
from typing import Any, NamedTuple, TypeAlias

from samestep.data.files import Row
from samestep.errors import DataError
from samestep.recipe.schema import Data


class Segment(NamedTuple):
    """A piece of a row's text."""

    text: str
    counts: bool
    """Whether the piece counts in the loss."""


Render: TypeAlias = Callable[[dict[str, Any], str], list[Segment]]
"""Values by the format's names, and the row's place, to segments."""


class Text(NamedTuple):
    """The text of one row: its segments, one after the other. No segments means an empty row."""

    where: str
    segments: list[Segment]


@dataclass(frozen=True, kw_only=True)
class Format:
    """What turns rows into text."""

    columns: dict[str, str]
    """The format's name of a column, to its name in the file."""
    optional: frozenset[str]
    """Columns, by the format's name, that a file may lack."""
    render: Render
    special_tokens: bool
    """Whether the tokenizer adds its special tokens; a chat template writes them itself."""

    def text(self, row: Row) -> Text:
        """The row as text. Raises DataError for a value that is no text."""
        values = {name: row.values.get(column) for name, column in self.columns.items()}
        if all(_is_blank(value) for value in values.values()):
            return Text(row.where, [])
        return Text(row.where, self.render(values, row.where))

    def require_columns(self, rows: Iterable[Row], *, where: str) -> None:
        """Raise DataError when a column that the format needs is in none of the rows."""
        found = list(dict.fromkeys(column for row in rows for column in row.values))
        for name, column in self.columns.items():
            if column not in found and name not in self.optional:
                near = difflib.get_close_matches(column, found, n=1, cutoff=0.5)
                guess = f'Did you mean "{near[0]}"? ' if near else ""
                raise DataError(
                    f'there is no column "{column}"; found: {", ".join(found) or "none"}.',
                    where=where,
                    remedy=f"{guess}Name it in data.columns: {{{name}: {near[0] if near else 'COLUMN'}}}.",
                )


def build_format(data: Data, *, chat: Callable[[Any, str], list[Segment]]) -> Format:
    """The format that `data` asks for.

    `chat` turns the value of the column "messages" into segments; only the format `messages` needs it.
    Raises DataError for a template that is not well formed, for a marker without a template and for a renamed
    column that the format does not have.
    """
    optional: frozenset[str] = frozenset()
    if data.template is not None:
        pieces = _template_pieces(data.template)
        names = list(dict.fromkeys(name for _, name in pieces if name is not None))
        render = _template_render(pieces, _marker(data))
    elif data.response_marker is not None:
        raise DataError(
            "a response marker needs a template.", where="data.response_marker", remedy="Give data.template."
        )
    elif data.format == "messages":
        names, render = ["messages"], lambda values, where: chat(values["messages"], where)
    else:
        names, render = _FORMATS[data.format]
        optional = frozenset({"input"} - set(data.columns)) if data.format == "alpaca" else optional
    return Format(
        columns={**{name: name for name in names}, **_renamed(data.columns, names)},
        optional=optional,
        render=_all_counts(render) if data.loss_on == "all" else render,
        special_tokens=data.template is not None or data.format != "messages",
    )


def _renamed(columns: dict[str, str], names: list[str]) -> dict[str, str]:
    for name in columns:
        if name not in names:
            raise DataError(
                f'the format has no column "{name}"; it has {", ".join(names)}.',
                where="data.columns",
                remedy="Write {NAME_IN_THE_FORMAT: NAME_IN_THE_FILE}.",
            )
    return columns


def _alpaca(values: dict[str, Any], where: str) -> list[Segment]:
    given = _text(values, "input", where)
    middle = f"### Input:\n{given}\n\n" if given else ""
    prompt = f"### Instruction:\n{_text(values, 'instruction', where)}\n\n{middle}### Response:\n"
    return [Segment(prompt, False), Segment(_text(values, "output", where), True)]


def _prompt_completion(values: dict[str, Any], where: str) -> list[Segment]:
    return [Segment(_text(values, "prompt", where), False), Segment(_text(values, "completion", where), True)]


def _plain(values: dict[str, Any], where: str) -> list[Segment]:
    return [Segment(_text(values, "text", where), True)]


def _all_counts(render: Render) -> Render:
    return lambda values, where: [Segment("".join(piece.text for piece in render(values, where)), True)]


def _template_pieces(template: str) -> list[tuple[str, str | None]]:
    """Literal texts, each with the column that follows it (None at the end)."""
    remedy = "Write columns as {name}, and a brace of the text as {{ or }}."
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise DataError(f"not a template: {error}.", where="data.template", remedy=remedy) from None
    for _, name, spec, conversion in parsed:
        if name is not None and (not name or spec or conversion or set(name) & set(".[]{}")):
            raise DataError(f'"{{{name}}}" is not the name of a column.', where="data.template", remedy=remedy)
    if all(name is None for _, name, _, _ in parsed):
        raise DataError("the template names no column.", where="data.template", remedy=remedy)
    return [(literal, name) for literal, name, _, _ in parsed]


def _marker(data: Data) -> str | None:
    if data.loss_on == "all":
        return None
    if not data.response_marker:
        raise DataError(
            "the template does not say where the response begins.",
            where="data.response_marker",
            remedy="Give the marker in front of the response, or set data.loss_on: all.",
        )
    return data.response_marker


def _template_render(pieces: list[tuple[str, str | None]], marker: str | None) -> Render:
    """A marker that is part of the template is used where the template has it, so that a row which quotes the
    marker is not cut in the wrong place; another marker where it first occurs in the row."""

    def render(values: dict[str, Any], where: str) -> list[Segment]:
        text, prompt_length = "", None if marker else 0
        for literal, name in pieces:
            if marker and prompt_length is None and marker in literal:
                prompt_length = len(text) + literal.index(marker) + len(marker)
            text += literal + (_text(values, name, where) if name is not None else "")
        if marker and prompt_length is None:
            found = text.find(marker)
            prompt_length = found + len(marker) if found >= 0 else len(text)
        return [Segment(text[:prompt_length], False), Segment(text[prompt_length:], True)]

    return render


def _text(values: dict[str, Any], name: str, where: str) -> str:
    """The value as text: nothing and NaN are empty, numbers as Python and truth values as JSON writes them."""
    value = values.get(name)
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    raise DataError(f'column "{name}" holds a {type(value).__name__}, not text.', where=where)


def _is_blank(value: object) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or value == [] or (isinstance(value, float) and math.isnan(value))


_FORMATS: dict[str, tuple[list[str], Render]] = {
    "alpaca": (["instruction", "input", "output"], _alpaca),
    "prompt_completion": (["prompt", "completion"], _prompt_completion),
    "text": (["text"], _plain),
}
