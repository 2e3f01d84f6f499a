"""The loader: coverage, the same rows for every layout, padding, idle ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data import Examples, Loader
from samestep.errors import DataError

NO = -100


def examples_of(lengths: list[int]) -> Examples:
    """Row i has `lengths[i]` tokens; its first is 1000 + i, which no other token is; all but every third one count."""
    tokens, counts = [], []
    for row, length in enumerate(lengths):
        tokens += [1000 + row, *range(1, length)]
        counts += [False, *[place % 3 != 0 for place in range(1, length)]]
    return Examples(
        tokens=np.array(tokens, dtype=np.int32),
        counts=np.array(counts, dtype=bool),
        row_starts=np.cumsum([0, *lengths], dtype=np.int64),
    )


def loader_of(lengths: list[int], ranks: int, micro_batch: int, accumulation: int, **changes) -> Loader:
    usual: dict[str, Any] = {"seed": 0, "shuffle": True, "drop_last": False, "pad_id": 7, "idle_ranks": True}
    layout = {"ranks": ranks, "micro_batch": micro_batch, "accumulation": accumulation}
    return Loader(examples_of(lengths), **layout, **(usual | changes))


def rows_seen(loader: Loader, index: int) -> list[int]:
    """The rows of a step in the order (micro, rank), read from the batches; batches of idle ranks left out."""
    step = loader.step(index)
    seen = []
    for micro in range(step.micro_steps):
        for rank in range(loader.ranks):
            batch = step.batch(micro, rank)
            if batch.tokens:
                seen += (batch.input_ids[:, 0] - 1000).tolist()
    return seen


layouts = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 60), layout=layouts, seed=st.integers(0, 2**40), shuffle=st.booleans())
def test_every_row_once_per_epoch(count, layout, seed, shuffle):
    ranks, micro_batch, accumulation = layout
    loader = loader_of([3] * count, *layout, seed=seed, shuffle=shuffle)
    per_step = ranks * micro_batch * accumulation
    assert loader.steps_per_epoch == -(-count // per_step)
    for epoch in range(2):
        seen = []
        for index in range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch):
            assert loader.step(index).epoch == epoch
            rows = rows_seen(loader, index)
            assert len(rows) == min(per_step, count - len(seen))
            seen += rows
        assert sorted(seen) == list(range(count))
        if not shuffle:
            assert seen == list(range(count))


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=40), layout=layouts)
def test_step_totals_are_those_of_its_batches(lengths, layout):
    loader = loader_of(lengths, *layout)
    for index in range(loader.steps_per_epoch):
        step = loader.step(index)
        batches = [step.batch(micro, rank) for micro in range(step.micro_steps) for rank in range(loader.ranks)]
        assert sum(batch.tokens for batch in batches) == step.tokens == sum(lengths[row] for row in step.rows)
        assert sum(batch.label_tokens for batch in batches) == step.label_tokens
        assert sum(int((batch.labels != NO).sum()) for batch in batches) == step.label_tokens


def test_an_epoch_is_shuffled_anew():
    loader = loader_of([3] * 30, 1, 6, 1)
    epochs = [tuple(row for index in range(5) for row in rows_seen(loader, epoch * 5 + index)) for epoch in range(3)]
    assert len({*epochs, tuple(range(30))}) == 4


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_rows_of_a_step_do_not_depend_on_the_layout(drop_last):
    layouts = [(1, 6, 1), (1, 1, 6), (2, 3, 1), (3, 1, 2), (6, 1, 1), (2, 1, 3)]
    loaders = [loader_of([3] * 34, *layout, drop_last=drop_last) for layout in layouts]
    for index in range(2 * loaders[0].steps_per_epoch):
        assert len({tuple(rows_seen(loader, index)) for loader in loaders}) == 1


def test_which_rank_gets_which_rows():
    loader = loader_of([3] * 12, 2, 2, 3, shuffle=False)
    step = loader.step(0)
    found = [[(step.batch(micro, rank).input_ids[:, 0] - 1000).tolist() for rank in (0, 1)] for micro in range(3)]
    assert found == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]


def test_a_step_is_a_function_of_its_index():
    forward = loader_of([3] * 23, 2, 2, 2)
    steps = [rows_seen(forward, index) for index in range(9)]
    backward = loader_of([3] * 23, 2, 2, 2)
    assert [rows_seen(backward, index) for index in reversed(range(9))] == steps[::-1]


def test_short_last_step_and_idle_ranks():
    loader = loader_of([4, 2, 3, 5, 6, 3, 4, 2, 3], 2, 2, 2, shuffle=False)  # 8 rows a step: the second has one
    assert loader.steps_per_epoch == 2
    step = loader.step(1)
    assert (step.micro_steps, step.tokens, step.label_tokens) == (1, 3, 2)
    assert step.batch(0, 0).input_ids.tolist() == [[1008, 1, 2]]
    idle = step.batch(0, 1)
    assert idle.input_ids.tolist() == [[1008, 1, 2]]
    assert idle.labels.tolist() == [[NO, NO, NO]]
    assert (idle.tokens, idle.label_tokens) == (0, 0)


def test_fewer_micro_batches_in_a_short_step():
    loader = loader_of([3] * 13, 2, 2, 2, shuffle=False)  # the second step has rows 8 to 12: 2 + 2, then 1 + none
    step = loader.step(1)
    assert step.micro_steps == 2
    assert step.batch(1, 0).input_ids[:, 0].tolist() == [1012]
    assert (step.batch(1, 1).tokens, step.batch(1, 1).input_ids[:, 0].tolist()) == (0, [1008])
    with pytest.raises(IndexError):
        step.batch(2, 0)
    with pytest.raises(IndexError):
        step.batch(0, 2)


def test_padding_depends_on_the_batch_alone():
    batch = loader_of([4, 2, 9, 3], 2, 2, 1, shuffle=False).step(0).batch(0, 0)
    assert batch.input_ids.tolist() == [[1000, 1, 2, 3], [1001, 1, 7, 7]]
    assert batch.labels.tolist() == [[1, 2, NO, NO], [1, NO, NO, NO]]
    assert (batch.tokens, batch.label_tokens) == (6, 3)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64


def test_drop_last():
    loader = loader_of([3] * 13, 2, 2, 1, drop_last=True)
    assert loader.steps_per_epoch == 3
    assert all(len(loader.step(index).rows) == 4 for index in range(6))
    with pytest.raises(DataError, match=r"data\.drop_last: a step takes 16 rows .*, there are 13"):
        loader_of([3] * 13, 2, 2, 4, drop_last=True)


def test_more_ranks_than_rows():
    with pytest.raises(DataError, match=r"engine\.ranks: 4 ranks are more than the 3 rows of data\. Use fewer ranks"):
        loader_of([3] * 3, 4, 1, 1, idle_ranks=False)
    assert rows_seen(loader_of([3] * 3, 4, 1, 1, shuffle=False), 0) == [0, 1, 2]


def test_evaluation_sees_every_row_once():
    for ranks, micro_batch, count in [(1, 1, 5), (2, 3, 7), (4, 2, 3), (3, 2, 12)]:
        loader = loader_of([3] * count, ranks, micro_batch, 1, shuffle=False)
        seen = [row for index in range(loader.steps_per_epoch) for row in rows_seen(loader, index)]
        assert seen == list(range(count))
