"""`zero1`, `zero2` and `zero3`: DeepSpeed, made to keep the same numbers as everything else.

DeepSpeed owns the step, so this adapter settles its dtypes, takes over clipping, loss scaling, the order of sums and
(on stage 1) the accumulation of micro-batches, and reads masters and gradients as slices of named tensors. All private
attributes of DeepSpeed that this needs are read in this file alone.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samestep.engines.deepspeed_config import deepspeed_config
from samestep.engines.protocol import Replica, Shard, Turn
from samestep.engines.reduction import Reducer
from samestep.errors import EngineError, RunError
from samestep.optim import LowPrecisionAdamW, OptimizerFactory, Piece, prepare_state, set_lr
from samestep.precision.plan import Plan
from samestep.recipe.schema import Engine as EngineRecipe
from samestep.rounding import stochastic_to_bfloat16, stream
from samestep.world import World


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """Where a range of a named parameter lies in this rank's flat partition: elements [offset, offset + numel)."""

    name: str
    shape: tuple[int, ...]
    start: int
    group: int
    offset: int
    numel: int


class DeepSpeedEngine:
    """A training state in DeepSpeed ZeRO. See `protocol.Engine` for the meaning of the methods."""

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        recipe: EngineRecipe,
        micro_batch: int,
        optimizer: OptimizerFactory,
        seed: int,
        world: World,
    ) -> None:
        deepspeed = import_deepspeed(world.device)
        self.stage = int(recipe.name.removeprefix("zero"))
        self._reducer = Reducer(recipe.reduce_order)
        self.replica = Replica(index=0, count=1)
        self._world = world
        self._plan = plan
        self._restore: Callable[[], None] = lambda: None
        self._every_step = recipe.reduce_every == "step"
        originals = _cast_parameters(model, plan)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer(named), config=deepspeed_config(recipe, plan, micro_batch=micro_batch)
        )
        self.model: nn.Module = self._engine
        self.module = model
        self._is_bf16_optimizer = type(self._zero).__name__ == "BF16_Optimizer"
        if self.stage == 3:
            _keep_autograd_order(self._engine.module, self._zero)
            # Stages 1 and 2 can be told to sum; stage 3 divides by the ranks and multiplies by this ratio. A loss
            # scaled up instead would reach into another range of fp16.
            self._zero._gradient_averaging_world_size = lambda *_: 1
        self._slices = self._layout({id(p): name for name, p in named.items()})
        self._by_name = {s.name: s for s in self._slices}
        for shard in self.masters():
            if shard.name in originals:
                whole = originals[shard.name].reshape(-1)
                shard.values.copy_(whole[shard.start : shard.start + shard.values.numel()])
        inner = self._zero.optimizer
        if isinstance(inner, LowPrecisionAdamW):
            for group in {s.group for s in self._slices}:
                inner.describe(self._partition(group), [_piece(s) for s in self._slices if s.group == group])
        # What weights are rounded with must not repeat: it depends on this.
        self.updates = 0
        self._seed = seed
        if plan.cast == "stochastic":
            self._round_stochastically()
        self._accumulated: list[torch.Tensor] | None = None
        self._backend = _Backend(deepspeed, self._reducer)

    @property
    def reduced_dtypes(self) -> set[torch.dtype]:
        return self._reducer.dtypes

    def turns(self, micro_steps: int) -> Sequence[Turn]:
        return [Turn(micro=micro, rank=self._world.rank) for micro in range(micro_steps)]

    def backward(self, loss: torch.Tensor, turn: Turn, micro_steps: int) -> None:
        last = turn.micro == micro_steps - 1
        # Stage 1 reduces at a boundary only; when every micro-batch is to be reduced, each one is a boundary.
        ours = self.stage == 1 and not self._every_step and micro_steps > 1
        self._engine.set_gradient_accumulation_boundary(last or ours)
        with self._backend:
            self._engine.backward(loss, scale_wrt_gas=False)
        if ours:
            self._accumulate(last)

    def _accumulate(self, last: bool) -> None:
        """Adds stage 1's reduced gradient of one micro-batch to those before it, on this rank's partition only."""
        reduced = self.gradients()
        if self._accumulated is None:
            self._accumulated = [gradient.clone() for gradient in reduced]
        elif not last:
            torch._foreach_add_(self._accumulated, reduced)
        else:
            torch._foreach_add_(reduced, self._accumulated)
        if last:
            self._accumulated = None
        elif self._is_bf16_optimizer:
            self._zero.clear_hp_grads()
        else:
            self._zero.averaged_gradients = {}
            self._zero.all_grad_tensors = {}
            self._zero.zero_grad(set_to_none=True)
            self._zero.micro_step_id = -1  # as its own step() leaves it: the next backward is a first one

    def gradients(self) -> list[torch.Tensor]:
        return [self._gradient(s) for s in self._slices]

    def masters(self) -> list[Shard]:
        return [
            Shard(name=s.name, shape=s.shape, start=s.start, values=self._partition(s.group).detach()[_range(s)])
            for s in self._slices
        ]

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        s = self._by_name[name]
        state = self._zero.optimizer.state.get(self._partition(s.group), {})
        return {
            key: value.view(-1)[_range(s)] if value.dim() else value
            for key, value in state.items()
            if torch.is_tensor(value)
        }

    def apply(self, lr: float) -> None:
        set_lr(self._zero.optimizer, lr)
        self.updates += 1
        with _norm_is_known(self._zero, self._world.device):
            self._engine.step()
        if self._zero.overflow:
            raise RunError("DeepSpeed skipped a step whose gradient is finite", remedy="Report this as a bug.")

    def _round_stochastically(self) -> None:
        """Has DeepSpeed round its masters stochastically, instead of to nearest, before it gathers them."""
        zero = self._zero
        if self.stage == 3:
            reassign = zero._reassign_or_swap_out_partitioned_parameters

            def rounded_reassign(group: int) -> None:
                reassign(group)
                self._round_group(group, zero.fp16_partitioned_groups_flat[group])

            zero._reassign_or_swap_out_partitioned_parameters = rounded_reassign
            self.refresh()
            return
        module: Any = sys.modules[type(zero).__module__]
        gather = module.all_gather_dp_groups
        rank = self._world.rank

        def rounded_gather(*, partitioned_param_groups: list[list[torch.Tensor]], **others: Any) -> None:
            # Another engine of this process may gather through the same name.
            if partitioned_param_groups is self._low_partitions():
                for group, partitions in enumerate(partitioned_param_groups):
                    self._round_group(group, partitions[rank])
            gather(partitioned_param_groups=partitioned_param_groups, **others)

        module.all_gather_dp_groups = rounded_gather
        self._restore = lambda: setattr(module, "all_gather_dp_groups", gather)
        self.refresh()

    def prepare(self, keys: Sequence[str], updates: int) -> None:
        self.updates = updates
        partitions = [self._partition(group) for group in sorted({s.group for s in self._slices})]
        prepare_state(self._zero.optimizer, partitions, keys, updates=updates)

    def refresh(self) -> None:
        zero = self._zero
        if self.stage < 3:
            zero.update_lp_params()
            return
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _low_partitions(self) -> list[list[torch.Tensor]]:
        if self._is_bf16_optimizer:
            return self._zero.bf16_partitioned_groups
        return self._zero.parallel_partitioned_bit16_groups

    def _round_group(self, group: int, low: torch.Tensor) -> None:
        """Rounds this rank's masters of a group into its bf16 partition."""
        master = self._partition(group).detach()
        for s in self._slices:
            if s.group == group:
                random = stream(self._seed, self.updates, s.name, "cast")
                stochastic_to_bfloat16(master[_range(s)], random, start=s.start, out=low[_range(s)])

    def discard(self) -> None:
        # DeepSpeed drops a gradient by finding it non-finite; make sure it does, also when only the loss was.
        for gradient in self.gradients():
            gradient[:1] = torch.inf
        self._engine.step()
        self._accumulated = None

    def close(self) -> None:
        self._restore()
        self._engine.destroy()

    def _layout(self, names: dict[int, str]) -> list[_Slice]:
        if self.stage == 3:
            return list(_zero3_layout(self._zero.fp16_groups, names, self._world.rank))
        groups = self._zero.bf16_groups if self._is_bf16_optimizer else self._zero.bit16_groups
        lengths = [self._partition(group).numel() for group in range(len(groups))]
        return list(_zero12_layout(groups, lengths, names, self._world.rank))

    def _partition(self, group: int) -> torch.Tensor:
        """This rank's flat master partition of a parameter group."""
        if self.stage == 3:
            return self._zero.fp32_partitioned_groups_flat[group]
        if self._is_bf16_optimizer:
            return self._zero.fp32_groups_flat_partition[group]
        return self._zero.single_partition_of_fp32_groups[group]

    def _gradient(self, s: _Slice) -> torch.Tensor:
        if self._is_bf16_optimizer:
            return self._zero.fp32_groups_gradient_flat_partition[s.group][_range(s)]
        offloaded = self._partition(s.group).grad
        if offloaded is not None:
            return offloaded[_range(s)]
        position = 0
        for piece in self._zero.averaged_gradients[s.group]:
            if position == s.offset:
                return piece.view(-1)[: s.numel]
            position += piece.numel()
        raise EngineError(
            f"DeepSpeed laid out the gradient of {s.name} in an unknown way",
            where="engine.name",
            remedy="Use the DeepSpeed release that constraints.txt names.",
        )


