"""Lightning Fabric around FSDP2."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from samestep import models
from samestep.bench.peers.batches import Losses, load, mean_over_ranks, optimizer_for
from samestep.bench.timing import Parts
from samestep.data import GlobalStep
from samestep.optim import set_lr
from samestep.recipe.schema import Recipe
from samestep.world import World


class Loop:
    """`ModelParallelStrategy`, whose `parallelize_fn` shards with the units and the policy of the raw loop."""

    def __init__(self, recipe: Recipe, here: World, parts: Parts) -> None:
        fabric_of, strategy_of = _lightning()
        model, _ = load(recipe)
        low = torch.bfloat16 if recipe.precision.regime == "mixed" else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)

        def shard(whole: nn.Module, mesh: Any) -> nn.Module:
            for module in (*models.unit_modules(whole, recipe.engine.unit_classes), whole):
                fully_shard(
                    module,
                    mesh=mesh["data_parallel"],
                    mp_policy=policy,
                    reshard_after_forward=recipe.engine.reshard_after_forward,
                )
            return whole

        strategy = strategy_of(parallelize_fn=shard, data_parallel_size=here.size, tensor_parallel_size=1)
        self._fabric = fabric_of(
            accelerator="cpu" if here.device.type == "cpu" else "auto",
            devices=here.size,
            strategy=strategy,
            precision="32-true",
        )
        self._fabric.launch()
        self._model = self._fabric.setup(model)
        optimizer = optimizer_for(self._model.named_parameters(), recipe)
        self._optimizer = self._fabric.setup_optimizers(optimizer)
        self._max_norm, self._parts = recipe.train.max_grad_norm, parts
        self._losses = Losses(recipe, here, parts)

    def step(self, data: GlobalStep, index: int, lr: float) -> float:
        loss = self._losses(self._model, data)
        with self._parts("backward"):
            self._fabric.backward(loss)
        with self._parts("optimizer"):
            if self._max_norm is not None:
                self._fabric.clip_gradients(self._model, self._optimizer, max_norm=self._max_norm)
            set_lr(self._optimizer.optimizer, lr)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return mean_over_ranks(loss)

    def close(self) -> None:
        pass


def _lightning() -> tuple[Any, Any]:
    """Fabric and its strategy, from whichever of its two packages is installed."""
    package = "lightning.fabric" if find_spec("lightning") else "lightning_fabric"
    strategies = importlib.import_module(f"{package}.strategies")
    return importlib.import_module(package).Fabric, strategies.ModelParallelStrategy
