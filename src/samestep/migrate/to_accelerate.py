"""The targets `accelerate-deepspeed` and `accelerate-fsdp`: the YAML of `accelerate launch --config_file`."""

from __future__ import annotations

from typing import Any

from samestep.migrate.output import Output, json_text
from samestep.migrate.rows import Placement, Status
from samestep.migrate.to_deepspeed import write_deepspeed

_FILE = "deepspeed_config.deepspeed_config_file"
_F = "fsdp_config."
_P = "parallelism_config.parallelism_config_"
_SCRIPT: dict[str, str] = {
    "train.max_grad_norm": "accelerator.clip_grad_norm_(model.parameters(), {0})",
    "train.accumulation": "Accelerator(gradient_accumulation_steps={0})",
    "train.on_non_finite": "a check of the loss and the gradients: FSDP updates with non-finite ones",
    "precision.loss_scale.initial": "GradScalerKwargs(init_scale={0})",
    "precision.loss_scale.growth_interval": "GradScalerKwargs(growth_interval={0})",
}


def wrap_deepspeed(out: Output) -> None:
    """Puts the fields that `write_deepspeed` wrote into Accelerate's YAML, as the text of a JSON."""
    inner = Output(said=out.said)
    write_deepspeed(inner, filled_by_accelerate=True)
    out.missing += inner.missing
    embed_deepspeed(out, inner.data(), int(inner.leaves.get("zero_optimization.stage", 0)))
    for path, placement in inner.placements.items():
        target = None if placement.target_path is None else f"{_FILE}:{placement.target_path}"
        out.placements[path] = Placement(path, target, placement.value, placement.status, placement.rule)
    out.extra += [
        Placement("", f"{_FILE}:{extra.target_path}", extra.value, extra.status, extra.rule) for extra in inner.extra
    ]
    if out.has("engine.ranks"):
        out.put("engine.ranks", "num_processes", out.get("engine.ranks"), "renamed", "the same number")


def embed_deepspeed(out: Output, config: dict[str, Any], stage: int) -> None:
    """The launcher's fields around a DeepSpeed configuration. In the YAML itself it cannot depend on a folder."""
    out.leaves = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", **out.leaves}
    out.leaves["deepspeed_config.zero3_init_flag"] = stage == 3
    out.leaves[_FILE] = json_text(config)


def write_fsdp(out: Output) -> None:
    """Fill `out` with FSDP2, DDP or one process."""
    out.leaves["compute_environment"] = "LOCAL_MACHINE"
    kind = _engine(out)
    _precision(out)
    if kind == "FSDP":
        _fsdp(out)
    ranks = out.get("engine.ranks")
    if kind == "NO":
        out.note(
            "engine.ranks",
            "num_processes",
            1,
            "kept" if ranks == 1 else "lossy",
            "one process; the micro-batches of several ranks are not emulated",
        )
        out.leaves["num_processes"] = 1
    elif ranks is None:
        out.missing.append("engine.ranks")
    else:
        out.put("engine.ranks", "num_processes", ranks, "renamed", "the same number")
    _in_the_script(out)


def _engine(out: Output) -> str:
    name = out.get("engine.name")
    if name is None:
        out.missing.append("engine.name")
    kinds = {"ddp": "MULTI_GPU", "single": "NO"}
    kind = kinds.get(str(name), "FSDP")
    rules: dict[str, tuple[Status, str]] = {
        "zero3": ("computed", "stage 3 is FSDP that reshards after the forward pass"),
        "zero2": ("computed", "stage 2 is nearest to FSDP that does not reshard; it still shards parameters at rest"),
        "zero1": ("impossible", "FSDP has no stage 1; without resharding is nearest, and it shards gradients too"),
    }
    status, rule = rules.get(str(name), ("computed", f"{name} is {kind}"))
    out.put("engine.name", "distributed_type", kind, status, rule)
    return kind


