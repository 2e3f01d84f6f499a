"""DeepSpeed ZeRO-3 and nothing else."""

from __future__ import annotations

from typing import Any

from samestep.bench.peers.batches import Losses, load, mean_over_ranks, optimizer_for
from samestep.bench.timing import Parts
from samestep.data import GlobalStep
from samestep.optim import set_lr
from samestep.recipe.schema import Recipe
from samestep.world import World


class Loop:
    """DeepSpeed's engine with torch's AdamW and reductions in fp32; otherwise its own defaults."""

    def __init__(self, recipe: Recipe, here: World, parts: Parts) -> None:
        deepspeed = quiet(here)
        model, _ = load(recipe)
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer_for(model.named_parameters(), recipe),
            config=config(recipe, sum(p.numel() for p in model.parameters())),
        )
        self._parts, self._losses = parts, Losses(recipe, here, parts)

    def step(self, data: GlobalStep, index: int, lr: float) -> float:
        loss = self._losses(self._engine, data)
        with self._parts("backward"):
            self._engine.backward(loss)
        with self._parts("optimizer"):
            set_lr(self._optimizer, lr)
            self._engine.step()
        return mean_over_ranks(loss)

    def close(self) -> None:
        self._engine.destroy()


def quiet(here: World) -> Any:
    """DeepSpeed; on the CPU without the operator that it would compile at start."""
    import deepspeed

    if here.device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo" if here.device.type == "cpu" else None, verbose=False)
    return deepspeed


def config(recipe: Recipe, parameters: int) -> dict[str, Any]:
    """The configuration that has the recipe's dtypes and clipping."""
    return {
        "train_micro_batch_size_per_gpu": recipe.train.micro_batch,
        "gradient_accumulation_steps": 1,
        # The default bucket of 500 million elements would be allocated whole, whatever the model's size.
        "zero_optimization": {"stage": 3, "reduce_bucket_size": min(parameters, 500_000_000)},
        "bf16": {"enabled": recipe.precision.regime == "mixed"},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": recipe.train.max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
