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
from samestep.migrate.transformers_table import TRAINER_FSDP, TRAINER_NAMES, TRANSFORMERS
from samestep.migrate.values import Values, readable

_F = "fsdp_config.fsdp_"
_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
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
# What the Trainer fills an `auto` with that is no argument of its own.
_FIXED = {
    "train_batch_size": "auto: micro-batch x accumulation x ranks",
    "scheduler.params.warmup_min_lr": "auto: the Trainer fills in 0, as DeepSpeed does without",
}


def read_transformers_file(source: Source, given: dict[str, Any]) -> Reading:
    """TrainingArguments, as a JSON or YAML of them."""
    leaves: dict[str, Any] = {}
    values = Values(TRANSFORMERS, {}, extra=given)
    sections = {
        "deepspeed": _section(source, values, "deepspeed"),
        "fsdp_config": _section(source, values, "fsdp_config"),
    }
    inline = {key for key in sections if isinstance(sections[key], dict) and isinstance(source.data[key], dict)}
    own = dict(flatten({key: value for key, value in source.data.items() if key not in inline}))
    values.given = own
    for key in sections:
        if isinstance(sections[key], dict) and key not in inline:
            values.say(None, None, key)
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
    section = sections["fsdp_config"] or {}
    parts.append(_fsdp_part(section, "fsdp_config."))
    leaves |= {f"fsdp_config.{key}": value for key, value in section.items()}
    fsdp = _fsdp_values(source, section, given, "fsdp_config.")
    values.findings += fsdp.findings
    fsdp.findings = []
    rows, findings, unknown = look_up(source, parts)
    if not any(found.severity == "error" for found in [*findings, *values.findings]):
        read_arguments(values)
        _read_engine(values, fsdp, deepspeed)
    meaning = Meaning(settings=tuple(_last_word(values.settings)))
    return read_with("transformers", leaves, (rows, findings, unknown), values, meaning)


def read_fsdp_config_file(source: Source, given: dict[str, Any]) -> Reading:
    """The JSON that TrainingArguments' fsdp_config names, by itself."""
    fsdp = _fsdp_values(source, source.data, given, "")
    fsdp.given = {"distributed_type": "FSDP", **fsdp.given}
    rows, findings, unknown = look_up(source, [_fsdp_part(source.data, "")])
    if not any(found.severity == "error" for found in [*findings, *fsdp.findings]):
        read_fsdp(fsdp)
    meaning = Meaning(settings=tuple(fsdp.settings))
    return read_with("fsdp-config", dict(source.data), (rows, findings, unknown), fsdp, meaning)


