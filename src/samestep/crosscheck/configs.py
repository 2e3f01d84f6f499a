"""What a cross-check runs of a configuration: all that decides numbers, nothing that a tiny model on a CPU lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samestep.migrate.accelerate_reader import json_of
from samestep.migrate.accelerate_table import current_name
from samestep.migrate.source import MigrationError, flatten, nest
from samestep.recipe.schema import Recipe

# Sections that only write files, or that a tiny model on a CPU cannot have.
_LEFT_OUT = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "autotuning", "aio",
             "compile", "checkpoint", "elasticity", "nebula", "train_batch_size")  # fmt: skip
# Of Accelerate's file: machines, compilers, files, and sizes of more than the check's ranks.
_MACHINE = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
            "gpu_ids", "enable_cpu_affinity", "mpirun_config", "dynamo_config", "dynamo_backend", "use_cpu",
            "main_training_function", "debug", "parallelism_config")  # fmt: skip
_MODEL = ("fsdp_ignored_modules", "deepspeed_moe_layer_cls_names", "deepspeed_hostfile", "deepspeed_inclusion_filter",
          "deepspeed_exclusion_filter", "deepspeed_multinode_launcher")  # fmt: skip
_FILE = "deepspeed_config_file"
_FSDP = "fsdp_config.fsdp_"


def runnable(config: dict[str, Any], recipe: Recipe, *, fills_auto: bool = False) -> dict[str, Any]:
    """What the check runs of a DeepSpeed configuration: no offload, logging or compiled kernels.

    `fills_auto`: the tool that reads it fills in `auto` itself; otherwise the recipe does, or DeepSpeed's default.
    """
    every = dict(flatten(config))
    kept = {path: value for path, value in every.items() if path.split(".")[0] not in _LEFT_OUT}
    kept = {path: value for path, value in kept.items() if "offload" not in path}
    if not fills_auto:
        kept = {path: value for path, value in kept.items() if value != "auto"} | _filled(every, recipe)
    kept |= {
        "train_micro_batch_size_per_gpu": recipe.train.micro_batch,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    kept.setdefault("gradient_accumulation_steps", recipe.train.accumulation)
    if str(kept.get("optimizer.type", "")).lower() in ("adam", "adamw") and not kept.get("optimizer.params.torch_adam"):
        kept["optimizer.params.torch_adam"] = True
        # The compiled one that torch's stands in for decays by nothing unless told; torch's by 0.01.
        kept.setdefault("optimizer.params.weight_decay", 0.0)
    # The largest buckets would be larger than the machine.
    kept["zero_optimization.reduce_bucket_size"] = kept["zero_optimization.allgather_bucket_size"] = 10**6
    return nest(kept)


def _filled(every: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """An `auto` of the precision as the recipe has it."""
    low = {"bf16.enabled": "bfloat16", "fp16.enabled": "float16"}
    mixed = recipe.precision.regime != "full"
    return {
        path: mixed and recipe.precision.low_dtype == dtype
        for path, dtype in low.items()
        if path in every and every[path] in ("auto", None)
    }


def sets_rates(config: dict[str, Any]) -> bool:
    """Whether a configuration decides the learning rates, not the script: by a schedule of DeepSpeed's, or by an
    optimizer without one."""
    inside = config.get("deepspeed_json", config)
    return "scheduler" in inside or "optimizer" in inside


def kind_of(config: dict[str, Any]) -> str:
    """What an Accelerate file says it runs, in capitals; NO where it says nothing."""
    return str(config.get("distributed_type", "NO")).upper()


def launcher(config: dict[str, Any], recipe: Recipe, folder: Path, units: str) -> dict[str, Any]:
    """What the check runs of Accelerate's own file; the DeepSpeed configuration that it names is put into it.

    `units`: the class of the model's layers, where the file names layers to wrap.
    """
    kept = {path: value for path, value in flatten(config) if path.split(".")[0] not in _MACHINE}
    kept = {path: value for path, value in kept.items() if path.rpartition(".")[2] not in _MODEL}
    kept = {path: value for path, value in kept.items() if "offload" not in path and _FILE not in path}
    kept["num_processes"] = recipe.engine.ranks
    kind = kind_of(kept)
    if kind.startswith("MULTI"):
        kept["distributed_type"] = "MULTI_GPU"
    if kind == "FSDP":
        named = {current_name(path): path for path in kept}
        wrapped = named.get(_FSDP + "transformer_layer_cls_to_wrap")
        if wrapped is not None and kept[wrapped]:
            kept[wrapped] = units
        for name in ("sync_module_states", "cpu_ram_efficient_loading"):
            # Both need an accelerator; every rank of the check makes the same weights.
            kept[named.get(_FSDP + name, _FSDP + name)] = False
    file = config.get("deepspeed_config") or {}
    if isinstance(file, dict) and file.get(_FILE) not in (None, "none"):
        try:
            inside = json_of(file[_FILE], folder)
        except ValueError as error:
            raise MigrationError(str(error), where=_FILE) from None
        return nest(kept) | {"deepspeed_json": runnable(inside, recipe, fills_auto=True)}
    return nest(kept)
