"""Runs both sides of a migration, each on two CPU ranks, and compares what they did."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from samestep.crosscheck.configs import kind_of, launcher, runnable, sets_rates
from samestep.crosscheck.launch import run_side
from samestep.crosscheck.side import LAYER, MODEL, RANKS, STEPS, Observed, Tool
from samestep.migrate import Migration, MigrationError, Source, migrate, tables
from samestep.migrate.accelerate_table import current_name
from samestep.migrate.reading import Reading
from samestep.migrate.source import flatten, nest
from samestep.recipe import parse
from samestep.recipe.document import parse_text
from samestep.recipe.schema import Data, Model, OffloadParts, Recipe

Side = tuple[Tool, dict[str, Any]]
Runner = Callable[[Tool, Recipe, dict[str, Any], list[float] | None], Observed]
"""Runs one side; its script sets the learning rates of the list, or else the recipe's."""
Verdict = Literal["equal", "reported", "different", "unseen"]
# What a script would say where the configuration does not; the same on both sides.
_SCRIPT: dict[str, Any] = {
    "model.path": "-",
    "data.path": "-",
    "engine.ranks": RANKS,
    "engine.name": "zero1",
    "precision.regime": "full",
    "train.steps": STEPS,
    "train.micro_batch": 2,
    "train.accumulation": 1,
    "train.optimizer.lr": 1e-2,
    "train.optimizer.weight_decay": 0.0,
    "train.schedule.warmup_steps": 0,
}
_TOPICS = {
    "master": "precision",
    "moments": "precision",
    "compute": "precision",
    "reduce": "precision",
    "gradient": "precision",
    "optimizer": "optimizer",
    "clip": "clipping",
    "accumulation": "accumulation",
    "rates": "schedule",
    "updates": "precision",
    "losses": "",
}
_GROUPS = ("dp_replicate_size", "tp_size", "cp_size", "sp_size")
# A bf16 number is off by up to 2^-9 of itself. The check's logits stay below 1, and a loss moves by at most twice what
# its logits move: rounding alone may part two runs by 2^-8, and nothing below that tells them apart.
_SIXTEEN_BIT = 2.0**-8
# In fp32 the same bound is 2^-23; sums in another order, over five steps of AdamW, multiply it by up to about 100.
_SINGLE = 2.0**-16
# Learning rates, of 0.01 and less, are computed in fp64 on both sides, by formulas of their own.
_RATE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One quantity on both sides. `reported`: it differs, and the migration's report says that it may."""

    quantity: str
    source: Any
    target: Any
    verdict: Verdict


def check(
    source: Source, reading: Reading, migration: Migration, given: dict[str, Any], run: Runner = run_side
) -> list[Compared]:
    """Compares `migration` with its source by running both. MigrationError when a side cannot be run here."""
    recipe = _recipe(source, reading, migration, given)
    left = _side_of_source(source, reading, recipe)
    right = _side_of_target(migration, recipe)
    if left[0] == right[0] == "samestep":
        raise MigrationError("source and target are the same recipe.", remedy="Choose another --to.")
    lossy = _announced(migration, reading, given)
    source_did, target_did = (run(tool, recipe, config, None) for tool, config in (left, right))
    losses = None
    if "schedule" in lossy and not _same("rates", source_did.rates, target_did.rates, 0.0):
        losses = _under_one_schedule((left, source_did), (right, target_did), recipe, run)
    sixteen_bit = recipe.precision.regime != "full"
    return compared(source_did, target_did, lossy=lossy, sixteen_bit=sixteen_bit, same_rates=losses)


def _under_one_schedule(
    source: tuple[Side, Observed], target: tuple[Side, Observed], recipe: Recipe, run: Runner
) -> tuple[list[float], list[float]] | None:
    """The losses of both sides when the one whose script sets the rates takes those of the other one.

    None where neither leaves them to its script, or where a side makes another number of steps of the batches.
    """
    ((left, left_config), source_did), ((right, right_config), target_did) = source, target
    if len(source_did.rates) != STEPS or len(target_did.rates) != STEPS:
        return None
    if not sets_rates(right_config):
        return source_did.losses, run(right, recipe, right_config, source_did.rates).losses
    if not sets_rates(left_config):
        return run(left, recipe, left_config, target_did.rates).losses, target_did.losses
    return None


def compared(
    source: Observed,
    target: Observed,
    *,
    lossy: set[str],
    sixteen_bit: bool,
    same_rates: tuple[list[float], list[float]] | None = None,
) -> list[Compared]:
    """What both sides did, quantity by quantity. `lossy`: topics in which the report announces differences.

    `same_rates`: their losses at equal learning rates, where their own rates differ.
    """
    tolerance = _SIXTEEN_BIT if sixteen_bit else _SINGLE
    rows = []
    for name, topic in _TOPICS.items():
        a, b = getattr(source, name), getattr(target, name)
        if (a is None or b is None) and name != "clip":
            verdict: Verdict = "unseen"
        elif _same(name, a, b, tolerance):
            verdict = "equal"
        elif name == "losses":
            fair = (source, target) if same_rates is None else _with_losses(source, target, same_rates)
            verdict = "reported" if _excused(*fair, lossy, tolerance) else "different"
        else:
            verdict = "reported" if topic in lossy else "different"
        rows.append(Compared(quantity=name, source=a, target=b, verdict=verdict))
    return rows


