"""accelerate around FSDP2."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from samestep.bench.peers.batches import Losses, load, mean_over_ranks, optimizer_for
from samestep.bench.timing import Parts
from samestep.data import GlobalStep
from samestep.optim import set_lr
from samestep.recipe.schema import Recipe
from samestep.world import World


class Loop:
    """`Accelerator.prepare`, `backward` and `clip_grad_norm_`, with the units of the raw loop."""

    def __init__(self, recipe: Recipe, here: World, parts: Parts) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
        from accelerate.utils import DistributedType

        model, units = load(recipe)
        mixed = recipe.precision.regime == "mixed"
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            # Its own choice for bf16 would reduce in bf16 as well.
            mixed_precision_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if mixed else None, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            reshard_after_forward=recipe.engine.reshard_after_forward,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=sorted({type(unit).__name__ for unit in units}),
            cpu_ram_efficient_loading=False,
        )
        on_cpu = here.device.type == "cpu"
        self._accelerator = Accelerator(
            cpu=on_cpu, mixed_precision="bf16" if mixed else "no", fsdp_plugin=None if on_cpu else plugin
        )
        if on_cpu:
            # accelerate offers FSDP on accelerators only; its code for it works on the CPU as well.
            PartialState().distributed_type = self._accelerator.state.distributed_type = DistributedType.FSDP
            self._accelerator.state.fsdp_plugin = plugin
        optimizer = optimizer_for(model.named_parameters(), recipe)
        self._model, self._optimizer = self._accelerator.prepare(model, optimizer)
        self._max_norm, self._parts = recipe.train.max_grad_norm, parts
        self._losses = Losses(recipe, here, parts)

    def step(self, data: GlobalStep, index: int, lr: float) -> float:
        loss = self._losses(self._model, data)
        with self._parts("backward"):
            self._accelerator.backward(loss)
        with self._parts("optimizer"):
            if self._max_norm is not None:
                self._accelerator.clip_grad_norm_(self._model.parameters(), self._max_norm)
            set_lr(self._optimizer.optimizer, lr)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return mean_over_ranks(loss)

    def close(self) -> None:
        pass
