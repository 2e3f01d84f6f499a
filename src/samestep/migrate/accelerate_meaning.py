"""What an Accelerate configuration means, in terms of the recipe: FSDP, DDP and one process.

DeepSpeed's part is read as DeepSpeed's own fields (`deepspeed_meaning`).
"""

from __future__ import annotations

import re
from typing import Any

from samestep.migrate.values import Values

SCRIPTS_SCHEDULER = "the script's scheduler"
"""A default of Accelerate that no field says."""
_F = "fsdp_config.fsdp_"
_P = "parallelism_config.parallelism_config_"
_STRATEGY = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
_GLOB = re.compile(r"(?:\w|\\\.|\.\*|\.)+")


def distributed_type(v: Values) -> str:
    """NO, DDP, FSDP, DEEPSPEED, or OTHER for what has no counterpart."""
    kind = str(v.get("distributed_type") or "NO").upper()
    if kind.startswith("MULTI"):
        return "FSDP" if _uses_fsdp(v) and kind != "MULTI_CPU" else "DDP"
    return kind if kind in ("NO", "FSDP", "DEEPSPEED") else "OTHER"


def _uses_fsdp(v: Values) -> bool:
    return False if not v.given else any(path.startswith(_P) and "dp_shard" in path for path in v.given)


def read_accelerate(v: Values) -> None:
    """Fill `v.settings` and `v.findings` from the fields of Accelerate, DeepSpeed's excepted."""
    kind = distributed_type(v)
    if v.has("num_processes") and v.get("num_processes") > 0:
        v.say("engine.ranks", v.get("num_processes"), "num_processes")
    elif v.has("num_processes") and v.get("num_processes") == -1:
        v.say(None, None, "num_processes", rule="given on the command line", status="not-needed")
    elif v.has("num_processes"):
        v.find("num_processes", "error", f"is {v.get('num_processes')}; a run needs at least one process")
    elif kind == "NO":
        v.say("engine.ranks", 1, "num_processes", rule="one process")
    if kind == "DEEPSPEED":
        _unused(v, "fsdp_config", "distributed_type is DEEPSPEED")
        v.say(None, None, "distributed_type", rule="the engine is that of DeepSpeed's stage")
        return
    _unused(v, "deepspeed_config", f"distributed_type is {v.get('distributed_type')}")
    if kind == "OTHER":
        rule = f"samestep has no {v.get('distributed_type')}"
        v.say("engine.name", "ddp", "distributed_type", rule=rule, status="impossible")
    elif kind == "FSDP":
        read_fsdp(v)
    else:
        _unused(v, "fsdp_config", f"distributed_type is {v.get('distributed_type')}")
        v.say("engine.name", "single" if kind == "NO" else "ddp", "distributed_type")
    fsdp_version = v.get(_F + "version") if kind == "FSDP" else 0
    read_mixed_precision(v, fsdp_version)
    v.say(
        "train.accumulation",
        v.extra.get("train.accumulation", 1),
        "gradient_accumulation_steps",
        rule="not in the file: Accelerator(gradient_accumulation_steps=...) in the script says more than 1",
    )
    v.say(
        None,
        None,
        SCRIPTS_SCHEDULER,
        status="lossy",
        rule="a prepared scheduler advances once per process at each step; without Accelerate once per step. Give "
        "train.steps and the warm-up in optimizer steps",
    )


def _unused(v: Values, section: str, why: str) -> None:
    for path in v.given:
        if path.startswith(f"{section}."):
            v.say(None, None, path, rule=f"not read: {why}", status="not-needed")


def read_fsdp(v: Values) -> None:
    """FSDP's own section."""
    version = v.get(_F + "version")
    if version not in (1, 2):
        v.find(_F + "version", "error", f"is {version}; FSDP has versions 1 and 2")
        return
    (_first_version if version == 1 else _second_version)(v)
    offload = "cpu" if v.get(_F + "offload_params") else "none"
    if v.has(_F + "offload_params"):
        v.say("engine.offload", offload, _F + "offload_params")
    classes = v.get(_F + "transformer_layer_cls_to_wrap")
    if v.has(_F + "transformer_layer_cls_to_wrap"):
        v.say("engine.unit_classes", classes or None, _F + "transformer_layer_cls_to_wrap")
    if v.has(_F + "activation_checkpointing"):
        v.say("train.activation_checkpointing", v.get(_F + "activation_checkpointing"), _F + "activation_checkpointing")
    if v.has(_F + "ignored_modules"):
        _ignored_modules(v, v.get(_F + "ignored_modules"))
    if v.has(_F + "min_num_params") and v.get(_F + "auto_wrap_policy") != "SIZE_BASED_WRAP":
        v.say(None, None, _F + "min_num_params", rule="read with SIZE_BASED_WRAP only", status="not-needed")


def _first_version(v: Values) -> None:
    path = _F + "sharding_strategy"
    strategy = str(v.get(path)).upper()
    strategy = _STRATEGY.get(strategy, strategy)
    if v.has(_F + "reshard_after_forward"):
        what = f"FSDP1 never reads it: sharding_strategy, here {strategy}, decides"
        v.find(_F + "reshard_after_forward", "warning", what)
        v.say(None, None, _F + "reshard_after_forward", rule=what, status="not-needed")
    for size in (_P + "dp_replicate_size", _P + "dp_shard_size"):
        if v.has(size) and v.get(size) != 1:
            what = "FSDP1 never reads it, and shards over all ranks; only FSDP2 has groups from here"
            v.find(size, "warning", what)
            v.say(None, None, size, rule=what, status="not-needed")
    if strategy == "NO_SHARD":
        v.say("engine.name", "ddp", path, "distributed_type", _F + "version")
        return
    hybrid = strategy.startswith("HYBRID")
    v.say("engine.name", "hsdp" if hybrid else "fsdp", path, "distributed_type", _F + "version")
    v.say("engine.reshard_after_forward", strategy in ("FULL_SHARD", "HYBRID_SHARD"), path)
    if hybrid:
        ranks, machines = v.get("num_processes"), v.get("num_machines")
        shard = (
            ranks // machines if ranks and machines > 1 and ranks % machines == 0 else v.extra.get("engine.shard_ranks")
        )
        if shard is None:
            v.asked.append("engine.shard_ranks")
        else:
            v.say("engine.shard_ranks", shard, path, rule="the ranks of one machine share")


