"""How computing and communicating lie over each other in one optimizer step.

One unit's weights are gathered while the one before computes; in the backward pass its gradients are reduced while the
next one computes, on the links that carry the gather of the one after. So a unit takes the longer of the two, and what
nothing can hide comes on top: the gathers of the first unit and of the root, and the last reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UnitSeconds:
    """One shard unit and micro-batch. The gathers are those before the forward and before the backward pass."""

    forward: float
    backward: float
    gather: float = 0.0
    gather_again: float = 0.0
    reduce: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """The units of a step (`root`: embeddings, last norm and head) and what follows the passes: `after`, serially."""

    root: UnitSeconds
    blocks: Sequence[UnitSeconds]
    micro_batches: int
    reduces_every_micro_batch: bool
    reduces_in_backward: bool
    after: float

    @property
    def overlapped(self) -> float:
        """Seconds of the step."""
        last = self._forward() + self._backward(reduces=True)
        other = self._forward() + self._backward(reduces=self.reduces_every_micro_batch)
        return (self.micro_batches - 1) * other + last + self.after

    @property
    def serial(self) -> float:
        """Seconds of the step if nothing overlapped."""
        units = [self.root, *self.blocks]
        passes = sum(u.forward + u.backward + u.gather + u.gather_again for u in units)
        reductions = self.micro_batches if self.reduces_every_micro_batch else 1
        return self.micro_batches * passes + reductions * sum(u.reduce for u in units) + self.after

    def _forward(self) -> float:
        gathers = [unit.gather for unit in self.blocks] + [0.0]
        seconds = self.root.gather + gathers[0] + self.root.forward
        return seconds + sum(max(u.forward, ahead) for u, ahead in zip(self.blocks, gathers[1:], strict=True))

    def _backward(self, *, reduces: bool) -> float:
        order = list(reversed(self.blocks))
        gathers = [unit.gather_again for unit in order] + [0.0]
        seconds = max(self.root.backward, self.root.gather_again + gathers[0])
        waiting = 0.0
        for unit, ahead in zip(order, gathers[1:], strict=True):
            seconds += max(unit.backward, ahead + waiting)
            waiting = unit.reduce if reduces and self.reduces_in_backward else 0.0
        if not reduces:
            return seconds
        rest = self.root.reduce + waiting
        return seconds + (rest if self.reduces_in_backward else sum(u.reduce for u in self.blocks) + self.root.reduce)
