"""Packing: several documents in one row."""

from __future__ import annotations

import numpy as np

from samestep.data.examples import Examples


def pack(examples: Examples, *, max_tokens: int) -> Examples:
    """The same documents in rows of at most max_tokens tokens.

    Greedy and in order: a row takes documents as they come until the next one does not fit. No document is split, and
    documents are not joined and cut at max_tokens either, as is often done with plain text: every document
    begins at position 0 and sees itself alone. No example may be longer than max_tokens.
    """
    starts = examples.row_starts
    rows = [0]
    while rows[-1] < len(examples):
        rows.append(int(np.searchsorted(starts, starts[rows[-1]] + max_tokens, side="right")) - 1)
        assert rows[-1] > rows[-2], "a document is longer than max_tokens"
    return Examples(tokens=examples.tokens, counts=examples.counts, row_starts=starts[rows], document_starts=starts)
