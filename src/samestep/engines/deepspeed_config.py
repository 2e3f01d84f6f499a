"""The DeepSpeed configuration of a recipe and its plan."""

from __future__ import annotations

from typing import Any

import torch

from samestep.precision.plan import Plan
from samestep.recipe.schema import Engine as EngineRecipe
from samestep.recipe.schema import OffloadParts

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def deepspeed_config(recipe: EngineRecipe, plan: Plan, *, micro_batch: int) -> dict[str, Any]:
    """The DeepSpeed configuration that realises a plan; every value that DeepSpeed would choose differently is set."""
    stage = int(recipe.name.removeprefix("zero"))
    zero: dict[str, Any] = {
        "stage": stage,
        # DeepSpeed allocates the whole bucket, also for a model with fewer gradients than fit into it.
        "reduce_bucket_size": reduce_bucket(recipe, plan),
        "allgather_bucket_size": recipe.bucket_elements,
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": recipe.prefetch_elements,
            "stage3_max_live_parameters": recipe.live_elements,
            "stage3_param_persistence_threshold": recipe.persistent_elements,
            # Its reduce-scatter divides by the ranks before it sums, which is exact for powers of two only.
            "reduce_scatter": recipe.ranks & (recipe.ranks - 1) == 0,
        }
    parameters, optimizer, path = _offload(recipe, stage)
    if optimizer != "none":
        zero["offload_optimizer"] = {"device": optimizer}
    if parameters != "none":
        zero["offload_param"] = {"device": parameters} | ({"nvme_path": path} if parameters == "nvme" else {})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Left out, DeepSpeed clips at 1.0. Clipping is ours.
        "gradient_clipping": 0.0,
        "communication_data_type": _NAMES[plan.reduce],
        "data_types": {"grad_accum_dtype": _NAMES[plan.gradient]},
        "steps_per_print": 10**9,
    }
    if stage < 3:
        config["gradient_allreduce_op"] = "sum"
    if plan.compute == torch.bfloat16:
        low = plan.master == torch.bfloat16
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True} if low else {}
    elif plan.compute == torch.float16:
        # A static scale of 1: scaling the loss is ours.
        config["fp16"] = {"enabled": True, "loss_scale": 1.0}
    return config


def reduce_bucket(recipe: EngineRecipe, plan: Plan) -> int:
    """Elements of DeepSpeed's reduce bucket: the recipe's number, or all gradients where they are fewer."""
    return min(recipe.bucket_elements, sum(p.numel for p in plan.trainable))


def _offload(recipe: EngineRecipe, stage: int) -> tuple[str, str, str | None]:
    if isinstance(recipe.offload, OffloadParts):
        return recipe.offload.parameters, recipe.offload.optimizer, recipe.offload.nvme_path
    if recipe.offload == "cpu":
        return ("cpu" if stage == 3 else "none"), "cpu", None
    return "none", "none", None
