"""The target `deepspeed`: a JSON that makes DeepSpeed do what the recipe says, with nothing left to its defaults."""

from __future__ import annotations

import math
from typing import Any

from samestep.migrate.output import Output
from samestep.migrate.rows import Status

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_Z = "zero_optimization."
_SIZES = {
    "engine.bucket_elements": ("reduce_bucket_size", 1),
    "engine.prefetch_elements": ("stage3_prefetch_bucket_size", 3),
    "engine.live_elements": ("stage3_max_live_parameters", 3),
    "engine.persistent_elements": ("stage3_param_persistence_threshold", 3),
}
_SCHEDULES = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
_NEVER = 2**53
_SHIFT = "DeepSpeed's schedule is late by two steps in the warm-up and by one after it"


def write_deepspeed(out: Output, *, filled_by_accelerate: bool = False) -> None:
    """Fill `out` with DeepSpeed's fields.

    `filled_by_accelerate`: sizes of batches may be left to Accelerate as "auto".
    """
    stage = _stage(out)
    _batch(out, filled_by_accelerate)
    _precision(out)
    _clipping(out)
    _sizes(out, stage)
    _offload(out, stage)
    _optimizer(out)
    _schedule(out)


def _stage(out: Output) -> int:
    name = out.get("engine.name")
    if name is None:
        out.missing.append("engine.name")
        return 0
    full = out.get("engine.reshard_after_forward", True)
    stages = {"fsdp": 3 if full else 2, "hsdp": 3 if full else 2, "ddp": 0, "single": 0}
    stage = stages.get(name, int(name[-1]) if name.startswith("zero") else 0)
    rules: dict[str, tuple[Status, str]] = {
        "fsdp": ("computed", "fsdp that reshards is stage 3; without resharding stage 2 is nearest"),
        "hsdp": ("impossible", "ZeRO has no groups that shard everything; stage 3 shards over all ranks"),
        "ddp": ("computed", "stage 0 replicates"),
        "single": ("lossy", "stage 0 on one process; the micro-batches of several ranks are not emulated"),
    }
    status, rule = rules.get(name, ("computed", f"{name} is stage {stage}"))
    out.put("engine.name", _Z + "stage", stage, status, rule)
    out.note("engine.reshard_after_forward", _Z + "stage", stage, "computed", "resharding is stage 3, none is stage 2")
    out.note(
        "engine.shard_ranks", None, None, "not-needed" if name != "hsdp" else "impossible", "ZeRO shards over all ranks"
    )
    if out.get("engine.ignored_modules"):
        out.note("engine.ignored_modules", None, None, "impossible", "DeepSpeed cannot leave modules out")
    return stage


def _batch(out: Output, filled: bool) -> None:
    micro, steps, ranks = (out.get(path) for path in ("train.micro_batch", "train.accumulation", "engine.ranks"))
    for path, target, value in (
        ("train.micro_batch", "train_micro_batch_size_per_gpu", micro),
        ("train.accumulation", "gradient_accumulation_steps", steps),
    ):
        if value is not None:
            out.put(path, target, value, "renamed", "the same number")
        elif filled:
            out.add(target, "auto", "Accelerate fills it from the script")
        else:
            out.missing.append(path)
    if ranks is not None and micro is not None and steps is not None:
        out.put(
            "engine.ranks",
            "train_batch_size",
            ranks * micro * steps,
            "computed",
            "rows of one step on all ranks: micro-batch x accumulation x ranks",
        )
    else:
        out.note("engine.ranks", None, None, "not-needed", "given to the launcher")


