"""Formats: how a row becomes text, and which parts of the text count in the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from string import Formatter
from typing import Any, NamedTuple, TypeAlias

from samestep.data.files import Row
from samestep.errors import DataError
from samestep.recipe.checks import template_fields
from samestep.recipe.schema import Data
from samestep.recipe.suggest import nearest


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
    chat: bool
    """Whether the one column holds a conversation and not text. A chat template writes the special tokens itself."""

    def text(self, row: Row) -> Text:
        """The row as text. Raises DataError for a value that is no text."""
        values = {name: row.values.get(column) for name, column in self.columns.items()}
        if not self.chat:
            values = {name: _text(value, self.columns[name], row.where) for name, value in values.items()}
        if not any(value.strip() if isinstance(value, str) else value for value in values.values()):
            return Text(row.where, [])
        segments = self.render(values, row.where)
        if not any(segment.counts and segment.text.strip() for segment in segments):
            # An empty response teaches nothing, also where a template puts a space in front of it.
            segments = [Segment(segment.text, False) for segment in segments]
        return Text(row.where, segments)

    def require_columns(self, rows: Iterable[Row], *, where: str) -> None:
        """Raise DataError when a column that the format needs is in none of the rows."""
        found = list(dict.fromkeys(column for row in rows for column in row.values))
        for name, column in self.columns.items():
            if column not in found and name not in self.optional:
                near = nearest(column, found)
                guess = f'Did you mean "{near}"? ' if near else ""
                raise DataError(
                    f'there is no column "{column}"; found: {", ".join(found) or "none"}.',
                    where=where,
                    remedy=f"{guess}Name it in data.columns: {{{name}: {near or 'COLUMN'}}}.",
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
        chat=data.template is None and data.format == "messages",
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
    middle = f"### Input:\n{values['input']}\n\n" if values["input"] else ""
    prompt = f"### Instruction:\n{values['instruction']}\n\n{middle}### Response:\n"
    return [Segment(prompt, False), Segment(values["output"], True)]


def _prompt_completion(values: dict[str, Any], where: str) -> list[Segment]:
    return [Segment(values["prompt"], False), Segment(values["completion"], True)]


def _plain(values: dict[str, Any], where: str) -> list[Segment]:
    return [Segment(values["text"], True)]


def _all_counts(render: Render) -> Render:
    return lambda values, where: [Segment("".join(piece.text for piece in render(values, where)), True)]


def _template_pieces(template: str) -> list[tuple[str, str | None]]:
    """Literal texts, each with the column that follows it (None at the end)."""
    try:
        template_fields(template)
    except ValueError as error:
        raise DataError(f"{error}.", where="data.template") from None
    return [(literal, name) for literal, name, _, _ in Formatter().parse(template)]


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
            text += literal + (values[name] if name is not None else "")
        if marker and prompt_length is None:
            found = text.find(marker)
            prompt_length = found + len(marker) if found >= 0 else len(text)
        return [Segment(text[:prompt_length], False), Segment(text[prompt_length:], True)]

    return render


def _text(value: object, column: str, where: str) -> str:
    """The value as text: nothing and NaN are empty, numbers as Python and truth values as JSON writes them."""
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    raise DataError(f'column "{column}" holds a {type(value).__name__}, not text.', where=where)


_FORMATS: dict[str, tuple[list[str], Render]] = {
    "alpaca": (["instruction", "input", "output"], _alpaca),
    "prompt_completion": (["prompt", "completion"], _prompt_completion),
    "text": (["text"], _plain),
}
