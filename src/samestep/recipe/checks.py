"""Checks over several fields of a recipe, all of them before anything runs.

A check reads a recipe and yields (field, what is wrong) for each fault. Its table entry names the fields that it
reads: a check is left out when one of them is faulty itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from string import Formatter
from typing import Any, NamedTuple

from samestep.recipe.schema import Engine, HubData, OffloadParts, Recipe, Section
from samestep.recipe.suggest import did_you_mean

Finding = tuple[str, str]

ZERO = ("zero1", "zero2", "zero3")

# Settings that only some engines have; any other engine refuses a value that is not the default.
_ENGINE_SETTINGS: dict[str, tuple[str, ...]] = {
    "shard_ranks": ("hsdp",),
    "ignored_modules": ("single", "ddp", "fsdp", "hsdp"),
    "reshard_after_forward": ("fsdp", "hsdp"),
    "forward_prefetch": ("fsdp", "hsdp"),
    "backward_prefetch": ("fsdp", "hsdp"),
    "bucket_elements": ZERO,
    "prefetch_elements": ("zero3",),
    "live_elements": ("zero3",),
    "persistent_elements": ("zero3",),
}

_FORMAT_COLUMNS = {
    "alpaca": ("instruction", "input", "output"),
    "prompt_completion": ("prompt", "completion"),
    "messages": ("messages",),
    "text": ("text",),
}


class Check(NamedTuple):
    """A check with the fields, or whole sections, that it reads."""

    reads: tuple[str, ...]
    find: Callable[[Recipe], Iterator[Finding]]


def findings(recipe: Recipe, broken: Sequence[str] = ()) -> list[Finding]:
    """All faults of `recipe`, without the checks that read one of the `broken` fields."""
    return [
        finding
        for check in CHECKS
        if not any(_overlap(name, field) for name in check.reads for field in broken)
        for finding in check.find(recipe)
    ]


def template_fields(template: str) -> list[str]:
    """The column names in a template's {braces}; ValueError, with a reason, when the template is not sound."""
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}; write {{{{ or }}}} for a brace that is part of the text") from None
    names = []
    for _, name, spec, conversion in pieces:
        if name is None:
            continue
        if not name.strip() or spec or conversion or any(sign in name for sign in ".[]{}"):
            raise ValueError(f"{{{name}}} is not a column; write {{column}} and nothing else inside the braces")
        names.append(name)
    if not names:
        raise ValueError("names no column; write columns in braces, such as {instruction}")
    return names


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith((f"{other}.", f"{other}[")) or other.startswith((f"{one}.", f"{one}["))


def _one_model_source(recipe: Recipe) -> Iterator[Finding]:
    model = recipe.model
    if model.path is None and model.config is None:
        yield "model", "needs a path (a folder or a hub id) or a config (a freshly initialised model)"
    elif model.path is not None and model.config is not None:
        yield "model.config", "path and config are both given; keep one of them"
    elif model.config is not None:
        if not isinstance(model.config.get("model_type"), str):
            yield "model.config", "needs a model_type, such as model_type: llama"
        if model.tokenizer is None:
            yield "model.tokenizer", "is missing: a fresh model has no tokenizer of its own; give a folder or a hub id"


def _adapters(recipe: Recipe) -> Iterator[Finding]:
    model = recipe.model
    if model.lora is not None and model.config is not None and recipe.train.export:
        yield "model.lora", "an export holds the adapters only, and a fresh base is stored nowhere; give model.path"


def _no_empty_texts(recipe: Recipe) -> Iterator[Finding]:
    data = recipe.data
    texts = {
        "model.path": recipe.model.path,
        "model.tokenizer": recipe.model.tokenizer,
        "data.path.hub" if isinstance(data.path, HubData) else "data.path": (
            data.path.hub if isinstance(data.path, HubData) else data.path
        ),
        "data.held_out": data.held_out,
    }
    for name, text in texts.items():
        if isinstance(text, str) and not text.strip():
            yield name, "is an empty text"


def _template(recipe: Recipe) -> Iterator[Finding]:
    data = recipe.data
    if data.template is None:
        if data.response_marker is not None:
            yield "data.response_marker", "needs data.template; a format knows by itself where the response begins"
        return
    try:
        template_fields(data.template)
    except ValueError as error:
        yield "data.template", str(error)
        return
    if data.format == "messages":
        yield "data.template", "cannot be used with format: messages; remove one of them"
    if data.response_marker is None:
        if data.loss_on == "completion":
            yield (
                "data.response_marker",
                "is missing: the template does not say where the response begins; give it, or set data.loss_on: all",
            )
    elif not data.response_marker:
        yield "data.response_marker", "is an empty text"
    elif not any(data.response_marker in literal for literal in _literals(data.template)):
        yield "data.response_marker", f"{data.response_marker!r} does not occur in data.template"


