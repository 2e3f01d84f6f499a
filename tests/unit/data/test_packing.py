"""Packing: rows of several documents that do not see each other."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from samestep.data import Loader, prepare
from samestep.recipe.schema import Data

NO = -100


def packed(path, tokenizer, **changes) -> Any:
    return prepare(Data.model_validate({"path": path, "packing": True, **changes}), tokenizer, seed=0)


def batch_of_all(examples) -> Any:
    loader = Loader(
        examples,
        ranks=1,
        micro_batch=len(examples),
        accumulation=1,
        seed=0,
        shuffle=False,
        drop_last=False,
        pad_id=0,
    )
    return loader.step(0).batch(0, 0)


def test_labels_positions_and_documents(write, tokenizer):
    path = write(
        {"prompt": "a", "completion": " b"},  # 4 tokens
        {"prompt": "a b", "completion": " c"},  # 5
        {"prompt": "c", "completion": " d"},  # 4
    )
    prepared = packed(path, tokenizer, format="prompt_completion", max_tokens=9)
    batch = batch_of_all(prepared.train)
    assert batch.input_ids.tolist() == [[1, 12, 13, 2, 1, 12, 13, 14, 2], [1, 14, 15, 2, 0, 0, 0, 0, 0]]
    # The </s> of the first document is followed by the <s> of the second, which it does not predict.
    assert batch.labels.tolist() == [[NO, 13, 2, NO, NO, NO, 14, 2, NO], [NO, 15, 2, NO, NO, NO, NO, NO, NO]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 0, 0, 0, 0, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, -1, -1, -1, -1, -1]]
    assert (batch.tokens, batch.label_tokens) == (13, 6)
    assert (prepared.train_report.kept, prepared.train_report.tokens) == (3, 13)


def test_text_that_counts_whole_does_not_predict_the_next_document(write, tokenizer):
    prepared = packed(write({"text": "a b"}, {"text": "c"}), tokenizer, format="text", append_end_token=False)
    batch = batch_of_all(prepared.train)
    assert batch.input_ids.tolist() == [[1, 12, 13, 1, 14]]
    assert batch.labels.tolist() == [[12, 13, NO, 14, NO]]


@pytest.mark.parametrize("max_tokens", [9, 10, 17, 40])
def test_greedy_in_order_and_nothing_split(write, tokenizer, max_tokens):
    lengths = [3, 9, 4, 4, 8, 3, 3, 3, 7, 5, 9, 9, 3]
    rows = [{"text": " ".join(["a"] * (length - 2))} for length in lengths]
    examples = packed(write(*rows), tokenizer, format="text", max_tokens=max_tokens).train
    expected: list[list[int]] = [[]]
    for length in lengths:
        if sum(expected[-1]) + length > max_tokens:
            expected.append([])
        expected[-1].append(length)
    found = [examples.row_documents(row) for row in range(len(examples))]
    assert [[int(end - begin) for begin, end in pairwise(row)] for row in found] == expected


def test_without_packing_there_are_no_documents(write, tokenizer):
    batch = batch_of_all(packed(write({"text": "a"}), tokenizer, format="text", packing=False).train)
    assert batch.position_ids is None and batch.document_ids is None


def test_held_out_rows_are_packed_too(write, tokenizer):
    prepared = packed(write(*[{"text": "a b"}] * 8), tokenizer, format="text", max_tokens=8, held_out=4)
    assert len(prepared.held_out) == 2 and prepared.held_out_report.kept == 4