def _second_version(v: Values) -> None:
    if v.has(_F + "sharding_strategy"):
        what = "FSDP2 ignores it: reshard_after_forward decides"
        v.find(_F + "sharding_strategy", "warning", what)
        v.say(None, None, _F + "sharding_strategy", rule=what, status="not-needed")
    reshard = v.get(_F + "reshard_after_forward")
    truth = {"true": True, "false": False}.get(str(reshard).lower())
    if truth is None:
        v.find(_F + "reshard_after_forward", "error", f"FSDP2 takes true or false, got {reshard!r}")
        return
    replicas, shards = v.get(_P + "dp_replicate_size"), v.get(_P + "dp_shard_size")
    for path, size in ((_P + "dp_replicate_size", replicas), (_P + "dp_shard_size", shards)):
        if size < 1:
            v.find(path, "error", f"is {size}; Accelerate needs at least 1")
    hybrid = replicas > 1 and shards > 1
    replicated = replicas > 1 and shards == 1 and v.has(_P + "dp_shard_size")
    name = "hsdp" if hybrid else "ddp" if replicated else "fsdp"
    sizes = [path for path in (_P + "dp_replicate_size", _P + "dp_shard_size") if v.has(path)]
    v.say("engine.name", name, "distributed_type", _F + "version", *sizes)
    if replicated:
        v.find(_P + "dp_shard_size", "warning", "is 1: Accelerate refuses FSDP2 without ranks to shard over")
    else:
        v.say("engine.reshard_after_forward", truth, _F + "reshard_after_forward")
    if hybrid:
        v.say("engine.shard_ranks", shards, _P + "dp_shard_size")
    if sizes and v.has("num_processes") and replicas * shards != v.get("num_processes"):
        what = f"{replicas} x {shards} ranks, but num_processes is {v.get('num_processes')}; Accelerate refuses that"
        v.find(sizes[0], "warning", what)
    if v.get(_F + "state_dict_type") in ("LOCAL_STATE_DICT", "2"):
        v.find(_F + "state_dict_type", "warning", "FSDP2 has no local state dicts; Accelerate refuses this")


def _ignored_modules(v: Values, value: Any) -> None:
    path = _F + "ignored_modules"
    parts = value if isinstance(value, list) else str(value).split("|")
    if all(isinstance(part, str) and _GLOB.fullmatch(part) for part in parts):
        globs = [part.replace("\\.", "\0").replace(".*", "*").replace("\0", ".") for part in parts]
        v.say("engine.ignored_modules", globs, path)
    else:
        v.say(
            None,
            None,
            path,
            rule=f"no glob patterns say {value!r}; give engine.ignored_modules by --set",
            status="impossible",
        )


def read_mixed_precision(v: Values, fsdp_version: int, path: str = "mixed_precision") -> None:
    """The regime, of `mixed_precision` and of the engine's way to follow it (0: autocast of DDP or one process)."""
    value = str(v.get(path)).lower()
    if v.has("fp16") and not v.has(path) and path == "mixed_precision":
        value, path = ("fp16" if v.get("fp16") else "no"), "fp16"
    elif v.has("fp16") and path == "mixed_precision":
        v.say(None, None, "fp16", rule=f"not read: mixed_precision, here {value}, wins", status="not-needed")
        if v.get("fp16") != (value == "fp16"):
            v.find("fp16", "warning", f"is not read: mixed_precision, here {value}, wins")
    if value == "no":
        _no_mixed_precision(v, path)
        return
    if value == "fp8":
        v.say(
            "precision.regime",
            "mixed-fp8",
            path,
            rule="samestep's float8 is torchao's, with its own scaling",
            status="lossy",
        )
        return
    low = "float16" if value == "fp16" else "bfloat16"
    v.say("precision.regime", "mixed", path, rule=f"{value} compute, fp32 masters")
    v.say("precision.low_dtype", low, path, rule=f"{value} compute, fp32 masters")
    if low == "float16":
        v.say("train.on_non_finite", "skip", path, rule="GradScaler skips a step that overflows")
    if fsdp_version:
        v.say("precision.overrides.reduce", low, path, rule="Accelerate has FSDP reduce gradients in the low dtype")
    if fsdp_version != 2:
        v.say(
            None,
            None,
            path,
            status="lossy",
            rule="autocast keeps some operations in fp32; samestep computes all of them in the low dtype",
        )
    if fsdp_version == 1:
        v.say(None, None, path, status="lossy", rule="FSDP1 casts buffers too; samestep leaves them as they are")


def _no_mixed_precision(v: Values, path: str) -> None:
    loaded = v.extra.get("model.load_dtype")
    low = loaded == "bfloat16"
    if loaded is None and "precision.regime" not in v.extra:
        what = "no: training is in the dtype that the script loads the model in. Taken as float32 (regime full); for a "
        what += "model loaded in bfloat16 give --set precision.regime=low"
        v.find(path, "warning", what)
    v.say(
        "precision.regime",
        "low" if low else "full",
        path,
        rule="no upcast: the dtype that the model is loaded in is the dtype of everything",
    )