def _fsdp_part(section: dict[str, Any], prefix: str) -> Part:
    bare = {key: f"fsdp_config.{key.removeprefix('fsdp_')}" for key in section}
    return Part(
        table=TRAINER_FSDP,
        leaves={path: section[key] for key, path in bare.items()},
        names={path: f"{prefix}{key}" for key, path in bare.items()},
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


def _fsdp_values(source: Source, section: dict[str, Any], given: dict[str, Any], prefix: str) -> Values:
    """The Trainer's fields of FSDP under Accelerate's names, with the Trainer's own defaults."""
    values = Values(ACCELERATE, {}, extra=given)
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    keys: dict[str, str] = {}
    for key, value in section.items():
        bare = key.removeprefix("fsdp_")
        if bare in keys:
            what = f"is given twice: {prefix}{keys[bare]} says the same"
            values.findings.append(Finding(f"{prefix}{key}", "error", what, source.lines.get(f"{prefix}{key}")))
        keys[bare] = key
        row = TRAINER_FSDP.find(f"fsdp_config.{bare}")
        if row is not None and not row.ignored:
            path = _F + TRAINER_NAMES.get(bare, bare)
            fields[path], names[path] = value, f"{prefix}{key}"
    values.given, values.names = fields, names
    first = str(fields.get(_F + "version", 2)) == "1"
    legacy = source.data.get("fsdp")
    for word in legacy.split() if isinstance(legacy, str) else legacy if isinstance(legacy, list) else []:
        _legacy_word(values, fields, names, word, first=first)
    fields.setdefault(_F + "version", 2)
    fields.setdefault(_F + "auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    return values


def _legacy_word(v: Values, fields: dict[str, Any], names: dict[str, str], word: Any, *, first: bool) -> None:
    """A word of `fsdp`, from before fsdp_config; what fsdp_config itself says wins."""
    if word not in (*_STRATEGIES, "offload", "auto_wrap"):
        v.find("fsdp", "error", f"has no option {word!r}; the Trainer refuses it")
    elif word in _STRATEGIES[2:] and not first:
        v.find("fsdp", "error", f"{word} is of FSDP1; the Trainer refuses it with FSDP2, its default")
    elif word in _STRATEGIES[1:] and first:
        what = f"{word} is not what runs: Accelerate does not read the Trainer's strategy for FSDP1 and uses FULL_SHARD"
        v.find("fsdp", "warning", what)
    said = {"offload": ("offload_params", True)}
    if not first:
        said |= {"full_shard": ("reshard_after_forward", True), "shard_grad_op": ("reshard_after_forward", False)}
    if word in said:
        name, value = said[word]
        if _F + name not in fields:
            fields[_F + name], names[_F + name] = value, "fsdp"


def _read_engine(v: Values, fsdp: Values, deepspeed: DeepSpeedPart | None) -> None:
    if deepspeed is not None:
        if v.given.get("fsdp"):
            v.find("fsdp", "error", "fsdp and deepspeed are both given; the Trainer refuses that")
        filled = _fill(v, deepspeed)
        for path, rule in _FIXED.items():
            if filled.get(path) == "auto":
                del filled[path]
                v.settings.append(Setting(None, None, (deepspeed.names[path],), rule, "not-needed"))
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
        _not_read(v, fsdp, "DeepSpeed runs")
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
        _not_read(v, fsdp, "fsdp is not set")
        v.say(
            "engine.name",
            "single" if v.extra.get("engine.ranks") == 1 else "ddp",
            "fsdp",
            rule="neither fsdp nor deepspeed: DDP on several ranks",
        )
        version = 0
    _mixed_precision(v, path, version)


def _not_read(v: Values, fsdp: Values, why: str) -> None:
    for name in fsdp.names.values():
        v.settings.append(Setting(None, None, (name,), f"not read: {why}", "not-needed"))


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
    arguments = _arguments(v)
    for path, value in part.given.items():
        row = DEEPSPEED.find(path)
        if path not in arguments or row is None:
            continue
        argument, name, target = arguments[path]
        if value == "auto":
            if argument is not None:
                filled[path] = argument
        elif argument is not None and readable(row, value) != argument and target not in v.extra:
            origin = "" if name in v.given else ", by default"
            what = f"is {value!r}, but {name} is {argument!r}{origin}; the Trainer refuses that"
            what += f": --set {target}=... decides"
            v.findings.append(Finding(part.names[path], "error", what))
    if filled.get("train_batch_size", "auto") != "auto":
        # The Trainer has a number for each of the others; DeepSpeed alone would derive what is left out.
        for path in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            argument, name, target = arguments[path]
            if path not in part.given:
                filled[path], part.names[path] = v.extra.get(target, argument), name
    return filled


def _arguments(v: Values) -> dict[str, tuple[Any, str, str]]:
    """By field of DeepSpeed: the argument's value, None where it depends on the run; its name; the recipe's field."""
    found = {path: (v.get(name), name, target) for path, (name, target) in _MATCHED.items()}
    betas = [v.get("adam_beta1"), v.get("adam_beta2")]
    found["optimizer.params.betas"] = (betas, "adam_beta1", "train.optimizer.betas")
    for path in ("bf16", "fp16"):
        found[f"{path}.enabled"] = (bool(v.get(path) or v.get(f"{path}_full_eval")), path, "precision.regime")
    steps, name, target = found["scheduler.params.total_num_steps"]
    found["scheduler.params.total_num_steps"] = (steps if steps > 0 else None, name, target)
    warmup, name, target = found["scheduler.params.warmup_num_steps"]
    share = 0 < warmup < 1 or (not warmup and v.get("warmup_ratio"))
    found["scheduler.params.warmup_num_steps"] = (None if share else max(1, warmup), name, target)
    return found


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