def _literals(template: str) -> list[str]:
    """The texts between a template's columns, with {{ and }} as the single braces that they stand for."""
    literals = [""]
    for literal, name, _, _ in Formatter().parse(template):
        literals[-1] += literal
        if name is not None:
            literals.append("")
    return literals


def _columns(recipe: Recipe) -> Iterator[Finding]:
    data = recipe.data
    if data.template is None:
        known, owner = list(_FORMAT_COLUMNS[data.format]), f"format {data.format}"
    else:
        try:
            known, owner = template_fields(data.template), "the template"
        except ValueError:
            return
    for name in data.columns:
        if name not in known:
            what = f"{owner} has no column {name!r}, only {', '.join(known)}{did_you_mean(name, known)}"
            yield f"data.columns.{name}", what


def _room(recipe: Recipe) -> Iterator[Finding]:
    if recipe.data.max_tokens < 2:
        kind = "packed row" if recipe.data.packing else "row"
        yield "data.max_tokens", f"a {kind} of one token has nothing to predict; use at least 2"


def _held_out(recipe: Recipe) -> Iterator[Finding]:
    held_out, rows = recipe.data.held_out, recipe.data.rows
    if isinstance(held_out, int) and rows is not None and held_out >= rows:
        yield "data.held_out", f"{held_out} held-out rows leave nothing to train on: data.rows is {rows}"
    if held_out == 0 and recipe.train.evaluate_every is not None:
        yield "train.evaluate_every", "there are no held-out rows to evaluate; set data.held_out, such as 0.05"


def _low_float16(recipe: Recipe) -> Iterator[Finding]:
    regime = recipe.precision.regime
    if recipe.precision.low_dtype == "float16" and regime.startswith("low"):
        yield "precision.low_dtype", f"float16 needs fp32 masters: use regime: mixed, or bfloat16 with regime: {regime}"
    elif recipe.precision.low_dtype == "float16" and regime == "mixed-stochastic":
        yield "precision.low_dtype", "mixed-stochastic rounds to bfloat16: use bfloat16, or regime: mixed"
    elif recipe.precision.low_dtype == "float16" and regime == "mixed-fp8":
        yield "precision.low_dtype", "mixed-fp8 computes in bfloat16 around its float8 matmuls: use bfloat16"


def _reduce_override(recipe: Recipe) -> Iterator[Finding]:
    wanted = recipe.precision.overrides.reduce
    if wanted is not None and recipe.engine.reduce_every == "step" and recipe.train.accumulation > 1:
        yield (
            "precision.overrides.reduce",
            "engines add up micro-batches in unlike dtypes before they reduce once per step; "
            "use engine.reduce_every: micro_batch, or leave it out",
        )


def _update_rounding(recipe: Recipe) -> Iterator[Finding]:
    regime = recipe.precision.regime
    if regime in ("low-stochastic", "low-kahan") and recipe.train.optimizer.name != "adamw":
        yield "precision.regime", f"{regime} is an AdamW; use train.optimizer.name: adamw"


def _loss_scale(recipe: Recipe) -> Iterator[Finding]:
    scale = recipe.precision.loss_scale
    if scale.minimum > scale.initial:
        yield "precision.loss_scale.minimum", f"{scale.minimum:g} is above the initial scale, {scale.initial:g}"


def _shard_ranks(recipe: Recipe) -> Iterator[Finding]:
    engine = recipe.engine
    if engine.name != "hsdp":
        return
    if engine.ranks < 2:
        yield "engine.ranks", f"hsdp needs at least 2 ranks, got {engine.ranks}; use fsdp for one"
        return
    shard_ranks = engine.sharing_ranks
    if engine.ranks % shard_ranks:
        given = f"{shard_ranks}" if engine.shard_ranks else f"half of the ranks, {shard_ranks},"
        divisors = [str(number) for number in range(1, engine.ranks + 1) if engine.ranks % number == 0]
        yield "engine.shard_ranks", f"{given} does not divide {engine.ranks} ranks; give one of {', '.join(divisors)}"


def _engine_settings(recipe: Recipe) -> Iterator[Finding]:
    engine = recipe.engine
    for name, capable in _ENGINE_SETTINGS.items():
        if engine.name not in capable and _is_set(engine, name):
            yield f"engine.{name}", f"{engine.name} does not have this setting, only {_listed(capable)}; remove it"


