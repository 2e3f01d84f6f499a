"""Tokens: the token ids of a row's text, and which of them count in the loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from samestep.data.formats import Text
from samestep.errors import DataError, ModelError


class Tokens(NamedTuple):
    """One row in tokens."""

    ids: np.ndarray
    """int32 [tokens]"""
    counts: np.ndarray
    """bool [tokens]: whether the token, once it is something to predict, counts in the loss."""


def require_tokenizer(tokenizer: Any, *, append_end_token: bool) -> None:
    """Raise ModelError for a tokenizer without offsets, DataError for one without the end token that is asked for."""
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"{type(tokenizer).__name__} cannot say which text a token stands for.",
            where="model.tokenizer",
            remedy="Use a tokenizer with a tokenizer.json.",
        )
    if append_end_token and tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end token.",
            where="data.append_end_token",
            remedy="Set it to false, or use a tokenizer with an eos_token.",
        )


def tokenise(texts: list[Text], tokenizer: Any, *, special_tokens: bool, append_end_token: bool) -> list[Tokens]:
    """Tokenise the texts.

    A text is tokenised whole, so its tokens are those that the model will meet, and not those of its pieces. A token
    counts when the last character that it stands for counts; one that holds both prompt and completion does, since the
    completion cannot be said without it. A token without characters counts at the end of a text if the text does
    there, and not at the beginning (a beginning-of-sequence token).

    The end token is appended to a text that does not already end with it. An empty row has no tokens at all.
    """
    whole = ["".join(segment.text for segment in text.segments) for text in texts]
    encoded = _encode(texts, whole, tokenizer, special_tokens)
    rows = []
    for index, text in enumerate(texts):
        if not text.segments:
            rows.append(Tokens(np.zeros(0, np.int32), np.zeros(0, bool)))
            continue
        ids = np.array(encoded["input_ids"][index], dtype=np.int32)
        offsets = np.array(encoded["offset_mapping"][index], dtype=np.int64).reshape(-1, 2)
        added = np.array(encoded["special_tokens_mask"][index], dtype=bool) & (offsets[:, 0] == offsets[:, 1])
        counts = _counts(text, offsets[:, 1], added)
        if append_end_token and not _has_end(ids, whole[index], tokenizer):
            ids = np.append(ids, np.int32(tokenizer.eos_token_id))
            counts = np.append(counts, _counts_at_end(text))
        rows.append(Tokens(ids, counts))
    return rows


def _encode(texts: list[Text], whole: list[str], tokenizer: Any, special_tokens: bool) -> Any:
    try:
        return tokenizer(
            whole,
            add_special_tokens=special_tokens,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            return_attention_mask=False,
            truncation=False,
            padding=False,
            verbose=False,
        )
    except (TypeError, UnicodeEncodeError):
        for text, string in zip(texts, whole, strict=True):
            try:
                string.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"character {string[error.start]!a} is half of a surrogate pair, not text.", where=text.where
                ) from None
        raise


def _counts(text: Text, ends: np.ndarray, added: np.ndarray) -> np.ndarray:
    """bool [tokens], from the end offset of every token and the tokens that stand for no text."""
    flags = np.array([segment.counts for segment in text.segments] + [False])
    segment_ends = np.cumsum([len(segment.text) for segment in text.segments])
    counts = flags[np.searchsorted(segment_ends, np.maximum(ends - 1, 0), side="right")]
    after_text = np.cumsum(~added) > 0
    counts[added] = after_text[added] & _counts_at_end(text)
    return counts


def _counts_at_end(text: Text) -> bool:
    return next((segment.counts for segment in reversed(text.segments) if segment.text), False)


def _has_end(ids: np.ndarray, text: str, tokenizer: Any) -> bool:
    return (len(ids) > 0 and ids[-1] == tokenizer.eos_token_id) or text.rstrip().endswith(tokenizer.eos_token)
