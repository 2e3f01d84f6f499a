"""Policies, report, split: what becomes of every row."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from samestep.data import PreparationReport, prepare
from samestep.errors import DataError
from samestep.recipe.schema import Data

MIXED = [
    {"prompt": "a", "completion": " b"},  # <s> a b </s>: 4 tokens, 2 labels
    {"prompt": "a b", "completion": " c d e"},  # <s> a b c d e </s>: 7 tokens, 4 labels; cut to 5: 2 labels
    {"prompt": "a b c d e", "completion": " a"},  # 8 tokens; cut to 5 it has no label
    {"prompt": "", "completion": " \n"},  # empty
    {"prompt": "a b", "completion": ""},  # no label
]


def mixed(path: str, **changes: object) -> Data:
    return Data.model_validate({"path": path, "format": "prompt_completion", "max_tokens": 5, **changes})


def ids(examples, index):
    return examples.row(index)[0].tolist()


def test_truncate(write, tokenizer):
    prepared = prepare(mixed(write(*MIXED)), tokenizer, seed=0)
    assert prepared.train_report == PreparationReport(
        rows_read=5,
        kept=2,
        truncated=1,
        dropped_too_long=0,
        dropped_empty=1,
        dropped_without_labels=2,
        tokens=9,
        label_tokens=4,
    )
    assert [ids(prepared.train, 0), ids(prepared.train, 1)] == [[1, 12, 13, 2], [1, 12, 13, 14, 15]]
    assert prepared.held_out is None and prepared.held_out_report is None


def test_drop(write, tokenizer):
    prepared = prepare(mixed(write(*MIXED), too_long="drop"), tokenizer, seed=0)
    assert prepared.train_report == PreparationReport(
        rows_read=5,
        kept=1,
        truncated=0,
        dropped_too_long=2,
        dropped_empty=1,
        dropped_without_labels=1,
        tokens=4,
        label_tokens=2,
    )


def test_a_row_of_just_max_tokens_is_not_too_long(write, tokenizer):
    path = write(MIXED[1])
    assert prepare(mixed(path, max_tokens=7, too_long="error"), tokenizer, seed=0).train_report.truncated == 0
    assert prepare(mixed(path, max_tokens=6), tokenizer, seed=0).train_report.truncated == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"too_long": "error"}, r"rows\.jsonl:2: 7 tokens are more than max_tokens, 5\..*data\.too_long"),
        ({"unusable": "error"}, r"rows\.jsonl:3: no token of the row counts"),
        ({"unusable": "error", "too_long": "drop"}, r"rows\.jsonl:4: the row is empty"),
    ],
)
def test_error_policies_name_the_row(write, tokenizer, changes, message):
    with pytest.raises(DataError, match=message):
        prepare(mixed(write(*MIXED), **changes), tokenizer, seed=0)


def test_nothing_left(write, tokenizer):
    with pytest.raises(DataError, match=r"no row is left to train on: of 2 rows 0 are too long, 1 empty and 1 without"):
        prepare(mixed(write(*MIXED[3:])), tokenizer, seed=0)


def test_rows_limits_what_is_read(write, tokenizer):
    assert prepare(mixed(write(*MIXED), rows=2), tokenizer, seed=0).train_report.rows_read == 2


def texts(count: int) -> list[dict[str, str]]:
    """Rows that differ in length: row i has i + 1 words, i + 3 tokens."""
    return [{"text": " ".join(["a"] * (index + 1))} for index in range(count)]


def row_numbers(examples) -> list[int]:
    return [int(tokens) - 3 for tokens in examples.row_tokens]


@pytest.mark.parametrize(("held_out", "number"), [(0.25, 5), (0.02 + 0.08, 2), (6, 6), (1, 1), (19, 19)])
def test_split(write, tokenizer, held_out, number):
    path = write(*texts(20))
    splits = [prepare(Data(path=path, format="text", held_out=held_out), tokenizer, seed=seed) for seed in (0, 0, 1)]
    for prepared in splits:
        assert prepared.held_out_report is not None
        train, kept_out = row_numbers(prepared.train), row_numbers(prepared.held_out)
        assert len(kept_out) == number
        assert sorted(train + kept_out) == list(range(20))
        assert train == sorted(train) and kept_out == sorted(kept_out)
        assert prepared.train_report.rows_read == 20 - number and prepared.held_out_report.rows_read == number
        assert prepared.train_report.tokens == sum(row + 3 for row in train)
        assert prepared.held_out_report.label_tokens == sum(row + 2 for row in kept_out)
    assert row_numbers(splits[0].held_out) == row_numbers(splits[1].held_out)
    assert row_numbers(splits[0].held_out) != row_numbers(splits[2].held_out) or number in (1, 19)


def test_the_split_does_not_depend_on_what_is_dropped(write, tokenizer):
    path = write(*texts(20))
    all_rows = prepare(Data(path=path, format="text", held_out=8), tokenizer, seed=3)
    short_rows = prepare(Data(path=path, format="text", held_out=8, max_tokens=12, too_long="drop"), tokenizer, seed=3)
    assert row_numbers(short_rows.held_out) == [row for row in row_numbers(all_rows.held_out) if row + 3 <= 12]
    assert row_numbers(short_rows.train) == [row for row in row_numbers(all_rows.train) if row + 3 <= 12]


@pytest.mark.parametrize("held_out", [0, 0.0])
def test_no_split(write, tokenizer, held_out):
    prepared = prepare(Data(path=write(*texts(3)), format="text", held_out=held_out), tokenizer, seed=0)
    assert row_numbers(prepared.train) == [0, 1, 2] and prepared.held_out is None


def test_held_out_file(write, tokenizer):
    path, other = write(*texts(4)), write(*texts(3), name="other.jsonl")
    prepared = prepare(Data(path=path, format="text", held_out=other, rows=2), tokenizer, seed=0)
    assert row_numbers(prepared.train) == [0, 1] and row_numbers(prepared.held_out) == [0, 1, 2]


@pytest.mark.parametrize("held_out", [4, 5, 0.01, 0.99])
def test_split_that_leaves_one_side_empty(write, tokenizer, held_out):
    with pytest.raises(DataError, match=r"rows\.jsonl: data\.held_out .* of 4 rows leaves"):
        prepare(Data(path=write(*texts(4)), format="text", held_out=held_out), tokenizer, seed=0)


def test_more_rows_than_are_tokenised_at_once(write, tokenizer, monkeypatch):
    monkeypatch.setattr("samestep.data.preparation.ROWS_AT_ONCE", 3)
    assert row_numbers(prepare(Data(path=write(*texts(8)), format="text"), tokenizer, seed=0).train) == list(range(8))


def test_storage_is_flat(write, tokenizer):
    train = prepare(Data(path=write(*texts(3)), format="text"), tokenizer, seed=0).train
    assert train.tokens.dtype == np.int32 and train.counts.dtype == np.bool_
    assert train.row_starts.tolist() == [0, 3, 7, 12]
    assert train.row_label_tokens.tolist() == [2, 3, 4]
    assert train.largest_token_id == 12


def test_the_global_generators_are_left_alone(write, tokenizer):
    before = torch.random.get_rng_state(), repr(np.random.get_state(legacy=True))
    prepare(Data(path=write(*texts(9)), format="text", held_out=3), tokenizer, seed=0)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == repr(np.random.get_state(legacy=True))


def test_report_is_plain_data(write, tokenizer):
    report = prepare(Data(path=write(*texts(3)), format="text", held_out=1), tokenizer, seed=0).train_report
    assert set(json.loads(json.dumps(asdict(report)))) == set(PreparationReport.__dataclass_fields__)
