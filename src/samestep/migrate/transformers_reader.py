"""Reads TrainingArguments and the fsdp_config of the Trainer, with the DeepSpeed configuration that they name."""

from __future__ import annotations

from typing import Any

from samestep.migrate.accelerate_meaning import read_fsdp, read_mixed_precision
from samestep.migrate.accelerate_reader import DeepSpeedPart, json_of
from samestep.migrate.accelerate_table import ACCELERATE
from samestep.migrate.deepspeed_meaning import read_deepspeed
from samestep.migrate.deepspeed_table import DEEPSPEED
from samestep.migrate.reading import Part, Reading, look_up, read_with
from samestep.migrate.rows import Finding, Meaning, Setting
from samestep.migrate.source import Source, flatten
from samestep.migrate.transformers_meaning import read_arguments
from samestep.migrate.transformers_table import TRANSFORMERS
from samestep.migrate.values import Values, readable

_F = "fsdp_config.fsdp_"
# The Trainer's name of a field of FSDP, where it is another one than Accelerate's.
_FSDP_NAMES = {"cpu_offload": "offload_params"}
# Fields of DeepSpeed that the Trainer fills in or compares: each must be equal to its argument.
_MATCHED = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", "train.micro_batch"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "train.accumulation"),
    "gradient_clipping": ("max_grad_norm", "train.max_grad_norm"),
    "optimizer.params.lr": ("learning_rate", "train.optimizer.lr"),
    "optimizer.params.eps": ("adam_epsilon", "train.optimizer.eps"),
    "optimizer.params.weight_decay": ("weight_decay", "train.optimizer.weight_decay"),
    "scheduler.params.warmup_max_lr": ("learning_rate", "train.optimizer.lr"),
    "scheduler.params.warmup_num_steps": ("warmup_steps", "train.schedule.warmup_steps"),
    "scheduler.params.total_num_steps": ("max_steps", "train.steps"),
    "bf16.enabled": ("bf16", "precision.regime"),
    "fp16.enabled": ("fp16", "precision.regime"),
}


def read_transformers_file(source: Source, given: dict[str, Any]) -> Reading:
    """TrainingArguments, as a JSON or YAML of them."""
    leaves: dict[str, Any] = {}
    values = Values(TRANSFORMERS, {}, extra=given)
    sections = {
        "deepspeed": _section(source, values, "deepspeed"),
        "fsdp_config": _section(source, values, "fsdp_config"),
    }
    own = dict(flatten({key: value for key, value in source.data.items() if not isinstance(sections.get(key), dict)}))
    values.given = own
    leaves |= own
    parts = [Part(table=TRANSFORMERS, leaves=own, unknown_is="refuses it")]
    deepspeed = None
    if isinstance(sections["deepspeed"], dict):
        config = dict(flatten(sections["deepspeed"]))
        prefix = "deepspeed." if isinstance(source.data.get("deepspeed"), dict) else "deepspeed:"
        names = {path: f"{prefix}{path}" for path in config}
        deepspeed = DeepSpeedPart(config, names)
        parts.append(Part(table=DEEPSPEED, leaves=config, names=names))
        leaves |= {names[path]: value for path, value in config.items()}
    fsdp = _fsdp_values(source, sections["fsdp_config"], given)
    if fsdp.names:
        parts.append(_fsdp_part(fsdp))
        leaves |= {name: fsdp.given[path] for path, name in fsdp.names.items()}
    rows, findings, unknown = look_up(source, parts)
    if not any(found.severity == "error" for found in [*findings, *values.findings]):
        read_arguments(values)
        _read_engine(values, fsdp, deepspeed)
    meaning = Meaning(settings=tuple(_last_word(values.settings)))
    return read_with("transformers", leaves, (rows, findings, unknown), values, meaning)


def read_fsdp_config_file(source: Source, given: dict[str, Any]) -> Reading:
    """The JSON that TrainingArguments' fsdp_config names, by itself."""
    fsdp = _fsdp_values(source, source.data, given, prefix="")
    fsdp.given = {"distributed_type": "FSDP", **fsdp.given}
    leaves = {name: fsdp.given[path] for path, name in fsdp.names.items()}
    rows, findings, unknown = look_up(source, [_fsdp_part(fsdp)])
    if not any(found.severity == "error" for found in findings):
        read_fsdp(fsdp)
    meaning = Meaning(settings=tuple(fsdp.settings))
    return read_with("fsdp-config", leaves, (rows, findings, unknown), fsdp, meaning)


def _fsdp_part(fsdp: Values) -> Part:
    return Part(
        table=ACCELERATE,
        leaves={path: fsdp.given[path] for path in fsdp.names},
        names=fsdp.names,
        texts_are_numbers=True,
    )


def _section(source: Source, values: Values, key: str) -> Any:
    """The mapping at `key`, also where it is the name of a file; None when there is none."""
    value = source.data.get(key)
    if value in (None, "", {}) or isinstance(value, bool):
        return None
    try:
        return json_of(value, source.path.parent)
    except ValueError as error:
        values.findings.append(Finding(key, "error", str(error), source.lines.get(key)))
        return None


