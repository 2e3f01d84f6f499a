"""Recipes as text: resolved, as a template for a new one, and as a JSON Schema for editors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from samestep.recipe.document import FieldPath
from samestep.recipe.fields import choices, documentation, field_at
from samestep.recipe.schema import Recipe, Section

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
# Texts that YAML 1.1 or 1.2 readers take for something else.
_RESERVED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}

# Where the comments of a new recipe begin.
_COLUMN = 44

# The fields of a new recipe, with whether they are commented out.
_TEMPLATE: tuple[tuple[str, bool], ...] = (
    ("name", False),
    ("model.path", False),
    ("model.load_dtype", False),
    ("model.attention", True),
    ("model.lora", True),
    ("data.path", False),
    ("data.format", False),
    ("data.columns", True),
    ("data.loss_on", False),
    ("data.max_tokens", False),
    ("data.packing", True),
    ("data.held_out", False),
    ("precision.regime", False),
    ("precision.low_dtype", False),
    ("precision.export_dtype", True),
    ("engine.name", False),
    ("engine.ranks", False),
    ("engine.offload", True),
    ("train.steps", False),
    ("train.micro_batch", False),
    ("train.accumulation", False),
    ("train.optimizer", False),
    ("train.schedule", False),
    ("train.max_grad_norm", False),
    ("train.seed", False),
    ("train.evaluate_every", True),
    ("train.activation_checkpointing", True),
)

_EXAMPLES: dict[str, Any] = {
    "model.lora": {"rank": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "data.columns": {"prompt": "question", "completion": "answer"},
    "engine.offload": "cpu",
    "train.evaluate_every": 50,
    "train.activation_checkpointing": True,
    "data.packing": True,
}

# Shorter than the documentation's first sentence, or more to the point in a new recipe.
_COMMENTS = {
    "name": "the run's folder is runs/NAME",
    "model.path": "a local folder or a hub id",
    "model.lora": "low-rank adapters; left out, the model itself trains",
    "data.path": "a file, a folder of files, or {hub: NAME, split: train}",
    "data.columns": "when the file names its columns otherwise",
    "data.held_out": "a share, a number of rows, or a path",
    "engine.offload": "none | cpu, or parts of their own on zero",
    "train.steps": "optimizer steps; or `epochs: 1.0` instead",
    "train.optimizer": "adamw | sgd",
    "train.schedule": "constant | linear | cosine",
    "train.max_grad_norm": "null means no clipping, on every engine",
    "train.evaluate_every": "in steps; needs data.held_out",
    "train.activation_checkpointing": "less memory, same numbers",
}


def resolved_text(recipe: Recipe) -> str:
    """The recipe as YAML, every default written out, every field documented; parsing it gives an equal recipe."""
    lines = ["# A resolved recipe: every default is written out. Running it again gives the same run.", ""]
    for name in type(recipe).model_fields:
        lines += _field_lines(recipe, (name,))
        if isinstance(getattr(recipe, name), Section):
            lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def template_text(
    *,
    name: str = "run",
    model: str = "HuggingFaceTB/SmolLM2-135M",
    data: str = "data.jsonl",
    format: str = "alpaca",
    engine: str = "fsdp",
    precision: str = "mixed",
    ranks: int = 2,
    steps: int = 100,
    lr: float = 1e-5,
) -> str:
    """A short commented recipe to start from: the fields that people change, some of them commented out."""
    given: dict[str, Any] = {
        "name": name,
        "model.path": model,
        "data.path": data,
        "data.format": format,
        "data.held_out": 0.05,
        "precision.regime": precision,
        "engine.name": engine,
        "engine.ranks": ranks,
        "train.steps": steps,
        "train.optimizer": {"name": "adamw", "lr": lr, "weight_decay": 0.0},
        "train.schedule": {"name": "linear", "warmup_steps": 0},
    }
    lines = [
        "# A samestep recipe: `samestep train` runs it. Relative paths are relative to this file's folder.",
        "# Fields that are left out keep their defaults; `samestep schema` documents all of them.",
    ]
    section = ""
    for field, commented in _TEMPLATE:
        path = tuple(field.split("."))
        if len(path) == 2 and path[0] != section:
            section = path[0]
            lines += ["", f"{section}:"]
        value = given.get(field, _EXAMPLES.get(field, field_at(path).default))
        indent = "  " * (len(path) - 1)
        setting = f"{indent}{'# ' if commented else ''}{path[-1]}: {flow(value)}"
        comment = f"# {_COMMENTS.get(field) or _summary(path)}"
        if len(setting) < _COLUMN and _COLUMN + len(comment) <= 120:
            lines.append(f"{setting:<{_COLUMN}}{comment}")
        else:
            lines += [f"{indent}{comment}", setting]
    return "\n".join(lines) + "\n"


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a recipe, for editors that complete and check YAML."""
    schema = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "samestep recipe"}


def flow(value: Any) -> str:
    """A value as YAML on one line, such that it reads back equal and of the same type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = repr(value)
        # YAML 1.1 readers take 1e-05 for a text, but not 1.0e-05.
        text = text if "." in text else text.replace("e", ".0e")
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Section):
        value = value.model_dump()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    raise TypeError(f"a recipe cannot hold {type(value).__name__}")


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(sign: str) -> str:
    if sign in '"\\':
        return f"\\{sign}"
    if sign == "\n":
        return "\\n"
    if sign.isprintable():
        return sign
    code = ord(sign)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _field_lines(section: Section, path: FieldPath) -> Iterator[str]:
    """The lines of one field of `section`: its documentation, its key and its value."""
    key = str(path[-1])
    value = getattr(section, key)
    indent = "  " * (len(path) - 1)
    for line in documentation(path).splitlines():
        yield f"{indent}# {line}".rstrip()
    if isinstance(value, Section):
        yield f"{indent}{key}:"
        for name in type(value).model_fields:
            yield from _field_lines(value, (*path, name))
    elif isinstance(value, dict) and value:
        yield f"{indent}{key}:"
        yield from _block(value, indent + "  ")
    else:
        yield f"{indent}{key}: {flow(value)}"


def _block(mapping: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{_text(key)}:"
            yield from _block(value, indent + "  ")
        else:
            yield f"{indent}{_text(key)}: {flow(value)}"


def _summary(path: FieldPath) -> str:
    """The choices of a field when it has some, else the first sentence of its documentation."""
    names = choices(field_at(path).annotation)
    if names:
        return " | ".join(names)
    return re.split(r"(?<=[a-z\])])\.(?:\s|$)|;", documentation(path).replace("\n", " "))[0].rstrip(".")
