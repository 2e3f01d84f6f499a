"""Summing over ranks in one order on every engine.

A communication library adds ranks in whatever order its algorithm has, and another one for every collective.
From three ranks on that changes the last bits. Here ranks are summed as a balanced tree over their numbers,
((0+1)+(2+3)) and so on, on every engine: exchange the pieces with an all-to-all, add locally. The bytes on the
wire are those of a ring. A tree, because a sum over groups followed by a sum between groups is the same tree,
which makes hybrid sharding equal to the rest.

Two ranks need none of this: addition commutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sum of equally shaped tensors as a balanced tree over their positions. Overwrites the parts."""
    while len(parts) > 1:
        pairs = [parts[i].add_(parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + ([parts[-1]] if len(parts) % 2 else [])
    return parts[0]


def tree_reduce_scatter(output: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums `values` [ranks * n] over the group and leaves this rank's n elements in `output` [n]."""
    size = dist.get_world_size(group)
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values.contiguous(), group=group)
    output.view(-1).copy_(tree_sum(list(received.view(size, -1).unbind())))


def tree_all_reduce(values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums `values` over the group, in place on every rank."""
    size = dist.get_world_size(group)
    numel = values.numel()
    piece = -(-numel // size)
    padded = values.new_zeros(piece * size)
    padded[:numel] = values.reshape(-1)
    mine = values.new_empty(piece)
    tree_reduce_scatter(mine, padded, group)
    dist.all_gather_into_tensor(padded, mine, group=group)
    values.copy_(padded[:numel].view_as(values))


class Reducer:
    """The sums that an engine makes over ranks, and the dtypes they were made in.

    `order` is the recipe's engine.reduce_order. `dtypes` is what actually went over the wire so far.
    """

    def __init__(self, order: str) -> None:
        self.order = order
        self.dtypes: set[torch.dtype] = set()

    def _uses_tree(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
        return self.order == "tree" and dist.get_world_size(group) > 2 and values.is_floating_point()

    def all_reduce(self, values: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        self.dtypes.add(values.dtype)
        if self._uses_tree(values, group):
            tree_all_reduce(values, group)
        else:
            dist.all_reduce(values, group=group)

    def reduce_scatter(self, output: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        self.dtypes.add(values.dtype)
        if self._uses_tree(values, group):
            tree_reduce_scatter(output, values, group)
        else:
            dist.reduce_scatter_tensor(output, values, group=group)


class TreeAccumulator:
    """Sums a stream of gradient lists as the tree that `tree_sum` makes of the whole list.

    Holds one partial sum per level, so that emulating many ranks needs the memory of log2(ranks) gradients.
    """

    def __init__(self) -> None:
        self._levels: list[tuple[int, list[Any]]] = []

    def push(self, gradients: list[torch.Tensor]) -> None:
        level = 0
        while self._levels and self._levels[-1][0] == level:
            gradients = self._add(self._levels.pop()[1], gradients)
            level += 1
        self._levels.append((level, gradients))

    def total(self) -> list[torch.Tensor]:
        """The sum of everything pushed; empties the accumulator."""
        total = self._levels.pop()[1]
        while self._levels:
            total = self._add(self._levels.pop()[1], total)
        return total

    @staticmethod
    def _add(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
        for a, b in zip(left, right, strict=True):
            a.add_(b)
        return left
