"""What a DeepSpeed configuration means, in terms of the recipe."""

from __future__ import annotations

import math
from typing import Any

from samestep.migrate.values import Values

_Z = "zero_optimization."
_O = "optimizer.params."
_S = "scheduler.params."
_LONG = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_NEVER = 2**53


def read_deepspeed(v: Values) -> None:
    """Fill `v.settings` and `v.findings` from DeepSpeed's fields."""
    stage = _engine(v)
    _sizes(v, stage)
    _offload(v, stage)
    _batch(v)
    regime, low = _precision(v)
    _reduction(v, regime, low, stage)
    _clipping(v)
    _optimizer(v)
    _schedule(v)
    v.say_autos(path for path in v.given if path != "gradient_clipping")


def _engine(v: Values) -> int:
    stage = v.get(_Z + "stage")
    if stage not in (0, 1, 2, 3):
        v.find(_Z + "stage", "error", f"is {stage}; DeepSpeed has stages 0, 1, 2 and 3")
        stage = 0
    v.say("engine.name", f"zero{stage}" if stage else "ddp", _Z + "stage")
    return stage


def _sizes(v: Values, stage: int) -> None:
    for name, target, first_stage in (
        ("reduce_bucket_size", "bucket_elements", 1),
        ("stage3_prefetch_bucket_size", "prefetch_elements", 3),
        ("stage3_max_live_parameters", "live_elements", 3),
        ("stage3_param_persistence_threshold", "persistent_elements", 3),
    ):
        path = _Z + name
        if v.has(path) and stage < first_stage:
            v.say(None, None, path, rule=f"not read at stage {stage}", status="not-needed")
        elif v.has(path):
            v.say(f"engine.{target}", v.get(path), path)
    save = (_Z + "stage3_gather_16bit_weights_on_model_save", _Z + "stage3_gather_fp16_weights_on_model_save")
    path = save[1] if v.has(save[1]) else save[0]
    if v.has(path) and v.get(path):
        low = "float16" if v.get("fp16.enabled") else "bfloat16"
        v.say("precision.export_dtype", low, path)
    elif v.has(path):
        v.say(None, None, path, rule="the export is in the loaded dtype anyway", status="not-needed")


def _offload(v: Values, stage: int) -> None:
    devices = {}
    used = []
    for part, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
        path = f"{_Z}offload_{part}.device"
        devices[part] = str(v.get(path)).lower()
        used += [path, f"{_Z}offload_{part}.nvme_path"] if v.has(path) else []
        if v.has(_Z + old):
            used.append(_Z + old)
            if not v.has(path):
                devices[part] = "cpu" if v.get(_Z + old) else "none"
    for part in ("optimizer", "param"):
        path = f"{_Z}offload_{part}.nvme_path"
        if v.has(path) and devices[part] != "nvme":
            v.say(None, None, path, rule="nothing is offloaded to nvme", status="not-needed")
            used = [name for name in used if name != path]
    if stage < 3 and devices["param"] != "none":
        v.find(_Z + "offload_param.device", "warning", f"parameters are offloaded at stage 3 only, not at {stage}")
        devices["param"] = "none"
    if used:
        value = _offload_value(v, stage, devices["optimizer"], devices["param"])
        status = "impossible" if stage < 3 and devices["optimizer"] == "nvme" else "computed"
        rule = "which parts are offloaded, and where to"
        if status == "impossible":
            rule = "samestep offloads the optimizer to nvme on zero3 only"
        v.say("engine.offload", value, *used, rule=rule, status=status)
    if devices["optimizer"] != "none" and v.get("zero_force_ds_cpu_optimizer") is not False:
        v.say(None, None, "zero_force_ds_cpu_optimizer")


def _offload_value(v: Values, stage: int, optimizer: str, parameters: str) -> Any:
    if stage == 0 or (optimizer == parameters == "none") or (stage < 3 and optimizer == "nvme"):
        return "none"
    if optimizer == "cpu" and parameters == ("cpu" if stage == 3 else "none"):
        return "cpu"
    value: dict[str, Any] = {"parameters": parameters, "optimizer": optimizer}
    if "nvme" in (optimizer, parameters):
        places = [v.given.get(f"{_Z}offload_{part}.nvme_path") for part in ("optimizer", "param")]
        value["nvme_path"] = next((place for place in places if place), None)
    return value


