"""torch's FSDP2 and nothing else."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from samestep.bench.peers.batches import Losses, load, mean_over_ranks, optimizer_for
from samestep.bench.timing import Parts
from samestep.data import GlobalStep
from samestep.optim import set_lr
from samestep.recipe.schema import Recipe
from samestep.world import World


class Loop:
    """One unit per block and one for the rest; fp32 shards, gathered and multiplied in bf16 under `mixed`."""

    def __init__(self, recipe: Recipe, here: World, parts: Parts) -> None:
        self._model, units = load(recipe)
        low = torch.bfloat16 if recipe.precision.regime == "mixed" else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for module in (*units, self._model):
            fully_shard(module, mp_policy=policy, reshard_after_forward=recipe.engine.reshard_after_forward)
        self._optimizer = optimizer_for(self._model.named_parameters(), recipe)
        self._max_norm, self._parts = recipe.train.max_grad_norm, parts
        self._losses = Losses(recipe, here, parts)

    def step(self, data: GlobalStep, index: int, lr: float) -> float:
        loss = self._losses(self._model, data)
        with self._parts("backward"):
            loss.backward()
        with self._parts("optimizer"):
            if self._max_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
            set_lr(self._optimizer, lr)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return mean_over_ranks(loss)

    def close(self) -> None:
        pass
