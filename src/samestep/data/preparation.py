"""Preparation: from the recipe's data section to examples, with a report of what became of every row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import groupby, islice
from typing import Any

import numpy as np

from samestep.data.chat import chat_segments, chat_text, require_chat_template
from samestep.data.examples import Examples
from samestep.data.files import Row, read_rows, source_name
from samestep.data.formats import Format, build_format
from samestep.data.order import SPLIT_STREAM, permutation
from samestep.data.packing import pack
from samestep.data.tokens import Tokens, require_tokenizer, tokenise
from samestep.errors import DataError
from samestep.recipe.schema import Data, HubData

ROWS_AT_ONCE = 1000
"""Rows that are held as text at one time; tokenizers are fast on many rows and memory is not wasted on all."""


@dataclass(frozen=True, kw_only=True)
class PreparationReport:
    """What became of the rows. rows_read = kept + the three kinds of dropped rows."""

    rows_read: int
    kept: int
    truncated: int
    """Of the kept rows, those cut to max_tokens."""
    dropped_too_long: int
    dropped_empty: int
    dropped_without_labels: int
    """Rows without a token that counts in the loss, also those that lost it by truncation."""
    tokens: int
    """Tokens of the kept rows."""
    label_tokens: int
    """Those of them that count in the loss."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The data of a run, the same on every rank."""

    train: Examples
    train_report: PreparationReport
    held_out: Examples | None
    held_out_report: PreparationReport | None


class Outcome(IntEnum):
    """What became of a row."""

    KEPT = 0
    TRUNCATED = 1
    TOO_LONG = 2
    EMPTY = 3
    WITHOUT_LABELS = 4


@dataclass(frozen=True, kw_only=True)
class _Source:
    """All rows of a source in order; dropped ones have no tokens."""

    name: str
    examples: Examples
    outcomes: np.ndarray
    """int8 [rows read], of Outcome"""


def prepare(data: Data, tokenizer: Any, *, seed: int) -> Prepared:
    """Read, format, tokenise and split the data.

    A held-out share or number of rows is taken from the rows of the file by a permutation of `seed`, before any row is
    dropped: which rows are held out depends on the seed and the number of rows alone. The rows on both sides keep the
    order of the file. A held-out path is read like the data itself, all of it: data.rows limits the training data.

    Paths are used as they are: relative ones have been made relative to the recipe's folder before.
    Raises DataError (with file and line where there is one) and, for a tokenizer without offsets, ModelError.
    """
    require_tokenizer(tokenizer, append_end_token=data.append_end_token)
    if data.template is None and data.format == "messages":
        require_chat_template(tokenizer)
    chat = partial(chat_text if data.loss_on == "all" else chat_segments, tokenizer=tokenizer)
    layout = build_format(data, chat=chat)
    source = _read_source(data, data.path, layout, tokenizer, limit=data.rows)
    if isinstance(data.held_out, str):
        train_rows = np.arange(len(source.outcomes))
        held_out_source = _read_source(data, data.held_out, layout, tokenizer, limit=None)
        held_out_rows = np.arange(len(held_out_source.outcomes))
    else:
        held_out_source = source
        train_rows, held_out_rows = _split(len(source.outcomes), data.held_out, seed, source.name)
    train, train_report = _take(source, train_rows, data, "train on")
    held_out, held_out_report = None, None
    if len(held_out_rows):
        held_out, held_out_report = _take(held_out_source, held_out_rows, data, "evaluate on")
    return Prepared(train=train, train_report=train_report, held_out=held_out, held_out_report=held_out_report)


def _read_source(data: Data, path: str | HubData, layout: Format, tokenizer: Any, *, limit: int | None) -> _Source:
    name = source_name(path)
    ids, counts, lengths, outcomes = [np.zeros(0, np.int32)], [np.zeros(0, bool)], [0], []
    for rows in _batches(read_rows(path, limit=limit), layout):
        texts = [layout.text(row) for row in rows]
        full = tokenise(texts, tokenizer, special_tokens=not layout.chat, append_end_token=data.append_end_token)
        for text, tokens in zip(texts, full, strict=True):
            outcome, row = _judge(tokens, data, text.where)
            outcomes.append(outcome)
            lengths.append(len(row.ids))
            ids.append(row.ids)
            counts.append(row.counts)
    if not outcomes:
        raise DataError("holds no rows.", where=name, remedy="Correct the path in the recipe.")
    examples = Examples(
        tokens=np.concatenate(ids), counts=np.concatenate(counts), row_starts=np.cumsum(lengths, dtype=np.int64)
    )
    return _Source(name=name, examples=examples, outcomes=np.array(outcomes, dtype=np.int8))


