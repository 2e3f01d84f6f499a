"""accelerate around DeepSpeed ZeRO-3."""

from __future__ import annotations

from samestep.bench.peers.batches import Losses, load, mean_over_ranks, optimizer_for
from samestep.bench.peers.deepspeed import config, quiet
from samestep.bench.timing import Parts
from samestep.data import GlobalStep
from samestep.optim import set_lr
from samestep.recipe.schema import Recipe
from samestep.world import World


class Loop:
    """The configuration of the raw loop, through `Accelerator.prepare`, `backward` and the wrapped optimizer."""

    def __init__(self, recipe: Recipe, here: World, parts: Parts) -> None:
        quiet(here)
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        model, _ = load(recipe)
        parameters = sum(p.numel() for p in model.parameters())
        self._accelerator = Accelerator(
            mixed_precision="bf16" if recipe.precision.regime == "mixed" else "no",
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(recipe, parameters), zero3_init_flag=False),
        )
        optimizer = optimizer_for(model.named_parameters(), recipe)
        self._model, self._optimizer = self._accelerator.prepare(model, optimizer)
        self._parts, self._losses = parts, Losses(recipe, here, parts)

    def step(self, data: GlobalStep, index: int, lr: float) -> float:
        set_lr(self._optimizer.optimizer, lr)
        loss = self._losses(self._model, data)
        # accelerate updates the weights inside of backward, so the two cannot be told apart.
        with self._parts("backward"):
            self._accelerator.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return mean_over_ranks(loss)

    def close(self) -> None:
        self._model.destroy()
