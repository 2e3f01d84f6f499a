"""Whether one loss curve is another one run slower: the trap in which a larger learning rate seems to be the cure.

Updates that are lost, or a learning rate that is too small, make a run pass through the same losses later. If
loss_b(1 + u) is about loss_a(1 + s u) for the losses after u updates, run b makes s times the progress of run a.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Fewer steps say nothing about the shape of a curve.
_FEWEST_STEPS = 12
# Speeds tried: from 1 down to where the slower run has nearly stood still.
_SLOWEST, _TRIED = 0.005, 160
# A speed this close to 1 is no other speed.
_SAME_SPEED = 0.9
# A run at another speed starts from the same loss: within this share of what the faster one falls.
_SAME_START = 0.05
# Share of the squared gap that stretching has to take away to be called the explanation.
_EXPLAINS = 0.9


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """`slower` follows `faster` at `speed` times its progress per step (below 1). `explained` is the share of the mean
    squared gap between the smoothed curves that this takes away; `matches` whether that is enough to say so."""

    slower: str
    faster: str
    speed: float
    explained: float
    matches: bool

    def described(self) -> dict[str, Any]:
        """The object in compare.json."""
        return asdict(self)


def stretch(a: str, b: str, a_losses: Sequence[float | None], b_losses: Sequence[float | None]) -> Stretch | None:
    """The stretch in time that brings two curves, one value a step from step 1 on, closest.

    None when curves are too short, not finite, equal, when they start apart, or when the lower one does not fall.
    """
    n = min(len(a_losses), len(b_losses))
    one = [value for value in a_losses[:n] if value is not None and math.isfinite(value)]
    other = [value for value in b_losses[:n] if value is not None and math.isfinite(value)]
    if n < _FEWEST_STEPS or len(one) < n or len(other) < n or one == other:
        return None
    one, other = _smoothed(one), _smoothed(other)
    slower_is_b = _tail(other) > _tail(one)
    slower, faster = (other, one) if slower_is_b else (one, other)
    fall = faster[0] - _tail(faster)
    if fall <= 0 or abs(slower[0] - faster[0]) > _SAME_START * fall:
        return None
    before = _gap(slower, faster, 1.0)
    if not before:
        return None
    speeds = [_SLOWEST ** (k / _TRIED) for k in range(_TRIED + 1)]
    speed = min(speeds, key=lambda s: _gap(slower, faster, s))
    explained = 1 - _gap(slower, faster, speed) / before
    return Stretch(
        slower=b if slower_is_b else a,
        faster=a if slower_is_b else b,
        speed=speed,
        explained=explained,
        matches=speed < _SAME_SPEED and explained >= _EXPLAINS,
    )


def _smoothed(values: Sequence[float]) -> list[float]:
    """Centred moving mean over about a tenth of the curve, so that single batches do not decide; ends use what is
    there, symmetrically."""
    half = max(1, len(values) // 20)
    smooth = []
    for at in range(len(values)):
        reach = min(half, at, len(values) - 1 - at)
        window = values[at - reach : at + reach + 1]
        smooth.append(math.fsum(window) / len(window))
    return smooth


def _tail(values: Sequence[float]) -> float:
    last = values[-max(1, len(values) // 10) :]
    return math.fsum(last) / len(last)


def _gap(slower: Sequence[float], faster: Sequence[float], speed: float) -> float:
    """Mean squared gap between the slower curve and the faster one read at `speed` times the updates."""
    total = 0.0
    for updates, value in enumerate(slower):
        position = updates * speed
        below = min(int(position), len(faster) - 1)
        above = min(below + 1, len(faster) - 1)
        read = faster[below] + (faster[above] - faster[below]) * (position - below)
        total += (value - read) ** 2
    return total / len(slower)