def _batch(v: Values) -> None:
    total, micro, steps = (
        v.get(name) if v.has(name) else None
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    ranks = v.extra.get("engine.ranks")
    micro = micro or v.extra.get("train.micro_batch")
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if v.has(name) and not 1 <= v.get(name) < 2**31:
            v.find(name, "error", f"is {v.get(name)}; DeepSpeed needs a number of at least 1")
    if v.has("train_micro_batch_size_per_gpu"):
        v.say("train.micro_batch", micro, "train_micro_batch_size_per_gpu")
    if v.has("gradient_accumulation_steps"):
        v.say("train.accumulation", steps, "gradient_accumulation_steps")
    if total is None:
        if steps is None and not v.is_auto("gradient_accumulation_steps"):
            v.say("train.accumulation", 1, "gradient_accumulation_steps")
        return
    if min(total, micro or 1, steps or 1) < 1:
        v.find("train_batch_size", "error", "a batch needs at least one row")
    elif micro and steps:
        _whole(v, "engine.ranks", total, micro * steps)
    elif micro and ranks:
        _whole(v, "train.accumulation", total, micro * ranks)
    elif ranks:
        # DeepSpeed: without a micro-batch size, accumulation is what is given, or 1.
        _whole(v, "train.micro_batch", total, ranks * (steps or 1))
        if steps is None:
            v.say("train.accumulation", 1, "train_batch_size")
    else:
        v.say(None, None, "train_batch_size", rule="a number of rows that depends on the ranks: give engine.ranks")


def _whole(v: Values, target: str, total: int, divisor: int) -> None:
    if total % divisor or (target in v.extra and v.extra[target] != total // divisor):
        given = f" = {total // divisor}, but {target} is {v.extra[target]}" if target in v.extra else ""
        v.find(
            "train_batch_size",
            "error",
            f"{total} does not fit micro-batch, accumulation and ranks: {divisor} x {target}{given}",
        )
    v.say(target, max(1, total // divisor), "train_batch_size")


def _precision(v: Values) -> tuple[str, str]:
    """Regime and low dtype."""
    bf16, fp16, autocast = (v.get(f"{name}.enabled") for name in ("bf16", "fp16", "torch_autocast"))
    if bf16 and fp16:
        v.find("fp16.enabled", "error", "bf16 and fp16 are both enabled; DeepSpeed refuses that")
    for name in ("bf16", "fp16"):
        if v.is_auto(f"{name}.enabled") and not (bf16 or fp16):
            return "mixed", "bfloat16"
    if bf16:
        return _bf16(v), "bfloat16"
    if fp16:
        v.say("precision.regime", "mixed", "fp16.enabled")
        v.say("precision.low_dtype", "float16", "fp16.enabled")
        v.say("train.on_non_finite", "skip", "fp16.enabled", rule="an overflow skips the step, as in DeepSpeed")
        _loss_scale(v)
        return "mixed", "float16"
    if autocast:
        low = _LONG.get(v.get("torch_autocast.dtype"), v.get("torch_autocast.dtype"))
        v.say("precision.regime", "mixed", "torch_autocast.enabled")
        v.say("precision.low_dtype", low, "torch_autocast.dtype")
        return "mixed-autocast", low
    for name in ("bf16.enabled", "fp16.enabled"):
        if v.has(name):
            v.say("precision.regime", "full", name, rule="neither bf16 nor fp16: fp32 everywhere, the regime full")
            break
    else:
        v.say(
            "precision.regime", "full", "bf16.enabled", rule="neither bf16 nor fp16: fp32 everywhere, the regime full"
        )
    return "full", "float32"


def _bf16(v: Values) -> str:
    masters, moments = (v.get(f"bf16.{name}") for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"))
    skips = v.get("bf16.check_grad_overflow") is not False
    v.say("train.on_non_finite", "skip" if skips else "stop", "bf16.check_grad_overflow")
    names = ("bf16.enabled", "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")
    if masters and moments:
        v.say("precision.regime", "low", *names, rule="bf16 masters, gradients and moments are the regime low")
        return "low"
    if masters or moments:
        odd = "bf16 masters with fp32 moments" if masters else "fp32 masters with bf16 moments"
        v.say(
            "precision.regime", "low" if masters else "mixed", *names, rule=f"no regime has {odd}", status="impossible"
        )
        return "low" if masters else "mixed"
    v.say("precision.regime", "mixed", *names)
    v.say(
        None,
        None,
        "bf16.enabled",
        status="lossy",
        rule="DeepSpeed cuts its fp32 masters from the bf16-rounded weights; samestep's are the weights as loaded",
    )
    return "mixed"


def _loss_scale(v: Values) -> None:
    fixed = v.get("fp16.loss_scale")
    if fixed:
        v.say("precision.loss_scale.initial", float(fixed), "fp16.loss_scale")
        v.say("precision.loss_scale.growth_interval", _NEVER, "fp16.loss_scale")
    else:
        power = v.get("fp16.initial_scale_power")
        v.say("precision.loss_scale.initial", math.ldexp(1.0, min(power, 1000)), "fp16.initial_scale_power")
        v.say("precision.loss_scale.growth_interval", v.get("fp16.loss_scale_window"), "fp16.loss_scale_window")
        v.say("precision.loss_scale.minimum", float(v.get("fp16.min_loss_scale")), "fp16.min_loss_scale")
    if v.get("fp16.hysteresis") != 1 and not fixed:
        v.say(None, None, "fp16.hysteresis")


def _reduction(v: Values, regime: str, low: str, stage: int) -> None:
    mode = "float32" if regime in ("full", "mixed-autocast") else low
    wanted = v.get("communication_data_type")
    wanted = mode if wanted is None else _LONG.get(str(wanted).lower(), str(wanted).lower())
    own = low if regime == "low" else "float32"
    accumulated = v.get("data_types.grad_accum_dtype")
    accumulated = mode if accumulated is None else _LONG.get(str(accumulated).lower(), str(accumulated).lower())
    steps = v.get("gradient_accumulation_steps") or 1
    at_the_end = stage in (0, 1) and steps > 1
    if regime != "full" or v.has("communication_data_type"):
        rule = "gradients cross the ranks in this dtype"
        status = "computed"
        if at_the_end and wanted != own:
            rule += "; DeepSpeed adds up micro-batches before, samestep after: last bits"
            status = "lossy"
        v.say(
            "precision.overrides.reduce",
            None if wanted == own else wanted,
            "communication_data_type",
            rule=rule,
            status=status,
        )
    if at_the_end and wanted == own:
        v.say("engine.reduce_every", "step", _Z + "stage", rule=f"stage {stage} reduces once per step")
    if accumulated == own:
        v.say(
            None,
            None,
            "data_types.grad_accum_dtype",
            rule="samestep accumulates in this dtype too",
            status="not-needed",
        )
    elif steps > 1:
        v.say(
            None,
            None,
            "data_types.grad_accum_dtype",
            rule=f"DeepSpeed accumulates in {accumulated}, samestep in {own}",
            status="lossy",
        )
    else:
        v.say(
            None,
            None,
            "data_types.grad_accum_dtype",
            rule="one micro-batch a step: nothing is accumulated",
            status="not-needed",
        )


def _clipping(v: Values) -> None:
    if v.is_auto("gradient_clipping"):
        v.say(
            "train.max_grad_norm",
            v.extra.get("train.max_grad_norm", 1.0),
            "gradient_clipping",
            rule="auto: Accelerate and the Trainer fill in 1.0 unless told otherwise",
        )
        return
    norm = v.get("gradient_clipping")
    if norm < 0:
        v.find("gradient_clipping", "error", f"is {norm}; a norm is not negative")
    v.say("train.max_grad_norm", norm if norm > 0 else None, "gradient_clipping")


def _optimizer(v: Values) -> None:
    if not v.has("optimizer.type"):
        return
    kind = str(v.get("optimizer.type")).lower()
    name = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}.get(kind)
    if name is None:
        v.say(
            "train.optimizer.name",
            "adamw",
            "optimizer.type",
            status="impossible",
            rule=f"samestep has no {v.given['optimizer.type']}, only adamw and sgd",
        )
        name = "adamw"
    else:
        v.say("train.optimizer.name", name, "optimizer.type")
    warm = str(v.get("scheduler.type")).lower() in ("warmuplr", "warmupdecaylr")
    if not v.is_auto(_O + "lr") and not (warm and v.has(_S + "warmup_max_lr")):
        v.say("train.optimizer.lr", v.get(_O + "lr"), _O + "lr")
    used = ("betas", "eps", "weight_decay") if name == "adamw" else ("momentum", "weight_decay")
    for field in used:
        if field == "weight_decay" and v.get(_O + "torch_adam") and not v.has(_O + field):
            v.say("train.optimizer.weight_decay", 0.01, _O + field, rule="torch's AdamW decays by 0.01 unless told")
        elif not v.is_auto(_O + field):
            v.say(f"train.optimizer.{field}", v.get(_O + field), _O + field)
    if v.has(_O + "betas") and len(v.get(_O + "betas")) != 2:
        v.find(_O + "betas", "error", f"expected two numbers, got {v.given[_O + 'betas']!r}")
    for field in {"betas", "eps", "momentum"} - set(used):
        if v.has(_O + field):
            v.say(None, None, _O + field, rule=f"{name} does not use it", status="not-needed")
    v.say(
        "train.optimizer.no_decay",
        [],
        _O + "weight_decay",
        rule="DeepSpeed's optimizer block is one group: it decays biases and norms too",
    )
    if "scheduler.type" not in v.given:
        v.say("train.schedule.name", "constant", "scheduler.type", rule="no scheduler block: the rate is constant")


def _schedule(v: Values) -> None:
    if not v.has("scheduler.type"):
        return
    kind = str(v.get("scheduler.type")).lower()
    name = _SCHEDULES.get(kind)
    if name is None:
        v.say(
            "train.schedule.name",
            "constant",
            "scheduler.type",
            status="impossible",
            rule=f"samestep has no {v.given['scheduler.type']}",
        )
        return
    v.say("train.schedule.name", name, "scheduler.type")
    if not v.is_auto(_S + "warmup_num_steps"):
        v.say("train.schedule.warmup_steps", v.get(_S + "warmup_num_steps"), _S + "warmup_num_steps")
    if v.has(_S + "total_num_steps"):
        v.say("train.steps", v.get(_S + "total_num_steps"), _S + "total_num_steps")
    if v.get(_S + "warmup_type") != "linear":
        v.say(None, None, _S + "warmup_type")
    if kind == "warmupcosinelr":
        v.say("train.schedule.final_factor", v.get(_S + "cos_min_ratio"), _S + "cos_min_ratio")
        return
    largest, own = v.get(_S + "warmup_max_lr"), v.get(_O + "lr")
    if v.has(_S + "warmup_max_lr"):
        v.say("train.optimizer.lr", largest, _S + "warmup_max_lr")
        if v.has(_O + "lr"):
            v.say(
                None,
                None,
                _O + "lr",
                rule="scheduler.params.warmup_max_lr wins: the scheduler sets the rate",
                status="not-needed",
            )
            if own != largest:
                what = f"is {own}, but scheduler.params.warmup_max_lr {largest} wins: the scheduler sets the rate"
                v.find(_O + "lr", "warning", what)
    elif kind == "warmupdecaylr" and not v.is_auto(_S + "warmup_max_lr"):
        v.find(_S + "warmup_max_lr", "warning", f"is left out: WarmupDecayLR goes up to 0.001 then, not to lr {own}")
        v.settings = [s for s in v.settings if s.path != "train.optimizer.lr"]
        v.say("train.optimizer.lr", 1e-3, _S + "warmup_max_lr", rule="WarmupDecayLR's own default, whatever lr is")
        if v.has(_O + "lr"):
            v.say(None, None, _O + "lr", rule="WarmupDecayLR sets the rate", status="not-needed")
