"""Flat ranges as boxes: every element once, in order, whatever the shape and the cut."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.checkpoint.boxes import boxes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(0, numel - start))


@given(ranges())
def test_boxes_hold_the_range_in_its_order(case: tuple[list[int], int, int]) -> None:
    shape, start, numel = case
    tensor = torch.arange(math.prod(shape)).view(shape)
    found, begin = [], 0
    for box in boxes(shape, start, numel):
        assert box.begin == begin
        view = tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        assert view.shape == torch.Size(box.sizes)
        found.append(view.reshape(-1))
        begin += box.numel
    values = torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
    assert torch.equal(values, tensor.reshape(-1)[start : start + numel])


@given(ranges())
def test_there_are_few(case: tuple[list[int], int, int]) -> None:
    shape, start, numel = case
    assert len(boxes(shape, start, numel)) <= max(1, 2 * len(shape) - 1)


def test_of_a_scalar() -> None:
    (box,) = boxes([], 0, 1)
    assert (box.offsets, box.sizes) == ((), ())
