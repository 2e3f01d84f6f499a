"""Updates that rounding turns into no change: forecast before a run, and measured during it.

*Lost*: the optimizer wanted to move a weight and the master stayed where it was. *Unseen*: the master (or the
compensation that belongs to it) moved, but the low-precision copy that the forward pass uses is still the same.

Counting tells how often; the *length* tells how much: the part of the wanted update, measured along its own direction,
that did not arrive. An update that arrives whole, or on average as stochastic rounding does, has 0 of its length lost;
one that vanishes has 1; rounding up a little more than was wanted gives less than 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

_SAMPLES = 16_384


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
    """Sums over the sampled elements of this rank: updates that were wanted, lost and unseen among them, and scalar
    products of the wanted update with itself, with what arrived in the master and with what the forward pass sees."""

    wanted: float
    lost: float
    unseen: float
    wanted_squared: float
    arrived: float
    seen: float

    @staticmethod
    def total(rows: Sequence[Sequence[float]]) -> Counts:
        """The counts of all ranks together, from each rank's `numbers`."""
        sums = [sum(row[i] for row in rows) for i in range(len(fields(Counts)))]
        return Counts(**dict(zip((f.name for f in fields(Counts)), sums, strict=True)))

    @property
    def numbers(self) -> list[float]:
        return [getattr(self, f.name) for f in fields(self)]

    def share(self, of: str) -> float:
        """The share of the wanted updates that are `of`: lost or unseen."""
        return getattr(self, of) / self.wanted if self.wanted else 0.0

    def length(self, of: str) -> float:
        """The share of the wanted update's length that did not become `of`: arrived or seen."""
        return 1 - getattr(self, of) / self.wanted_squared if self.wanted_squared else 0.0


def count(
    wanted: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    compute: torch.dtype,
    *,
    compensation: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Counts:
    """Compares sampled masters [n] before and after a step with the update that was wanted (fp64 [n]).

    `compute` is the dtype of the forward pass's copy, which is rounded to nearest. `compensation` is what the optimizer
    carries along with the masters, before and after the step.
    """
    arrived = after.double() - before.double()
    moved = after != before
    seen = arrived
    if compensation is not None:
        old, new = compensation
        arrived = arrived + (new.double() - old.double())
        moved = moved | (new != old)
    elif after.dtype.itemsize > compute.itemsize:
        seen = after.to(compute).double() - before.to(compute).double()
    due = wanted != 0
    return Counts(
        wanted=int(due.sum()),
        lost=int((due & ~moved).sum()),
        unseen=int((due & moved & (seen == 0)).sum()),
        wanted_squared=float(wanted.dot(wanted)),
        arrived=float(wanted.dot(arrived)),
        seen=float(wanted.dot(seen)),
    )