@contextlib.contextmanager
def _norm_is_known(zero: Any, device: torch.device) -> Generator[None]:
    """Keeps ZeRO-3 from finding the norm of a gradient that is known to be finite: a pass over all of it in fp64, for
    its own clipping, which is off. `discard` needs that pass: by it DeepSpeed sees that nothing may move."""
    if not hasattr(zero, "_get_norm_groups") or zero.offload_optimizer:
        yield
        return
    zero._get_norm_groups = lambda: [torch.zeros((), device=device)]
    try:
        yield
    finally:
        del zero._get_norm_groups


def _zero12_layout(
    groups: Sequence[Sequence[torch.Tensor]], lengths: Sequence[int], names: dict[int, str], rank: int
) -> Iterator[_Slice]:
    """`lengths` are those of one rank's partitions, by group."""
    for group, (parameters, length) in enumerate(zip(groups, lengths, strict=True)):
        begin = rank * length
        position = 0
        for parameter in parameters:
            low, high = max(begin, position), min(begin + length, position + parameter.numel())
            # A parameter that lies in other ranks' partitions still gets a slice, of no elements.
            numel = max(0, high - low)
            start = low - position if numel else 0
            offset = low - begin if numel else 0
            yield _slice(names[id(parameter)], parameter.shape, start, group, offset, numel)
            position += parameter.numel()


