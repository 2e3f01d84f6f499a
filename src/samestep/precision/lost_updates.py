"""Updates that rounding turns into no change: forecast before a run, and measured during it.

*Lost*: the optimizer wanted to move a weight and the master stayed where it was. *Unseen*: the master (or the
compensation that belongs to it) moved, but the low-precision copy that the forward pass uses is still the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_SAMPLES = 65_536


def sample(values: torch.Tensor, *, start: int, numel: int) -> torch.Tensor:
    """A view of every k-th element of a parameter of `numel` elements, as far as it lies in `values` [n].

    k counts from the parameter's first element, so that the sample is the same however the parameter is cut.
    """
    stride = -(-numel // _SAMPLES)
    return values[(-start) % stride :: stride]


def forecast_lost(weights: torch.Tensor, lr: float) -> tuple[int, int]:
    """How many of `weights` an AdamW step of size `lr` leaves unmoved, in their own dtype, and how many there are.

    AdamW's first step moves every weight by lr (its two moments cancel up to eps); up and down count one half each.
    """
    wide = weights.double()
    stays = sum(int(((wide + sign * lr).to(weights.dtype) == weights).sum()) for sign in (-1, 1))
    return stays, 2 * weights.numel()


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Elements looked at on this rank: updates that were wanted, lost among them, unseen among them."""

    wanted: int
    lost: int
    unseen: int


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One sampled shard before a step: `values` is a live view, `wanted` marks where an update is due."""

    values: torch.Tensor
    before: torch.Tensor
    wanted: torch.Tensor
    compensation: torch.Tensor | None
    compensation_before: torch.Tensor | None

    def moved(self) -> torch.Tensor:
        """Where the step changed the weight, or the rounding error that is carried along with it."""
        moved = self.values != self.before
        if self.compensation is not None:
            moved |= self.compensation != self.compensation_before
        return moved


def watch(
    values: torch.Tensor,
    gradient: torch.Tensor,
    moments: Sequence[torch.Tensor],
    *,
    decayed: bool,
    compensation: torch.Tensor | None = None,
) -> Watched:
    """Remembers sampled weights before a step. All arguments are samples of one shard [n].

    An update is wanted where the gradient, a moment or, with weight decay, the weight itself is not zero.
    """
    wanted = gradient != 0
    for moment in moments:
        wanted |= moment != 0
    if decayed:
        wanted |= values != 0
    return Watched(
        values=values,
        before=values.clone(),
        wanted=wanted,
        compensation=compensation,
        compensation_before=None if compensation is None else compensation.clone(),
    )


def count(watched: Sequence[Watched], compute: torch.dtype) -> Counts:
    """Compares the watched weights with what they were. `compute` is the dtype of the forward pass's copy."""
    wanted = lost = unseen = 0
    for shard in watched:
        moved = shard.moved()
        wanted += int(shard.wanted.sum())
        lost += int((shard.wanted & ~moved).sum())
        if shard.compensation is not None or shard.values.dtype.itemsize > compute.itemsize:
            same_copy = shard.values.to(compute) == shard.before.to(compute)
            unseen += int((shard.wanted & moved & same_copy).sum())
    return Counts(wanted=wanted, lost=lost, unseen=unseen)