def _precision(out: Output) -> None:
    regime, low = out.get("precision.regime"), out.get("precision.low_dtype", "bfloat16")
    if regime is None:
        out.missing.append("precision.regime")
        return
    short = {"bfloat16": "bf16", "float16": "fp16"}[low]
    value = short if regime == "mixed" else "no"
    status: Status = "computed" if regime in ("full", "mixed", "low") else "impossible"
    rule = {
        "full": "fp32; the script must load the model in float32",
        "mixed": "fp32 masters: Accelerate upcasts trainable weights",
        "low": "no upcast; the script must load the model in bfloat16",
    }.get(regime, f"Accelerate has no regime {regime}")
    out.put("precision.regime", "mixed_precision", value, status, rule)
    out.note("precision.low_dtype", "mixed_precision", value, "computed", "the low dtype")
    wanted = out.get("precision.overrides.reduce")
    own = "bfloat16" if regime.startswith("low") else "float32"
    sharded = out.get("engine.name") not in ("ddp", "single")
    given = low if regime == "mixed" and sharded else own
    if (wanted or own) != given:
        policy = (
            f"FullyShardedDataParallelPlugin(mixed_precision_policy=...) in the script, reduce_dtype {wanted or own}"
        )
        rule = f"Accelerate's YAML reduces in {given}; give {policy}" if sharded else "DDP reduces in fp32"
        out.note("precision.overrides.reduce", None, None, "lossy", rule)
        if not out.has("precision.overrides.reduce"):
            out.extra.append(Placement("", None, None, "lossy", rule))
    else:
        out.note("precision.overrides.reduce", "mixed_precision", value, "computed", "what Accelerate reduces in")


def _fsdp(out: Output) -> None:
    out.leaves[_F + "fsdp_version"] = 2
    name = out.get("engine.name")
    reshard = out.get("engine.reshard_after_forward", name not in ("zero1", "zero2"))
    out.put("engine.reshard_after_forward", _F + "fsdp_reshard_after_forward", reshard, "renamed", "the same")
    if name in ("zero1", "zero2"):
        out.leaves[_F + "fsdp_reshard_after_forward"] = False
    _offload(out)
    classes = out.get("engine.unit_classes")
    out.leaves[_F + "fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    if classes:
        out.put(
            "engine.unit_classes",
            _F + "fsdp_transformer_layer_cls_to_wrap",
            ",".join(classes),
            "computed",
            "a text with commas",
        )
    else:
        out.note(
            "engine.unit_classes",
            _F + "fsdp_auto_wrap_policy",
            "TRANSFORMER_BASED_WRAP",
            "computed",
            "the model's own no-split classes",
        )
    out.put(
        "train.activation_checkpointing",
        _F + "fsdp_activation_checkpointing",
        out.get("train.activation_checkpointing", False),
        "renamed",
        "the same",
    )
    out.leaves[_F + "fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
    if out.get("engine.ignored_modules"):
        out.note(
            "engine.ignored_modules",
            _F + "fsdp_ignored_modules",
            None,
            "impossible",
            "Accelerate's are one regular expression over module names; write it by hand",
        )
    if name == "hsdp":
        ranks = out.get("engine.ranks", 2)
        shard = out.get("engine.shard_ranks") or max(1, ranks // 2)
        out.put("engine.shard_ranks", _P + "dp_shard_size", shard, "renamed", "ranks in one sharding group")
        out.add(_P + "dp_replicate_size", ranks // shard, "groups: ranks / shard_ranks")


def _offload(out: Output) -> None:
    value = out.get("engine.offload", "none")
    target = _F + "fsdp_offload_params"
    if isinstance(value, dict):
        value = {"optimizer": value.get("optimizer", "none"), "parameters": value.get("parameters", "none")}
        every = set(value.values())
        value = every.pop() if len(every) == 1 else value
    zero = str(out.get("engine.name")).startswith("zero")
    whole = value == "none" or (value == "cpu" and (not zero or out.get("engine.name") == "zero3"))
    rule = "parameters, gradients and optimizer together" if whole else "FSDP offloads everything to the CPU or nothing"
    out.put("engine.offload", target, whole and value == "cpu", "computed" if whole else "impossible", rule)


def _in_the_script(out: Output) -> None:
    for path, call in _SCRIPT.items():
        value = out.get(path)
        if path == "precision.loss_scale.initial" and out.get("precision.low_dtype") != "float16":
            continue
        nothing = value is None or (path == "train.accumulation" and value == 1)
        nothing = nothing or (path == "train.on_non_finite" and out.get("precision.low_dtype") == "float16")
        rule = (
            "nothing to do in the script" if nothing else f"no field of the YAML; in the script: {call.format(value)}"
        )
        out.note(path, None, None, "not-needed" if nothing else "lossy", rule)
    for path in out.said:
        if path.startswith("train.optimizer."):
            rule = f"no field of the YAML; the script builds the optimizer: {path.rpartition('.')[2]} {out.said[path]}"
            out.note(path, None, None, "lossy", rule)
        elif path.startswith("train.schedule.") or path == "train.steps":
            rule = "no field of the YAML; the script builds the schedule. Accelerate advances a prepared one once per "
            rule += f"process at each step: {path.rpartition('.')[2]} {out.said[path]}"
            out.note(path, None, None, "lossy", rule)