def _precision(out: Output) -> None:
    regime, low = out.get("precision.regime"), out.get("precision.low_dtype", "bfloat16")
    if regime is None:
        out.missing.append("precision.regime")
        return
    status: Status = "computed" if regime in ("full", "mixed", "low") else "impossible"
    rule = f"the regime {regime}" if status == "computed" else f"DeepSpeed has no regime {regime}"
    skips = out.get("train.on_non_finite", "stop") == "skip"
    if regime == "full":
        out.put("precision.regime", "bf16.enabled", False, status, rule)
        out.note("train.on_non_finite", None, None, "lossy", "in fp32 DeepSpeed updates whatever the gradients are")
    elif low == "float16":
        out.put("precision.regime", "fp16.enabled", True, status, rule)
        out.note(
            "train.on_non_finite",
            "fp16.enabled",
            True,
            "computed" if skips else "lossy",
            "fp16 skips a step that overflows",
        )
        _loss_scale(out)
    else:
        out.put("precision.regime", "bf16.enabled", True, status, rule)
        out.put(
            "train.on_non_finite",
            "bf16.check_grad_overflow",
            skips,
            "computed" if skips else "lossy",
            "skipped" if skips else "DeepSpeed does not stop: it updates with them",
        )
        if regime.startswith("low"):
            out.add("bf16.bf16_master_weights_and_grads", True, "bf16 masters, of the regime low")
            out.add("bf16.bf16_optimizer_states", True, "bf16 moments, of the regime low")
    out.note("precision.low_dtype", f"{_SHORT[low]}.enabled", True, "computed", "the low dtype")
    own = "bfloat16" if regime.startswith("low") else "float32"
    wanted = out.get("precision.overrides.reduce") or own
    target, value = "communication_data_type", _SHORT[wanted]
    out.leaves[target] = value
    if out.get("precision.overrides.reduce"):
        out.note("precision.overrides.reduce", target, value, "computed", "gradients cross the ranks in this dtype")
    else:
        out.note("precision.overrides.reduce", target, value, "computed", "the regime's own, said aloud")
        if not out.has("precision.overrides.reduce"):
            out.add(target, value, "left out, DeepSpeed sends gradients in the compute dtype")
    out.add("data_types.grad_accum_dtype", _SHORT[own], "left out, DeepSpeed accumulates in the compute dtype")
    _export(out, low)


def _export(out: Output, low: str) -> None:
    wanted = out.get("precision.export_dtype", "loaded")
    target = _Z + "stage3_gather_16bit_weights_on_model_save"
    if wanted == low and str(out.get("engine.name")) in ("zero3", "fsdp", "hsdp"):
        out.put("precision.export_dtype", target, True, "computed", "save_16bit_model writes the low dtype")
    else:
        out.note("precision.export_dtype", None, None, "not-needed", "the script saves the model")


def _loss_scale(out: Output) -> None:
    scale = out.get("precision.loss_scale.initial", 65536.0)
    if out.get("precision.loss_scale.growth_interval") == _NEVER:
        out.put("precision.loss_scale.initial", "fp16.loss_scale", scale, "lossy", "a fixed scale is never halved")
        out.note("precision.loss_scale.growth_interval", "fp16.loss_scale", scale, "computed", "never grows")
        return
    power = round(math.log2(scale))
    exact = math.ldexp(1.0, power) == scale
    out.put(
        "precision.loss_scale.initial",
        "fp16.initial_scale_power",
        max(0, power),
        "computed" if exact and power >= 0 else "lossy",
        "the nearest power of two",
    )
    window = out.get("precision.loss_scale.growth_interval", 2000)
    out.put("precision.loss_scale.growth_interval", "fp16.loss_scale_window", window, "renamed", "the same number")
    least = out.get("precision.loss_scale.minimum", 1.0)
    whole = max(1, round(least))
    out.put(
        "precision.loss_scale.minimum",
        "fp16.min_loss_scale",
        whole,
        "renamed" if whole == least else "lossy",
        "a whole number in DeepSpeed",
    )
    out.add("fp16.hysteresis", 1, "samestep halves the scale at every overflow; DeepSpeed's default waits for two")


def _clipping(out: Output) -> None:
    if not out.has("train.max_grad_norm"):
        out.missing.append("train.max_grad_norm")
        return
    norm = out.get("train.max_grad_norm")
    rule = "the same norm" if norm is not None else "no clipping must be said: left out, DeepSpeed clips at 1.0"
    out.put(
        "train.max_grad_norm", "gradient_clipping", norm or 0.0, "renamed" if norm is not None else "computed", rule
    )


def _sizes(out: Output, stage: int) -> None:
    for path, (name, least) in _SIZES.items():
        if out.has(path) and stage >= least:
            out.put(path, _Z + name, out.get(path), "renamed", "the same number")
        else:
            out.note(path, None, None, "not-needed", f"not read at stage {stage}")


