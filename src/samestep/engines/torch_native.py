"""`single`, `ddp`, `fsdp` and `hsdp`: one piece of code on differently shaped meshes.

| engine | shards over | replicates over |
|---|---|---|
| single | 1 | 1, and runs every rank's micro-batches itself |
| ddp    | 1 | all ranks |
| fsdp   | all ranks | 1 |
| hsdp   | shard_ranks | ranks / shard_ranks |

`fully_shard` shards over the shard mesh; the sum over replicas is its all-reduce hook.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter  # the type that set_custom_reduce_scatter takes
from torch.distributed.tensor import DTensor

from samestep.engines import stochastic_gather
from samestep.engines.loading import Filler
from samestep.engines.protocol import Replica, Shard, Turn
from samestep.engines.reduction import Reducer, TreeAccumulator
from samestep.optim import LowPrecisionAdamW, OptimizerFactory, Piece, prepare_state, set_lr
from samestep.precision.plan import Plan
from samestep.recipe.schema import Engine as EngineRecipe
from samestep.world import World


class _ReduceScatter(ReduceScatter):
    """FSDP's reduce-scatter, through our reducer."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        # Gradients are summed, never averaged: the loss is divided by the global number of label tokens already.
        assert op == dist.ReduceOp.SUM and not async_op
        self._reducer.reduce_scatter(output_tensor, input_tensor, group)