def _same(name: str, a: Any, b: Any, tolerance: float) -> bool:
    if name == "rates":
        return len(a) == len(b) and all(abs(x - y) <= _RATE for x, y in zip(a, b, strict=True))
    return _close(a, b, tolerance) if name == "losses" else a == b


def _close(a: list[float], b: list[float], tolerance: float) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= tolerance for x, y in zip(a, b, strict=True))


def _with_losses(
    source: Observed, target: Observed, same_rates: tuple[list[float], list[float]]
) -> tuple[Observed, Observed]:
    return replace(source, losses=same_rates[0]), replace(target, losses=same_rates[1])


def _excused(source: Observed, target: Observed, lossy: set[str], tolerance: float) -> bool:
    """Whether losses that differ follow from differences that were seen and that the report announces.

    Other rates excuse nothing: losses of both sides at equal rates are compared instead.
    """
    rounded = _SIXTEEN_BIT if "precision" in lossy else tolerance
    # Another optimizer or norm parts the losses without bound, but not before the first update.
    other_updates = ("optimizer" in lossy and source.optimizer != target.optimizer) or (
        "clipping" in lossy and source.clip != target.clip
    )
    steps = 1 if other_updates else STEPS
    return _close(source.losses[:steps], target.losses[:steps], rounded)


def _recipe(source: Source, reading: Reading, migration: Migration, given: dict[str, Any]) -> Recipe:
    """The recipe of both sides: what the source says, a script's part for the rest, and a tiny model."""
    first = migration if migration.target == "samestep" else migrate(source, reading, "samestep", given)
    if first.missing:
        # The reading was made without these values; said beside it, they fill the gaps only.
        more = given | {path: _SCRIPT[path] for path in first.missing if path in _SCRIPT}
        first = migrate(source, reading, "samestep", more)
    if first.missing:
        flags = " ".join(f"--set {path}=..." for path in first.missing)
        raise MigrationError("does not say everything.", where=str(source.path), remedy=f"Give also: {flags}")
    recipe = parse(first.text, source=str(source.path))
    ranks = 1 if recipe.engine.name == "single" else RANKS
    engine: dict[str, Any] = {"ranks": ranks, "unit_classes": None, "ignored_modules": [], "shard_ranks": None}
    if isinstance(recipe.engine.offload, OffloadParts):
        engine["offload"] = "none"
    train = recipe.train
    steps = max(STEPS, train.steps or STEPS)
    changes = {"micro_batch": min(train.micro_batch, 4), "steps": steps, "epochs": None, "evaluate_every": None}
    return recipe.model_copy(
        update={
            "model": Model(config=MODEL, tokenizer="-"),
            "data": Data(path="-"),
            "engine": recipe.engine.model_copy(update=engine),
            "train": train.model_copy(update=changes),
        }
    )


def _side_of_source(source: Source, reading: Reading, recipe: Recipe) -> Side:
    if reading.kind == "samestep":
        return "samestep", {}
    if reading.kind == "deepspeed":
        return "deepspeed", runnable(nest(reading.meaning.carried["deepspeed"]), recipe)
    if reading.kind == "accelerate":
        return "accelerate", _launched(source.data, recipe, source.path.parent)
    what = f"--check runs configurations of samestep, DeepSpeed and Accelerate, not {reading.kind}."
    raise MigrationError(what, where=str(source.path), remedy="Leave out --check.")


def _side_of_target(migration: Migration, recipe: Recipe) -> Side:
    if migration.target == "samestep":
        return "samestep", {}
    if migration.target == "deepspeed":
        return "deepspeed", runnable(json.loads(migration.text), recipe)
    written = parse_text(migration.text, "the migrated configuration").data
    return "accelerate", _launched(written, recipe, Path())


def _launched(config: dict[str, Any], recipe: Recipe, folder: Path) -> dict[str, Any]:
    kind = kind_of(config)
    if not kind.startswith(("MULTI_", "FSDP", "DEEPSPEED", "NO")):
        what = f"--check does not run Accelerate with distributed_type {kind}."
        raise MigrationError(what, remedy="Leave out --check.")
    leaves = {current_name(path): value for path, value in flatten(config)}
    sizes = [path for path, value in leaves.items() if path.endswith(_GROUPS) and value not in (1, "1", None)]
    if sizes:
        what = f"{', '.join(sizes)}: more groups than the {RANKS} ranks of --check can form."
        raise MigrationError(what, remedy="Leave out --check.")
    return launcher(config, recipe, folder, LAYER)


def _announced(migration: Migration, reading: Reading, given: dict[str, Any]) -> set[str]:
    """Topics in which the report says that source and target differ."""
    topics = set()
    for entry in (*migration.fields, *migration.defaults):
        if entry.status in ("lossy", "impossible"):
            row = reading.rows.get(entry.path) or tables.find(entry.path)
            topics.add(row.topic if row is not None else "other")
    for setting in reading.meaning.settings:
        # What --set gives wins over the source, on purpose.
        if setting.path in given and given[setting.path] != setting.value:
            topics.update(row.topic for name in setting.sources if (row := reading.rows.get(name)) is not None)
    return topics