def _offload(out: Output, stage: int) -> None:
    value = out.get("engine.offload", "none")
    parts: dict[str, Any] = value if isinstance(value, dict) else {"optimizer": value, "parameters": value}
    optimizer, parameters = parts.get("optimizer", "none"), parts.get("parameters", "none")
    if stage < 3 and not isinstance(value, dict):
        parameters = "none"
    if stage == 0 and value != "none":
        out.note("engine.offload", None, None, "impossible", "stage 0 cannot offload")
        return
    rule = "the same devices" if value != "none" else "nothing is offloaded"
    for part, device in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if device != "none":
            out.put("engine.offload", f"{_Z}{part}.device", device, "computed", rule, shown=value)
        if device == "nvme":
            out.leaves[f"{_Z}{part}.nvme_path"] = parts.get("nvme_path")
    out.note("engine.offload", None, None, "not-needed", rule)
    if optimizer != "none":
        out.add("zero_force_ds_cpu_optimizer", False, "true, the default, replaces the optimizer under offload")


def _optimizer(out: Output) -> None:
    prefix = "train.optimizer."
    if not out.has(prefix + "lr"):
        return
    name = out.get(prefix + "name", "adamw")
    out.put(
        prefix + "name",
        "optimizer.type",
        "AdamW" if name == "adamw" else "SGD",
        "computed",
        "torch's own; the script must pass none",
    )
    used = ("lr", "betas", "eps", "weight_decay") if name == "adamw" else ("lr", "momentum", "weight_decay")
    for field in used:
        if out.has(prefix + field):
            out.put(prefix + field, f"optimizer.params.{field}", out.get(prefix + field), "kept", "the same value")
    for field in {"betas", "eps", "momentum"} - set(used):
        out.note(prefix + field, None, None, "not-needed", f"{name} does not use it")
    if name == "adamw":
        out.add("optimizer.params.torch_adam", True, "torch's AdamW instead of DeepSpeed's fused one")
        out.leaves.setdefault("optimizer.params.weight_decay", 0.0)
    out.leaves["zero_allow_untested_optimizer"] = True
    decays = bool(out.get(prefix + "weight_decay", 0.0))
    if decays and out.get(prefix + "no_decay", ["*.bias", "*norm*"]):
        out.note(
            prefix + "no_decay",
            None,
            None,
            "lossy",
            "DeepSpeed's optimizer block is one group: it decays all parameters; to keep two groups, build "
            "torch.optim.AdamW in the script and remove the block",
        )
    else:
        out.note(prefix + "no_decay", None, None, "not-needed", "one group")


def _schedule(out: Output) -> None:
    prefix = "train.schedule."
    if not out.has(prefix + "name"):
        return
    name, warmup, steps = out.get(prefix + "name"), out.get(prefix + "warmup_steps", 0), out.get("train.steps")
    if name == "constant" and not warmup:
        out.note(prefix + "name", None, None, "computed", "no scheduler block: the rate is constant")
        out.note(prefix + "warmup_steps", None, None, "computed", "no scheduler block: no warm-up")
        out.note(prefix + "final_factor", None, None, "not-needed", "constant does not use it")
        out.note("train.steps", None, None, "not-needed", "the script counts steps")
        return
    if name != "constant" and steps is None:
        out.note(prefix + "name", None, None, "lossy", "needs train.steps; without it the script sets the schedule")
        return
    out.put(prefix + "name", "scheduler.type", _SCHEDULES[name], "lossy", _SHIFT)
    status: Status = "lossy" if warmup < 2 else "renamed"
    rule = "DeepSpeed warms up for at least two steps" if warmup < 2 else "the same number of steps"
    out.put(prefix + "warmup_steps", "scheduler.params.warmup_num_steps", max(2, warmup), status, rule)
    out.add("scheduler.params.warmup_type", "linear", "log, the default, rises fast at first")
    if name != "constant":
        out.put("train.steps", "scheduler.params.total_num_steps", steps, "renamed", "the same number of steps")
    factor = out.get(prefix + "final_factor", 0.0)
    if name == "cosine":
        out.put(prefix + "final_factor", "scheduler.params.cos_min_ratio", factor, "renamed", "the same share")
        return
    used = name == "linear" and factor
    out.note(
        prefix + "final_factor",
        None,
        None,
        "impossible" if used else "not-needed",
        "WarmupDecayLR ends at 0" if used else "ends where DeepSpeed's does",
    )
    if out.has("train.optimizer.lr"):
        out.add("scheduler.params.warmup_max_lr", out.get("train.optimizer.lr"), "left out it would be 0.001")