def _batches(rows: Iterator[Row], layout: Format) -> Iterator[list[Row]]:
    """Rows in lists of at most ROWS_AT_ONCE, each of one file that has the columns."""
    for file, rows_of_file in groupby(rows, key=lambda row: row.file):
        for number, batch in enumerate(_lists(rows_of_file)):
            if number == 0:
                layout.require_columns(batch, where=file)
            yield batch


def _lists(rows: Iterator[Row]) -> Iterator[list[Row]]:
    return iter(lambda: list(islice(rows, ROWS_AT_ONCE)), [])


def _judge(row: Tokens, data: Data, where: str) -> tuple[Outcome, Tokens]:
    """What becomes of a row, and the tokens that remain of it."""
    nothing = Tokens(np.zeros(0, np.int32), np.zeros(0, bool))
    if not len(row.ids):
        _refuse(data.unusable == "error", "the row is empty.", where, "data.unusable: drop")
        return Outcome.EMPTY, nothing
    outcome = Outcome.KEPT
    if len(row.ids) > data.max_tokens:
        what = f"{len(row.ids)} tokens are more than max_tokens, {data.max_tokens}."
        _refuse(data.too_long == "error", what, where, "data.max_tokens higher, or data.too_long: truncate or drop")
        if data.too_long == "drop":
            return Outcome.TOO_LONG, nothing
        row = Tokens(row.ids[: data.max_tokens], row.counts[: data.max_tokens])
        outcome = Outcome.TRUNCATED
    row.counts[:1] = False
    if not row.counts.any():
        _refuse(data.unusable == "error", "no token of the row counts in the loss.", where, "data.unusable: drop")
        return Outcome.WITHOUT_LABELS, nothing
    return outcome, row


def _refuse(refused: bool, what: str, where: str, settings: str) -> None:
    if refused:
        raise DataError(what, where=where, remedy=f"Correct the row, or set {settings}.")


def _split(rows: int, held_out: float, seed: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers to train on and row numbers held out. An int is a number of rows, a float a share."""
    if not held_out:
        return np.arange(rows), np.arange(0)
    count = held_out if isinstance(held_out, int) else round(held_out * rows)
    if not 0 < count < rows:
        raise DataError(
            f"data.held_out {held_out} of {rows} rows leaves {max(rows - count, 0)} to train on and "
            f"{min(count, rows)} to evaluate on.",
            where=where,
            remedy="Change it; 0 holds nothing out.",
        )
    order = permutation(rows, seed=seed, stream=SPLIT_STREAM)
    return order[count:], order[:count]


def _take(source: _Source, rows: np.ndarray, data: Data, purpose: str) -> tuple[Examples, PreparationReport]:
    """The examples of some rows, in the order of the file, and their report."""
    taken = np.zeros(len(source.outcomes), dtype=bool)
    taken[rows] = True
    lengths = source.examples.row_tokens
    of_taken = np.repeat(taken, lengths)
    examples = Examples(
        tokens=source.examples.tokens[of_taken],
        counts=source.examples.counts[of_taken],
        row_starts=np.concatenate(([0], np.cumsum(lengths[taken & (lengths > 0)]))).astype(np.int64),
    )
    report = _report(source.outcomes[rows], examples)
    if not report.kept:
        raise DataError(
            f"no row is left to {purpose}: of {report.rows_read} rows {report.dropped_too_long} are too long, "
            f"{report.dropped_empty} empty and {report.dropped_without_labels} without a token that counts in the "
            "loss.",
            where=source.name,
            remedy="Look at data.format, columns, response_marker and max_tokens.",
        )
    return (pack(examples, max_tokens=data.max_tokens) if data.packing else examples), report


def _report(outcomes: np.ndarray, examples: Examples) -> PreparationReport:
    number = {outcome: int((outcomes == outcome).sum()) for outcome in Outcome}
    return PreparationReport(
        rows_read=len(outcomes),
        kept=number[Outcome.KEPT] + number[Outcome.TRUNCATED],
        truncated=number[Outcome.TRUNCATED],
        dropped_too_long=number[Outcome.TOO_LONG],
        dropped_empty=number[Outcome.EMPTY],
        dropped_without_labels=number[Outcome.WITHOUT_LABELS],
        tokens=len(examples.tokens),
        label_tokens=int(examples.counts.sum()),
    )