def _zero3_layout(groups: Sequence[Sequence[Any]], names: dict[int, str], rank: int) -> Iterator[_Slice]:
    for group, parameters in enumerate(groups):
        offset = 0
        for parameter in parameters:
            chunk = parameter.partition_numel()
            start = min(rank * chunk, parameter.ds_numel)
            numel = min(chunk, parameter.ds_numel - start)
            yield _slice(names[id(parameter)], parameter.ds_shape, start, group, offset, numel)
            offset += chunk


def _slice(name: str, shape: Sequence[int], start: int, group: int, offset: int, numel: int) -> _Slice:
    return _Slice(name=name, shape=tuple(shape), start=start, group=group, offset=offset, numel=numel)


def _piece(s: _Slice) -> Piece:
    return Piece(name=s.name, start=s.start, offset=s.offset, numel=s.numel)


def _range(s: _Slice) -> slice:
    return slice(s.offset, s.offset + s.numel)


class _AfterBackward:
    """Tells ZeRO-3 that a module's backward pass is over, without a node of its own in the autograd graph.

    DeepSpeed's own node on every module input makes the gradients inside the module add up before those from outside
    (a residual connection) join them; everywhere else autograd adds them one by one. In fp32 the last bits differ.
    """

    def __init__(self, module: nn.Module, callback: Callable[[nn.Module], None]) -> None:
        self._module = module
        self._callback = callback

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            self._module.ds_grads_remaining += 1  # type: ignore[operator]
            tensor.register_hook(self._input_done)
        return tensor

    def _input_done(self, _gradient: torch.Tensor) -> None:
        self._module.ds_grads_remaining -= 1  # type: ignore[operator]
        if self._module.ds_grads_remaining == 0:
            self._callback(self._module)