def _fsdp_values(source: Source, section: Any, given: dict[str, Any], prefix: str = "fsdp_config.") -> Values:
    """The Trainer's fields of FSDP under Accelerate's names, with the Trainer's own defaults."""
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in (section or {}).items():
        bare = key.removeprefix("fsdp_")
        path = _F + _FSDP_NAMES.get(bare, bare)
        fields[path], names[path] = value, f"{prefix}{key}"
    legacy = source.data.get("fsdp")
    words = legacy.split() if isinstance(legacy, str) else legacy if isinstance(legacy, list) else []
    for word in words:
        if word == "offload":
            fields.setdefault(_F + "offload_params", True)
        elif word in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"):
            first = str(fields.get(_F + "version", 2)) == "1"
            if first:
                fields.setdefault(_F + "sharding_strategy", word.upper())
            else:
                fields.setdefault(_F + "reshard_after_forward", word != "shard_grad_op")
    fields.setdefault(_F + "version", 2)
    fields.setdefault(_F + "auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    return Values(ACCELERATE, fields, names=names, extra=given)


def _read_engine(v: Values, fsdp: Values, deepspeed: DeepSpeedPart | None) -> None:
    if deepspeed is not None:
        if v.given.get("fsdp"):
            v.find("fsdp", "error", "fsdp and deepspeed are both given; the Trainer refuses that")
        filled = _fill(v, deepspeed)
        if filled.get("train_batch_size") == "auto":
            del filled["train_batch_size"]
            rule = "auto: micro-batch x accumulation x ranks"
            v.settings.append(Setting(None, None, (deepspeed.names["train_batch_size"],), rule, "not-needed"))
        inside = Values(DEEPSPEED, filled, names=deepspeed.names, extra=v.extra)
        read_deepspeed(inside)
        if "scheduler.type" not in filled:
            # The Trainer makes a scheduler of its own then, of its own arguments.
            inside.settings = [setting for setting in inside.settings if setting.path != "train.schedule.name"]
        v.settings += inside.settings
        v.findings += inside.findings
        v.asked += inside.asked
        for path in ("bf16", "fp16"):
            if v.has(path):
                v.say(None, None, path, rule="DeepSpeed's own block says the same")
        return
    path = "fp16" if v.get("fp16") else "bf16"
    if v.given.get("fsdp"):
        fsdp.names = {"distributed_type": "fsdp", **fsdp.names}
        fsdp.given = {"distributed_type": "FSDP", **fsdp.given}
        read_fsdp(fsdp)
        v.settings += fsdp.settings
        v.findings += fsdp.findings
        v.asked += fsdp.asked
        version = fsdp.get(_F + "version")
    else:
        for name in fsdp.names.values():
            v.settings.append(Setting(None, None, (name,), "not read: fsdp is not set", "not-needed"))
        v.say(
            "engine.name",
            "single" if v.extra.get("engine.ranks") == 1 else "ddp",
            "fsdp",
            rule="neither fsdp nor deepspeed: DDP on several ranks",
        )
        version = 0
    _mixed_precision(v, path, version)


def _mixed_precision(v: Values, path: str, version: int) -> None:
    """bf16 and fp16 as Accelerate's mixed_precision, which the Trainer hands them to."""
    words = {"mixed_precision": path if v.get(path) else "no"}
    if v.get("bf16") and v.get("fp16"):
        v.find("fp16", "error", "bf16 and fp16 are both true; the Trainer refuses that")
    inside = Values(ACCELERATE, words, names={"mixed_precision": path}, extra=v.extra)
    read_mixed_precision(inside, version)
    v.settings += inside.settings
    v.findings += inside.findings


def _fill(v: Values, part: DeepSpeedPart) -> dict[str, Any]:
    """DeepSpeed's fields with `auto` filled as the Trainer does; one that differs from its argument is a fault."""
    filled = dict(part.given)
    arguments = {path: (v.get(name), name, target) for path, (name, target) in _MATCHED.items()}
    betas = [v.get("adam_beta1"), v.get("adam_beta2")]
    arguments["optimizer.params.betas"] = (betas, "adam_beta1", "train.optimizer.betas")
    for path, value in part.given.items():
        row = DEEPSPEED.find(path)
        if path not in arguments or row is None:
            continue
        argument, name, target = arguments[path]
        unknown = path.startswith("scheduler.") and not (argument and argument >= 1)
        if value == "auto":
            if not unknown:
                filled[path] = argument
        elif readable(row, value) != argument and not unknown and target not in v.extra:
            origin = "" if name in v.given else ", by default"
            what = f"is {value!r}, but {name} is {argument!r}{origin}; the Trainer refuses that"
            what += f": --set {target}=... decides"
            v.findings.append(Finding(part.names[path], "error", what))
    return filled


def _last_word(settings: list[Setting]) -> list[Setting]:
    """`settings` without what a later one says again, but for the fields that say it."""
    merged: dict[str, Setting] = {}
    rest = []
    for setting in settings:
        if setting.path is None:
            rest.append(setting)
            continue
        before = merged.get(setting.path)
        sources = tuple(dict.fromkeys([*(before.sources if before else ()), *setting.sources]))
        merged[setting.path] = Setting(
            setting.path, setting.value, sources, setting.rule, setting.status, setting.default
        )
    return [*merged.values(), *rest]
