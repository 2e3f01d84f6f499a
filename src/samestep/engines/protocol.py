"""What the training loop asks of an engine. It exists so that the loop, the monitor, the export and the
checkpoints never know which engine they work on.

An engine's state is seen as `Shard`s: flat slices of named tensors. Every engine here cuts a tensor into
contiguous ranges of its flattened elements (FSDP along the first dimension, ZeRO along flat buffers), so a
name, a start and a 1-D tensor say all there is to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A contiguous range of one trainable parameter, as this rank holds it.

    `values` is a 1-D view of the master; `start` its first element's index in the flattened parameter of `shape`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One forward and backward pass of this process: micro-batch `micro` of rank `rank`.

    `rank` differs from the process's own rank only on `single`, which runs every rank's micro-batches.
    """

    micro: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Where this rank's shards lie among the copies: replica `index` of `count`."""

    index: int
    count: int


class Engine(Protocol):
    """One training state on one rank.

    `model` is what to call; `module` the model itself, whose parameters and buffers have the names it was loaded with.
    `updates` counts the updates of the weights.
    """

    model: nn.Module
    module: nn.Module
    replica: Replica
    updates: int

    @property
    def reduced_dtypes(self) -> set[torch.dtype]:
        """The dtypes in which gradients crossed the ranks so far."""
        ...

    def turns(self, micro_steps: int) -> Sequence[Turn]:
        """The forward and backward passes of one step, in the order this engine wants them."""
        ...

    def backward(self, loss: torch.Tensor, turn: Turn, micro_steps: int) -> None:
        """Backward pass of a scalar loss; accumulates (and reduces, by the recipe's rule) the gradient."""
        ...

    def gradients(self) -> list[torch.Tensor]:
        """The reduced, accumulated gradient of this step: 1-D views aligned with `masters()`."""
        ...

    def masters(self) -> list[Shard]:
        """This rank's share of the trainable parameters, in the master dtype."""
        ...

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """Optimizer state of one of this rank's shards by torch's keys; empty before the first step."""
        ...

    def apply(self, lr: float) -> None:
        """Updates the weights with the gradient that `gradients()` shows, then drops that gradient."""
        ...

    def discard(self) -> None:
        """Drops the gradient of this step without an update. The gradient is non-finite then."""
        ...

    def prepare(self, keys: Sequence[str], updates: int) -> None:
        """Makes the optimizer's state what it is after `updates` updates, but for its values: `moments()` has zeros
        under `keys` then, for the caller to fill, as `masters()`, before `refresh()`."""
        ...

    def refresh(self) -> None:
        """Has the next forward pass use what was written into `masters()`."""
        ...

    def close(self) -> None:
        """Frees what the engine holds outside of Python objects."""
        ...
