"""Seconds of every part of a step: a recipe's work divided by what a machine does in a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from samestep.errors import EngineError
from samestep.planning.cluster.links import Group, all_reduce_seconds, gather_seconds, reduce_scatter_seconds
from samestep.planning.cluster.machine import Machine
from samestep.planning.cluster.timeline import StepSeconds, UnitSeconds
from samestep.planning.cluster.work import UnitWork, Work

Resource = Literal["compute", "memory", "gather", "reduce", "offload"]
RESOURCES: tuple[Resource, ...] = ("compute", "memory", "gather", "reduce", "offload")


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Devices that share one copy of the weights, and devices that hold the same part of different copies."""

    shards: Group
    replicas: Group


def groups_of(work: Work, machine: Machine) -> Groups:
    """Ranks are numbered node by node, and a sharding group is a run of them. EngineError where one would lie across
    nodes that it does not fill."""
    per_node, shards = machine.devices_per_node, work.shard_ranks
    if shards <= per_node:
        if per_node % shards:
            raise _uneven(shards, per_node)
        replicas = Group(per_node=per_node // shards, nodes=machine.nodes, at_once=shards)
        return Groups(shards=Group(per_node=shards, nodes=1, at_once=per_node // shards), replicas=replicas)
    if shards % per_node:
        raise _uneven(shards, per_node)
    nodes = shards // per_node
    copies = Group(per_node=1, nodes=machine.nodes // nodes, at_once=per_node)
    return Groups(shards=Group(per_node=per_node, nodes=nodes), replicas=copies)


def _uneven(shards: int, per_node: int) -> EngineError:
    return EngineError(
        f"groups of {shards} ranks do not fill nodes of {per_node} devices",
        where="engine.shard_ranks",
        remedy=f"Take a divisor or a multiple of {per_node}.",
    )


class Costs:
    """Seconds of the parts of a step; those of the resources in `free` are zero."""

    def __init__(self, work: Work, machine: Machine, *, free: frozenset[Resource] = frozenset()) -> None:
        self._work, self._machine, self._free = work, machine, free
        self._groups = groups_of(work, machine)

    def step(self) -> StepSeconds:
        """The step with all of its parts."""
        work = self._work
        # DeepSpeed overlaps the reductions of stage 3 alone.
        overlaps = work.engine not in ("zero1", "zero2")
        return StepSeconds(
            root=self._unit(work.root, stays=True),
            blocks=[self._unit(unit, stays=not work.reshards) for unit in work.blocks],
            micro_batches=work.micro_batches,
            reduces_every_micro_batch=work.reduces_every_micro_batch,
            reduces_in_backward=overlaps,
            after=self.optimizer() + self._after_the_optimizer(),
        )

    def parts(self) -> dict[Resource, float]:
        """Seconds of a step by what it is spent on, as if nothing overlapped; they add up to the serial step."""
        return {
            resource: Costs(self._work, self._machine, free=frozenset(RESOURCES) - {resource}).step().serial
            for resource in RESOURCES
        }

    def if_free(self) -> dict[Resource, float]:
        """Seconds of the overlapped step without each resource's time. The least of them names what limits the step."""
        return {r: Costs(self._work, self._machine, free=frozenset({r})).step().overlapped for r in RESOURCES}

    def _times(self, resource: Resource, seconds: float) -> float:
        return 0.0 if resource in self._free else seconds

    def _unit(self, unit: UnitWork, *, stays: bool) -> UnitSeconds:
        machine = self._machine
        slow = (1 - unit.float8_share) / machine.matmul_rate + unit.float8_share / machine.float8_rate
        gather = self._gather(unit)
        return UnitSeconds(
            forward=self._times("compute", unit.forward * slow)
            + self._times("memory", unit.forward_moved / machine.memory_rate),
            backward=self._times("compute", unit.backward * slow)
            + self._times("memory", unit.backward_moved / machine.memory_rate),
            gather=gather,
            gather_again=0.0 if stays else gather,
            reduce=self._reduce(unit),
        )

    def _gather(self, unit: UnitWork) -> float:
        """The weights of a unit on their way to every device that shards them: from the host first, where they live
        there."""
        work, machine = self._work, self._machine
        seconds = 0.0
        if work.engine in ("fsdp", "hsdp", "zero3"):
            size = unit.elements * work.compute_bytes
            seconds = self._times("gather", gather_seconds(size, self._groups.shards, machine.links))
        if work.offloaded.parameters:
            assert machine.host_link is not None
            # FSDP offloads its masters, DeepSpeed low-precision copies of them.
            held = work.compute_bytes if work.engine == "zero3" else work.master_bytes
            seconds += self._times("offload", unit.elements / work.shard_ranks * held / machine.host_link)
        return seconds

    def _reduce(self, unit: UnitWork) -> float:
        work, links = self._work, self._machine.links
        shards, replicas = self._groups.shards, self._groups.replicas
        size = unit.trainable * work.reduce_bytes
        whole = work.engine == "zero1" or (work.engine == "zero3" and not _is_power_of_two(work.ranks))
        if work.engine.startswith("zero") and whole:
            seconds = all_reduce_seconds(size, shards, links, tree=work.tree)
        else:
            seconds = reduce_scatter_seconds(size, shards, links, tree=work.tree)
            seconds += all_reduce_seconds(size / shards.size, replicas, links, tree=work.tree)
        seconds = self._times("reduce", seconds)
        if work.offloaded.optimizer:
            assert self._machine.host_link is not None
            own = unit.trainable / work.shard_ranks * work.gradient_bytes
            seconds += self._times("offload", own / self._machine.host_link)
        return seconds

    def optimizer(self) -> float:
        """Masters and state are read and written once, gradients read once, where they live."""
        work, machine = self._work, self._machine
        own = work.trainable / work.shard_ranks
        moved = own * (2 * (work.master_bytes + work.state_bytes) + work.gradient_bytes)
        if not work.offloaded.optimizer:
            return self._times("memory", moved / machine.memory_rate)
        assert machine.host_memory_rate is not None
        return self._times("offload", moved / machine.host_memory_rate)

    def _after_the_optimizer(self) -> float:
        """The zero engines' new weights: back from the host, and (stages 1 and 2) to all ranks."""
        work, machine = self._work, self._machine
        if not work.engine.startswith("zero"):
            return 0.0
        size, seconds = work.trainable * work.compute_bytes, 0.0
        if work.offloaded.optimizer and not work.offloaded.parameters:
            assert machine.host_link is not None
            seconds = self._times("offload", size / work.shard_ranks / machine.host_link)
        if work.engine != "zero3":
            seconds += self._times("gather", gather_seconds(size, self._groups.shards, machine.links))
        return seconds


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