def _keep_autograd_order(model: nn.Module, zero: Any) -> None:
    for module in model.modules():
        if "post_bwd_fn" in module.__dict__:
            after = _AfterBackward(module, zero.parameter_offload.post_sub_module_backward_function)
            module.__dict__["post_bwd_fn"] = after


def _cast_parameters(model: nn.Module, plan: Plan) -> dict[str, torch.Tensor]:
    """Casts the model to the compute dtype, parameters only, and returns the originals that this rounded.

    DeepSpeed cuts its masters from the rounded copy; the originals go into the masters afterwards.
    """
    originals: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype != plan.compute and parameter.is_floating_point():
            if parameter.requires_grad and plan.master.itemsize > plan.compute.itemsize:
                originals[name] = parameter.data
            held = parameter.data.to(plan.master) if parameter.requires_grad else parameter.data
            parameter.data = held.to(plan.compute)
    return originals


def import_deepspeed(device: torch.device) -> types.ModuleType:
    """DeepSpeed, quiet and without compiling anything. Raises EngineError when it is not installed."""
    try:
        import deepspeed
    except ImportError as error:
        raise EngineError(
            "the zero engines need DeepSpeed, which is not installed",
            where="engine.name",
            remedy="Install samestep[deepspeed], or choose single, ddp, fsdp or hsdp.",
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    LinearFunctionForZeroStage3.forward = staticmethod(_linear)
    if device.type == "cpu":
        # Compiled at start otherwise; a process killed while it compiles leaves a lock that hangs every later start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed asks for a fast path; torch computes in fp16 on every CPU, only slowly.
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else None, verbose=False)
    return deepspeed


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What torch computes. ZeRO-3's own linear layer adds the bias to a product that is rounded already."""
    return torch._C._nn.linear(input, weight, bias)


class _Backend:
    """Puts our reducer behind DeepSpeed's communication while a backward pass runs."""

    def __init__(self, deepspeed: types.ModuleType, reducer: Reducer) -> None:
        self._cdb = deepspeed.comm.comm.cdb
        self._reducer = reducer
        # The names torch 2.13 gives these; DeepSpeed's own choice prints a deprecation warning at every call.
        for name in ("all_gather", "reduce_scatter"):
            if hasattr(torch.distributed, f"{name}_single"):
                setattr(self._cdb, f"{name}_function", getattr(torch.distributed, f"{name}_single"))

    def __enter__(self) -> None:
        cdb, reducer = self._cdb, self._reducer
        sum_op = torch.distributed.ReduceOp.SUM

        def all_reduce(tensor: torch.Tensor, op: Any = sum_op, group: Any = None, async_op: bool = False) -> None:
            assert "SUM" in str(op) and not async_op
            reducer.all_reduce(tensor, group)

        def reduce_scatter(
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            op: Any = sum_op,
            group: Any = None,
            async_op: bool = False,
        ) -> None:
            assert "SUM" in str(op) and not async_op
            reducer.reduce_scatter(output_tensor, input_tensor, group)

        cdb.all_reduce = all_reduce
        cdb.reduce_scatter_tensor = reduce_scatter

    def __exit__(self, *_: object) -> None:
        del self._cdb.all_reduce
        del self._cdb.reduce_scatter_tensor
