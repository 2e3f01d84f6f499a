"""Examples: rows of tokens, stored flat."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Examples:
    """The tokenised rows of one data set. A row holds one document or, packed, several."""

    tokens: np.ndarray
    """int32 [tokens]: the ids of all rows, one row after the other."""
    counts: np.ndarray
    """bool [tokens]: whether predicting the token counts in the loss. False for the first token of a document,
    which nothing in the document predicts."""
    row_starts: np.ndarray
    """int64 [rows + 1]: where the rows begin in `tokens`."""
    document_starts: np.ndarray | None = None
    """int64 [documents + 1]: where the documents begin in `tokens`, with packing; else None."""

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    @cached_property
    def row_tokens(self) -> np.ndarray:
        """int64 [rows]: tokens of each row."""
        return np.diff(self.row_starts)

    @cached_property
    def row_label_tokens(self) -> np.ndarray:
        """int64 [rows]: tokens of each row that count in the loss."""
        return np.diff(np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64)))[self.row_starts])

    @cached_property
    def sha256(self) -> str:
        """Digest of all rows and of what counts in them: equal for equal training data, wherever it came from."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.counts, self.row_starts, self.document_starts):
            digest.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @property
    def largest_token_id(self) -> int:
        """The largest id that occurs: the model's vocabulary has to be larger."""
        return int(self.tokens.max())

    @property
    def longest(self) -> int:
        """Tokens of the longest row; packed, of the longest document, since positions start anew in each."""
        starts = self.row_starts if self.document_starts is None else self.document_starts
        return int(np.diff(starts).max())

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [tokens] and counts bool [tokens] of a row; views."""
        span = slice(self.row_starts[index], self.row_starts[index + 1])
        return self.tokens[span], self.counts[span]

    def row_documents(self, index: int) -> np.ndarray:
        """Where the documents of a row begin in the row, and its length: int64 [documents + 1]. Packing only."""
        assert self.document_starts is not None
        begin, end = self.row_starts[index], self.row_starts[index + 1]
        first, last = np.searchsorted(self.document_starts, (begin, end))
        return self.document_starts[first : last + 1] - begin
