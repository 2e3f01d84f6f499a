"""Which tool a configuration belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samestep.migrate.source import MigrationError, Source
from samestep.recipe.suggest import did_you_mean

KINDS = ("deepspeed", "accelerate", "transformers", "fsdp-config", "torchtitan", "samestep")

_DEEPSPEED = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size",
              "zero_allow_untested_optimizer",
              "steps_per_print", "bf16", "fp16", "optimizer", "scheduler", "communication_data_type", "data_types",
              "gradient_clipping", "gradient_accumulation_steps", "torch_autocast"}  # fmt: skip
_ACCELERATE = {"distributed_type", "compute_environment", "num_processes", "fsdp_config", "deepspeed_config",
               "num_machines", "machine_rank", "parallelism_config", "downcast_bf16", "mixed_precision"}  # fmt: skip
_TRANSFORMERS = {"output_dir", "per_device_train_batch_size", "learning_rate", "num_train_epochs", "max_steps",
                 "lr_scheduler_type", "optim", "save_steps", "logging_steps", "warmup_steps", "warmup_ratio", "bf16",
                 "fp16", "gradient_accumulation_steps", "fsdp", "fsdp_config", "deepspeed", "weight_decay",
                 "max_grad_norm", "gradient_checkpointing"}  # fmt: skip
_FSDP = {"auto_wrap_policy", "transformer_layer_cls_to_wrap", "reshard_after_forward", "cpu_offload", "state_dict_type",
         "cpu_ram_efficient_loading", "version", "backward_prefetch", "forward_prefetch", "sync_module_states",
         "use_orig_params", "activation_checkpointing", "min_num_params", "xla", "limit_all_gathers"}  # fmt: skip
_TORCHTITAN = {"training", "parallelism", "job", "lr_scheduler", "metrics", "profiling", "activation_checkpoint"}
_SAMESTEP = {"model", "data", "precision", "engine", "train", "log"}


def recognise(source: Source, asked: str | None, ask: Callable[[str, list[str]], str | None]) -> str:
    """The kind of `source`: `asked` when given, else what its keys say; `ask` decides when they say too little.

    `ask(question, kinds)` answers with a kind, or with None where nobody can be asked.
    """
    if asked is not None:
        return asked
    scores = _scores(source)
    best = max(scores.values())
    leaders = [kind for kind, score in scores.items() if score == best]
    if best and len(leaders) == 1:
        return leaders[0]
    options = leaders if best else list(KINDS)
    chosen = ask(f"{source.path}: which tool is this configuration of?", options)
    if chosen is not None:
        return chosen
    seen = ", ".join(list(source.data)[:5]) or "no keys"
    guess = did_you_mean(next(iter(source.data), ""), _DEEPSPEED | _ACCELERATE | _TRANSFORMERS | _SAMESTEP)
    what = (
        f"could be {' or '.join(options)}" if best else f"belongs to no tool that is known here (keys: {seen}){guess}"
    )
    raise MigrationError(f"{what}.", where=str(source.path), remedy=f"Say which: --from {' or --from '.join(options)}.")


def _scores(source: Source) -> dict[str, int]:
    """By kind, how many keys are its own; keys that settle the matter count more."""
    data: dict[str, Any] = source.data
    keys = set(data)
    scores = dict.fromkeys(KINDS, 0)
    scores["deepspeed"] = len(keys & _DEEPSPEED) + 10 * ("zero_optimization" in keys)
    scores["accelerate"] = len(keys & _ACCELERATE) + 10 * ("distributed_type" in keys or "compute_environment" in keys)
    scores["transformers"] = len(keys & _TRANSFORMERS)
    scores["fsdp-config"] = len({key.removeprefix("fsdp_") for key in keys} & _FSDP) * ("fsdp" not in keys)
    if isinstance(data.get("bf16"), dict) or isinstance(data.get("fp16"), dict):
        scores["transformers"] = 0
    elif "bf16" in keys or "fp16" in keys:
        scores["deepspeed"] -= len(keys & {"bf16", "fp16"})
    if source.syntax == "toml":
        return {"torchtitan": len(keys & _TORCHTITAN)}
    if isinstance(data.get("model"), dict) or isinstance(data.get("train"), dict):
        scores["samestep"] = len(keys & _SAMESTEP) + 5
    return scores
