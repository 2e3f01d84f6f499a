"""A contiguous range of a flattened tensor as rectangular boxes of the tensor itself.

Engines hold flat slices; torch's distributed checkpoint (DCP) stores boxes. A range of a tensor of d dimensions is at
most 2 d - 1 boxes: a row begun, whole rows, a row not finished, and the same within each of the two broken rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Box:
    """Offsets and sizes in the tensor; `begin` is the box's first element, counted from the start of the range."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """The boxes, in the order of their elements, that hold elements [start, start + numel) of a tensor of `shape`."""
    found: list[Box] = []
    begin = 0
    for offsets, sizes in _cut(tuple(shape), start, start + numel):
        box = Box(offsets=offsets, sizes=sizes, begin=begin)
        found.append(box)
        begin += box.numel
    return found


def _cut(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    inner = math.prod(shape[1:])
    row = start // inner
    if start % inner:
        end = min(stop, (row + 1) * inner)
        yield from _within(row, shape, start, end)
        row, start = row + 1, end
    last = stop // inner
    if row < last:
        yield (row, *(0 for _ in shape[1:])), (last - row, *shape[1:])
        start = last * inner
    if start < stop:
        yield from _within(last, shape, start, stop)


def _within(
    row: int, shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of a range that lies in one row."""
    first = row * math.prod(shape[1:])
    for offsets, sizes in _cut(shape[1:], start - first, stop - first):
        yield (row, *offsets), (1, *sizes)
