"""A reader for every kind of configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samestep.errors import RecipeError
from samestep.migrate.accelerate_reader import read_accelerate_file
from samestep.migrate.deepspeed_meaning import read_deepspeed
from samestep.migrate.deepspeed_table import DEEPSPEED
from samestep.migrate.reading import Part, Reading, look_up, read_with
from samestep.migrate.rows import Meaning
from samestep.migrate.samestep_table import read_samestep, samestep_table
from samestep.migrate.source import MigrationError, Source, recipe_leaves
from samestep.migrate.torchtitan_meaning import read_torchtitan_file
from samestep.migrate.transformers_reader import read_fsdp_config_file, read_transformers_file
from samestep.migrate.values import Values, readable
from samestep.recipe import parse

Given = dict[str, Any]


def read_as(kind: str, source: Source, given: Given) -> Reading:
    """`source` read as `kind`. `given`: fields of the recipe that the user sets beside it."""
    return _READERS[kind](source, given)


def _deepspeed(source: Source, given: Given) -> Reading:
    leaves = source.leaves()
    under, names = {}, {}
    for path, value in leaves.items():
        # The name that bf16 had once; DeepSpeed still reads it.
        name = path.replace("bfloat16.", "bf16.", 1) if path.startswith("bfloat16.") else path
        under[name], names[name] = value, path
    values = Values(DEEPSPEED, under, names=names, extra=given)
    rows, findings, unknown = look_up(source, [Part(table=DEEPSPEED, leaves=under, names=names)])
    findings += _autos(values)
    if not any(found.severity == "error" for found in findings):
        read_deepspeed(values)
    known = {path: row for path in under if (row := DEEPSPEED.find(path)) is not None}
    carried = {"deepspeed": {path: readable(row, under[path]) for path, row in known.items()}}
    origins = {"deepspeed": {path: names[path] for path in known}}
    meaning = Meaning(settings=tuple(values.settings), carried=carried, origins=origins, whole="deepspeed")
    return read_with("deepspeed", leaves, (rows, findings, unknown), values, meaning)


def _autos(values: Values) -> list[Any]:
    for path in values.given:
        if values.is_auto(path):
            values.find(
                path, "warning", "is auto: DeepSpeed itself does not fill it, only Accelerate or the Trainer do"
            )
    found, values.findings = values.findings, []
    return found


def _samestep(source: Source, given: Given) -> Reading:
    text = source.path.read_text(encoding="utf-8-sig")
    try:
        recipe = parse(text, source=str(source.path))
    except RecipeError as error:
        raise MigrationError(*error.args, details=str(error).splitlines()) from None
    leaves = recipe_leaves(source.data)
    table = samestep_table()
    values = Values(table, leaves, extra=given)
    read_samestep(values, recipe_leaves(recipe.model_dump()))
    rows, findings, unknown = look_up(source, [Part(table=table, leaves=leaves)])
    meaning = Meaning(settings=tuple(values.settings))
    return Reading(kind="samestep", leaves=leaves, rows=rows, meaning=meaning, findings=findings, unknown=unknown)


_READERS: dict[str, Callable[[Source, Given], Reading]] = {
    "deepspeed": _deepspeed,
    "accelerate": read_accelerate_file,
    "transformers": read_transformers_file,
    "fsdp-config": read_fsdp_config_file,
    "torchtitan": read_torchtitan_file,
    "samestep": _samestep,
}