def _offload(recipe: Recipe) -> Iterator[Finding]:
    engine = recipe.engine
    if not isinstance(engine.offload, OffloadParts):
        if engine.offload == "cpu" and engine.name == "single":
            yield "engine.offload", "single cannot offload, only ddp, fsdp, hsdp, zero1, zero2 and zero3; use none"
        return
    if engine.name not in ZERO:
        what = f"{engine.name} offloads everything or nothing (cpu or none); parts are for {_listed(ZERO)}"
        yield "engine.offload", what
        return
    yield from _offload_parts(engine, engine.offload)


def _offload_parts(engine: Engine, parts: OffloadParts) -> Iterator[Finding]:
    if engine.name != "zero3":
        if parts.parameters != "none":
            yield "engine.offload.parameters", f"{engine.name} cannot offload parameters, only zero3; use none"
        if parts.optimizer == "nvme":
            yield "engine.offload.optimizer", f"{engine.name} cannot offload to nvme, only zero3; use cpu"
    uses_nvme = "nvme" in (parts.parameters, parts.optimizer)
    if uses_nvme and not parts.nvme_path:
        yield "engine.offload.nvme_path", "is missing: nvme needs a folder on a local disk"
    if parts.nvme_path is not None and not uses_nvme:
        yield "engine.offload.nvme_path", "nothing is offloaded to nvme; remove it"


def _reduce_every(recipe: Recipe) -> Iterator[Finding]:
    engine = recipe.engine
    if engine.reduce_every == "step" and engine.name in ("zero2", "zero3") and recipe.train.accumulation > 1:
        yield (
            "engine.reduce_every",
            f"{engine.name} reduces gradients after every micro-batch; with accumulation "
            f"{recipe.train.accumulation}, set engine.reduce_every: micro_batch",
        )


def _unit_classes(recipe: Recipe) -> Iterator[Finding]:
    if recipe.engine.unit_classes == []:
        yield "engine.unit_classes", "is an empty list; name classes, or use null for the model's own"


def _length(recipe: Recipe) -> Iterator[Finding]:
    steps, epochs = recipe.train.steps, recipe.train.epochs
    if steps is None and epochs is None:
        yield "train.steps", "is missing: give train.steps or train.epochs"
    elif steps is not None and epochs is not None:
        yield "train.epochs", "steps and epochs are both given; keep one of them and set the other to null"


def _warmup(recipe: Recipe) -> Iterator[Finding]:
    steps, warmup = recipe.train.steps, recipe.train.schedule.warmup_steps
    if steps is not None and warmup > steps:
        yield "train.schedule.warmup_steps", f"{warmup} warm-up steps do not fit into train.steps: {steps}"


def _optimizer_settings(recipe: Recipe) -> Iterator[Finding]:
    optimizer = recipe.train.optimizer
    for name, owner in (("betas", "adamw"), ("eps", "adamw"), ("momentum", "sgd")):
        if optimizer.name != owner and _is_set(optimizer, name):
            yield f"train.optimizer.{name}", f"{optimizer.name} does not use this, only {owner}; remove it"


def _schedule_settings(recipe: Recipe) -> Iterator[Finding]:
    schedule = recipe.train.schedule
    if schedule.name == "constant" and _is_set(schedule, "final_factor"):
        yield "train.schedule.final_factor", "constant does not use this, only linear and cosine; remove it"


def _is_set(section: Section, name: str) -> bool:
    default: Any = type(section).model_fields[name].default
    return getattr(section, name) != default


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


CHECKS = (
    Check(("model.path", "model.config", "model.tokenizer"), _one_model_source),
    Check(("model.config", "model.lora", "train.export"), _adapters),
    Check(("model.path", "model.tokenizer", "data.path", "data.held_out"), _no_empty_texts),
    Check(("data.template", "data.response_marker", "data.format", "data.loss_on"), _template),
    Check(("data.columns", "data.format", "data.template"), _columns),
    Check(("data.max_tokens",), _room),
    Check(("data.held_out", "data.rows", "train.evaluate_every"), _held_out),
    Check(("precision.regime", "precision.low_dtype"), _low_float16),
    Check(("precision.overrides", "engine.reduce_every", "train.accumulation"), _reduce_override),
    Check(("precision.regime", "train.optimizer"), _update_rounding),
    Check(("precision.loss_scale",), _loss_scale),
    Check(("engine.name", "engine.ranks", "engine.shard_ranks"), _shard_ranks),
    Check(("engine.name", *(f"engine.{name}" for name in _ENGINE_SETTINGS)), _engine_settings),
    Check(("engine.name", "engine.offload"), _offload),
    Check(("engine.name", "engine.reduce_every", "train.accumulation"), _reduce_every),
    Check(("engine.unit_classes",), _unit_classes),
    Check(("train.steps", "train.epochs"), _length),
    Check(("train.steps", "train.schedule.warmup_steps"), _warmup),
    Check(("train.optimizer",), _optimizer_settings),
    Check(("train.schedule",), _schedule_settings),
)