class TorchEngine:
    """A training state on torch's own sharding. See `protocol.Engine` for the meaning of the methods."""

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        recipe: EngineRecipe,
        units: Sequence[nn.Module],
        unsharded: set[str],
        optimizer: OptimizerFactory,
        seed: int,
        world: World,
    ) -> None:
        self.model = self.module = model
        self._reducer = Reducer(recipe.reduce_order)
        self._world = world
        self._recipe = recipe
        self._plan = plan
        self._emulates = recipe.ranks if recipe.name == "single" else 0
        mesh, self.replica = _mesh(recipe, world)
        _shard(
            model,
            plan=plan,
            recipe=recipe,
            units=units,
            unsharded=unsharded,
            mesh=mesh,
            reducer=self._reducer,
            world=world,
        )
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # What weights are rounded with must not repeat: it depends on this.
        self.updates = 0
        if plan.cast == "stochastic":
            self._round_stochastically(seed)
        # The optimizer works on plain local tensors: the same code, and the same bits, as on every other engine.
        # Lazy initialisation may move a shard's storage once, so do it now.
        _initialise(model)
        self._locals = {name: _local(p).detach().requires_grad_() for name, p in self._parameters.items()}
        self._optimizer = optimizer(self._locals)
        if isinstance(self._optimizer, LowPrecisionAdamW):
            for shard in self.masters():
                piece = Piece(name=shard.name, start=shard.start, offset=0, numel=shard.values.numel())
                self._optimizer.describe(self._locals[shard.name], [piece])
        self._ranks = TreeAccumulator()
        self._accumulated: list[torch.Tensor] | None = None

    @property
    def reduced_dtypes(self) -> set[torch.dtype]:
        return self._reducer.dtypes

    def _round_stochastically(self, seed: int) -> None:
        """Has FSDP round its fp32 shards stochastically, instead of to nearest, when it gathers them."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for managed in _managed(self.model):
            name = names.get(id(managed.sharded_param))
            if name is not None:
                stochastic_gather.install(managed, name=name, seed=seed, version=lambda: self.updates)

    def turns(self, micro_steps: int) -> Sequence[Turn]:
        if not self._emulates:
            return [Turn(micro=micro, rank=self._world.rank) for micro in range(micro_steps)]
        ranks, micros = range(self._emulates), range(micro_steps)
        if self._recipe.reduce_every == "step":
            return [Turn(micro=micro, rank=rank) for rank in ranks for micro in micros]
        return [Turn(micro=micro, rank=rank) for micro in micros for rank in ranks]

    def backward(self, loss: torch.Tensor, turn: Turn, micro_steps: int) -> None:
        last_micro = turn.micro == micro_steps - 1
        waits = self._recipe.reduce_every == "step" and not self._emulates
        if waits:
            cast(FSDPModule, self.model).set_requires_gradient_sync(last_micro)
        loss.backward()
        if waits and turn.micro == 0 and not last_micro:
            self._begin_accumulation()
        if self._emulates:
            self._emulate_reduction(turn, last_micro)

    def _begin_accumulation(self) -> None:
        """Starts the sum of parameters without a gradient so far: one that came later would have another dtype than
        those that FSDP adds up already, and it reduces one dtype at a time."""
        for managed in _managed(self.model):
            whole = getattr(managed, "_unsharded_param", None)  # there from its first forward pass on
            waits = managed.unsharded_accumulated_grad is None and (whole is None or whole.grad is None)
            if waits and managed.sharded_param.requires_grad:
                managed.unsharded_accumulated_grad = torch.zeros(
                    managed._orig_size, dtype=self._plan.reduce, device=self._world.device
                )

    def _emulate_reduction(self, turn: Turn, last_micro: bool) -> None:
        """Sums the ranks' gradients as their collective would have, by the recipe's rule of when."""
        every_step = self._recipe.reduce_every == "step"
        if every_step and not last_micro:
            return  # .grad goes on accumulating this rank's micro-batches
        self._ranks.push([gradient.to(self._plan.reduce) for gradient in self._take_gradients()])
        if turn.rank < self._emulates - 1:
            return
        reduced = [gradient.to(self._plan.gradient) for gradient in self._ranks.total()]
        if self._accumulated is None:
            self._accumulated = reduced
        else:
            torch._foreach_add_(self._accumulated, reduced)

    def _take_gradients(self) -> list[torch.Tensor]:
        taken = [_gradient(p) for p in self._parameters.values()]
        for parameter in self._parameters.values():
            parameter.grad = None
        return taken

    def gradients(self) -> list[torch.Tensor]:
        if self._emulates:
            return [] if self._accumulated is None else [g.view(-1) for g in self._accumulated]
        return [_gradient(p).view(-1) for p in self._parameters.values()]

    def masters(self) -> list[Shard]:
        shards = []
        for name, parameter in self._parameters.items():
            values = self._locals[name].detach().view(-1)
            shape = tuple(parameter.shape)
            shards.append(Shard(name=name, shape=shape, start=_start(parameter), values=values))
        return shards

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        state = self._optimizer.state.get(self._locals[name], {})
        return {key: value for key, value in state.items() if torch.is_tensor(value)}

    def apply(self, lr: float) -> None:
        for local, gradient in zip(self._locals.values(), self.gradients(), strict=True):
            local.grad = gradient.view_as(local)
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self.updates += 1
        self.discard()

    def discard(self) -> None:
        self._accumulated = None
        for parameter, local in zip(self._parameters.values(), self._locals.values(), strict=True):
            parameter.grad = None
            local.grad = None

    def prepare(self, keys: Sequence[str], updates: int) -> None:
        self.updates = updates
        prepare_state(self._optimizer, self._locals.values(), keys, updates=updates)

    def refresh(self) -> None:
        # A unit that stayed gathered after a forward pass would be used again as it is.
        for module in _sharded(self.model):
            module.reshard()

    def close(self) -> None:
        pass


def _mesh(recipe: EngineRecipe, world: World) -> tuple[DeviceMesh, Replica]:
    """The mesh to shard over, and this rank's place among the replicas."""
    shard_ranks = {"single": 1, "ddp": 1, "fsdp": world.size}.get(recipe.name) or recipe.shard_ranks or world.size // 2
    replicas = world.size // shard_ranks
    mesh = _mesh_of(world.device.type, replicas, shard_ranks, dist.group.WORLD)
    return mesh, Replica(index=world.rank // shard_ranks, count=replicas)


@functools.cache
def _mesh_of(device: str, replicas: int, shard_ranks: int, within: dist.ProcessGroup | None) -> DeviceMesh:
    """The mesh of this shape over the ranks of `within`. Engines share it: every gloo group has threads that poll for
    as long as the process lives, and torch keeps meshes in caches, so that its groups cannot be destroyed with one."""
    return init_device_mesh(device, (replicas, shard_ranks), mesh_dim_names=("replicate", "shard"))


def _shard(
    model: nn.Module,
    *,
    plan: Plan,
    recipe: EngineRecipe,
    units: Sequence[nn.Module],
    unsharded: set[str],
    mesh: DeviceMesh,
    reducer: Reducer,
    world: World,
) -> None:
    """Shards a model in place, one unit after the other: each is filled, cast to what the plan holds, and cut."""
    filler = Filler(model, world)
    filler.fill(parameter for name, parameter in model.named_parameters() if name in unsharded)
    ignored = {parameter for name, parameter in model.named_parameters() if name in unsharded}
    for parameter in ignored:
        parameter.data = parameter.data.to(world.device)  # FSDP moves only what it shards
    held = {parameter.name: parameter.held for parameter in plan.parameters}
    policy = MixedPrecisionPolicy(
        param_dtype=plan.compute, reduce_dtype=plan.reduce, output_dtype=None, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if recipe.offload == "cpu" else OffloadPolicy()
    for module in [*units, model]:
        filler.fill(_whole(module, ignored))
        mine = set(_whole(module, ignored))
        for name, parameter in model.named_parameters():
            if parameter in mine:
                parameter.data = parameter.data.to(held[name])
        fully_shard(
            module,
            mesh=mesh["shard"],
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=recipe.reshard_after_forward,
            ignored_params=ignored,
        )
    replicas = mesh["replicate"].get_group()
    comm = _ReduceScatter(reducer)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_reduce_scatter(comm)
        if mesh["replicate"].size() > 1:
            module.set_all_reduce_hook(lambda gradient: reducer.all_reduce(gradient, replicas))
    _prefetch([cast(FSDPModule, unit) for unit in units], recipe)


def _whole(module: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters of a module that are not cut yet and are to be."""
    return [p for p in module.parameters() if not isinstance(p, DTensor) and p not in ignored]


def _prefetch(units: Sequence[FSDPModule], recipe: EngineRecipe) -> None:
    for index, unit in enumerate(units):
        if recipe.forward_prefetch:
            unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + recipe.forward_prefetch]))
        if recipe.backward_prefetch:
            first = max(0, index - recipe.backward_prefetch)
            unit.set_modules_to_backward_prefetch(list(reversed(units[first:index])))


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _managed(model: nn.Module) -> Iterator[Any]:
    """What FSDP keeps of each parameter that it shards."""
    for module in _sharded(model):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            yield from group.fsdp_params


def _initialise(model: nn.Module) -> None:
    cast(FSDPModule, model).unshard()
    cast(FSDPModule, model).reshard()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's gradient; zeros where no token reached the parameter, so that every engine treats it alike."""
    if parameter.grad is None:
        return torch.zeros_like(_local(parameter))
    return _local(parameter.grad)


def _start(parameter: torch.Tensor) -> int:
    """Index of this rank's first element in the flattened parameter: FSDP cuts the first dimension in equal chunks."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    rows = -(-parameter.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * rows, parameter.shape[0]) * math.prod(parameter.shape[1:])
