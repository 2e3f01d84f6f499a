"""From plain data to a Recipe, with every problem found at once and told in the words of the recipe."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from samestep.errors import RecipeError
from samestep.recipe.checks import findings
from samestep.recipe.document import Document, FieldPath, dotted
from samestep.recipe.fields import alternatives, bare, choices, expected, field_paths, item_type, sections_of
from samestep.recipe.schema import Recipe
from samestep.recipe.suggest import did_you_mean, nearest

# What other tools call our fields.
_OTHER_NAMES = {
    "batch_size": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "micro_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.accumulation",
    "gradient_accumulation": "train.accumulation",
    "learning_rate": "train.optimizer.lr",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule.name",
    "scheduler": "train.schedule",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "gradient_clipping": "train.max_grad_norm",
    "gradient_checkpointing": "train.activation_checkpointing",
    "mixed_precision": "precision.regime",
    "dtype": "model.load_dtype",
    "torch_dtype": "model.load_dtype",
    "attn_implementation": "model.attention",
    "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "world_size": "engine.ranks",
    "num_processes": "engine.ranks",
    "save_steps": "checkpoint.every",
    "eval_steps": "train.evaluate_every",
}

# Stand in for a faulty required value, so that the rest of the recipe can still be checked.
_STAND_INS: dict[FieldPath, Any] = {("model",): {}, ("data",): {"path": "-"}, ("data", "path"): "-", ("train",): {}}


def validate(document: Document) -> Recipe:
    """The recipe in `document`; RecipeError with all of its problems."""
    try:
        recipe: Recipe | None = Recipe.model_validate(document.data)
        faults: list[tuple[FieldPath, str]] = []
    except ValidationError as error:
        faults = list(dict(_faults(error, document.data)).items())
        recipe = _without_faults(document.data, [path for path, _ in faults])
    problems = list(document.problems)
    named = {problem.field for problem in problems}
    problems += [document.problem(path, what) for path, what in faults if dotted(path) not in named]
    if recipe is not None:
        broken = [dotted(path) for path, _ in faults]
        broken += [problem.field.removeprefix("--set ") for problem in document.problems]
        problems += [document.problem(tuple(name.split(".")), what) for name, what in findings(recipe, broken)]
    if problems or recipe is None:
        problems.sort(key=lambda problem: (problem.line is None, problem.line or 0))
        raise RecipeError(document.source, problems)
    return recipe


def _faults(error: ValidationError, data: dict[str, Any]) -> Iterator[tuple[FieldPath, str]]:
    for detail in error.errors(include_url=False):
        path, annotation, beside = _locate(detail["loc"], data)
        if beside:
            continue
        value = _value_at(data, path)
        if detail["type"] == "extra_forbidden":
            yield path, _unknown(path, annotation)
        elif detail["type"] == "missing":
            yield path, "is missing; every recipe needs it" if len(path) == 1 else f"is missing: {expected(annotation)}"
        else:
            yield path, _wrong_value(annotation, value)


def _locate(location: tuple[str | int, ...], data: Any) -> tuple[FieldPath, Any, bool]:
    """Path and type of the value at pydantic's location, whose steps also name the alternatives of a union.

    The last value is true for an alternative that was not meant: mappings are meant as sections.
    """
    path: FieldPath = ()
    annotation: Any = Recipe
    value = data
    for step in location:
        tagged = sum(part is not type(None) for part in alternatives(annotation)) > 1
        if tagged and not isinstance(value, dict):
            break
        if tagged and step in [section.__name__ for section in sections_of(annotation)]:
            annotation = next(part for part in sections_of(annotation) if part.__name__ == step)
            continue
        if tagged:
            return path, annotation, bool(sections_of(annotation))
        if step == "[key]":
            break
        inner = item_type(annotation, step)
        path = (*path, step)
        # For an unknown key the type stays that of the section around it.
        annotation = inner if inner is not None else annotation
        value = _value_at(data, path)
    return path, annotation, False


def _value_at(data: Any, path: FieldPath) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _unknown(path: FieldPath, section: Any) -> str:
    name = str(path[-1])
    siblings = [sibling for part in sections_of(section) for sibling in part.model_fields]
    meant = nearest(name, siblings)
    if meant:
        return f"unknown key - did you mean {dotted((*path[:-1], meant))}?"
    if name in _OTHER_NAMES:
        return f"unknown key - did you mean {_OTHER_NAMES[name]}?"
    places = {place for place, _ in field_paths()}
    elsewhere = nearest(name, {str(place[-1]) for place in places}, cutoff=0.75)
    candidates = sorted(dotted(place) for place in places if place[-1] == elsewhere)
    # A name that many sections have says nothing about which one was meant.
    if 1 <= len(candidates) <= 2:
        return f"unknown key - did you mean {' or '.join(candidates)}?"
    return f"unknown key; known here: {', '.join(siblings)}"


def _wrong_value(annotation: Any, value: Any) -> str:
    names = choices(annotation)
    kinds = [bare(part) for part in alternatives(annotation)]
    got = f"got {_shown(value)}"
    hint = _hint(value, kinds, names)
    if names and isinstance(value, str):
        return f"must be one of {', '.join(names)}, {got}{hint or did_you_mean(value, names)}"
    return f"expected {expected(annotation)}, {got}{hint}"


def _hint(value: Any, kinds: list[Any], names: list[str]) -> str:
    if value is None:
        return "; give a value, or remove the key to use the default"
    if isinstance(value, float) and int in kinds and value.is_integer():
        return f": write {value:.0f}"
    if not isinstance(value, str):
        return ""
    word = value.strip().lower()
    if (int in kinds or float in kinds) and _is_number(word):
        return f": write {value.strip()} without quotes"
    if bool in kinds and word in ("yes", "on", "true", "no", "off", "false"):
        return f": write {'true' if word in ('yes', 'on', 'true') else 'false'}, without quotes"
    if type(None) in kinds and word in ("none", "null", "~", "") and word not in names:
        return ": write null, without quotes"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "keys and values"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]}...'"


def _without_faults(data: dict[str, Any], faults: list[FieldPath]) -> Recipe | None:
    """The recipe with faulty values at their defaults; None when that is no recipe either."""
    rest = copy.deepcopy(data)
    for path in faults:
        names = path[: next((index for index, part in enumerate(path) if isinstance(part, int)), len(path))]
        section = _value_at(rest, names[:-1])
        if isinstance(section, dict):
            section.pop(str(names[-1]), None)
    if any(path[:2] == ("data", "path") for path in faults):
        rest["data"]["path"] = _STAND_INS[("data", "path")]
    for name in ("model", "data", "train"):
        if (name,) in faults:
            rest[name] = _STAND_INS[(name,)]
    try:
        return Recipe.model_validate(rest)
    except ValidationError:
        return None
