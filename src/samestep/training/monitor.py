"""Measures on samples, every few steps, how much of the optimizer's updates reaches the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samestep.engines.protocol import Engine, Shard
from samestep.optim import is_decayed, wanted_update
from samestep.precision import lost_updates
from samestep.precision.lost_updates import Counts
from samestep.precision.plan import Plan
from samestep.recipe.schema import Recipe
from samestep.world import World, gather_numbers


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What became of one step's updates, the same on every rank; see `lost_updates` for the words.

    A share is None where stochastic rounding decides: whether one element moved says nothing then, and of a stochastic
    cast the length is not measured either. `never_moved` names the tensors none of whose samples ever moved.
    """

    lost: float | None
    unseen: float | None
    lost_length: float
    unseen_length: float | None
    never_moved: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Before:
    """Samples of all tensors, one after the other, before a step."""

    weight: torch.Tensor
    gradient: torch.Tensor
    compensation: torch.Tensor | None


class Monitor:
    """Looks at one rank's samples before and after a step. Remembers the first weights and which tensors have moved."""

    def __init__(self, engine: Engine, recipe: Recipe, plan: Plan, world: World) -> None:
        self._engine, self._plan, self._world = engine, plan, world
        self._optimizer = recipe.train.optimizer
        shards = engine.masters()
        self._names = [shard.name for shard in shards]
        self._sizes = [_sample(shard.values, shard).numel() for shard in shards]
        self._first = self._weights()
        self._moved = [False] * len(shards)

    def before(self, gradients: Sequence[torch.Tensor]) -> Before:
        """Remembers the samples that a step with these gradients (aligned with the engine's masters) starts from."""
        sampled = [_sample(g, shard) for g, shard in zip(gradients, self._engine.masters(), strict=True)]
        compensation = self._states().get("compensation")
        return Before(weight=self._weights(), gradient=torch.cat(sampled), compensation=compensation)

    def after(self, before: Before, *, lr: float) -> Shares:
        """What became of the step that has been taken since."""
        weight, states = self._weights(), self._states()
        wanted = wanted_update(
            self._optimizer,
            lr=lr,
            step=int(self._engine.moments(self._names[0]).get("step", 1)),
            weight=before.weight,
            gradient=before.gradient,
            moments=states,
            decay=self._decay(),
        )
        carried = None
        if before.compensation is not None:
            carried = (before.compensation, states["compensation"])
        counted = lost_updates.count(wanted, before.weight, weight, self._plan.compute, compensation=carried)
        moved = [bool(changed.any()) for changed in (weight != self._first).split(self._sizes)]
        rows = gather_numbers([*counted.numbers, *map(float, moved)], self._world)
        width = len(counted.numbers)
        self._moved = [was or any(row[width + i] for row in rows) for i, was in enumerate(self._moved)]
        return self._shares(Counts.total([row[:width] for row in rows]))

    @property
    def moved(self) -> list[str]:
        """Names of the tensors that have moved so far."""
        return [name for name, moved in zip(self._names, self._moved, strict=True) if moved]

    def restore(self, moved: Sequence[str]) -> None:
        """Goes on from a checkpoint: these have moved before, and from here on the weights are those of now."""
        known = set(moved)
        self._moved = [name in known for name in self._names]
        self._first = self._weights()

    def _shares(self, counts: Counts) -> Shares:
        chance, cast_by_chance = self._plan.update == "stochastic", self._plan.cast == "stochastic"
        return Shares(
            lost=None if chance else counts.share("lost"),
            unseen=None if cast_by_chance else counts.share("unseen"),
            lost_length=counts.length("arrived"),
            unseen_length=None if cast_by_chance else counts.length("seen"),
            never_moved=tuple(name for name, moved in zip(self._names, self._moved, strict=True) if not moved),
        )

    def _weights(self) -> torch.Tensor:
        return torch.cat([_sample(shard.values, shard) for shard in self._engine.masters()])

    def _states(self) -> dict[str, torch.Tensor]:
        """Samples of the optimizer's tensors by torch's keys; empty before its first step."""
        shards = self._engine.masters()
        states = [self._engine.moments(shard.name) for shard in shards]
        keys = [key for key in states[0] if key != "step"]
        return {
            key: torch.cat([_sample(state[key].view(-1), shard) for state, shard in zip(states, shards, strict=True)])
            for key in keys
        }

    def _decay(self) -> torch.Tensor | float:
        """The weight decay of every sampled element."""
        if not self._optimizer.weight_decay:
            return 0.0
        decayed = [float(is_decayed(name, self._optimizer)) for name in self._names]
        each = torch.tensor(decayed).repeat_interleave(torch.tensor(self._sizes))
        return each.to(self._first.device) * self._optimizer.weight_decay


def _sample(values: torch.Tensor, shard: Shard) -> torch.Tensor:
    return lost_updates.sample(values, start=shard.start, numel=torch.Size(shard.shape).numel())
