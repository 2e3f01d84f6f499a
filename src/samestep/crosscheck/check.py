"""Runs both sides of a migration, each on two CPU ranks, and compares what they did."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from samestep.crosscheck.side import MODEL, RANKS, STEPS, Observed, Order
from samestep.errors import RunError
from samestep.migrate import Migration, MigrationError, Source, migrate, tables
from samestep.migrate.reading import Reading
from samestep.migrate.source import flatten, nest
from samestep.recipe import parse
from samestep.recipe.document import parse_text
from samestep.recipe.schema import Data, Model, OffloadParts, Recipe

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
    "clip": "clipping",
    "accumulation": "accumulation",
    "rates": "schedule",
    "updates": "precision",
    "losses": "",
}
# Sections that only write files, or that a tiny model on a CPU cannot have.
_LEFT_OUT = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "autotuning", "aio",
             "compile", "checkpoint", "elasticity", "nebula", "train_batch_size")  # fmt: skip
_SIXTEEN_BIT = 1e-3
_EXACT = 1e-5


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One quantity on both sides. `reported`: it differs, and the migration's report says that it may."""

    quantity: str
    source: Any
    target: Any
    verdict: Verdict


def check(source: Source, reading: Reading, migration: Migration, given: dict[str, Any]) -> list[Compared]:
    """Compares `migration` with its source by running both. MigrationError when a side cannot be run here."""
    recipe = _recipe(source, reading, given)
    left = _side_of_source(reading)
    right = _side_of_target(migration)
    if left[0] == right[0] == "samestep":
        raise MigrationError("source and target are the same recipe.", remedy="Choose another --to.")
    sides = [_run(tool, recipe, config) for tool, config in (left, right)]
    return compared(*sides, lossy=_lossy_topics(migration, reading), sixteen_bit=recipe.precision.regime != "full")


def compared(source: Observed, target: Observed, *, lossy: set[str], sixteen_bit: bool) -> list[Compared]:
    """What both sides did, quantity by quantity. `lossy`: topics in which the report announces differences."""
    rows = []
    for name, topic in _TOPICS.items():
        a, b = getattr(source, name), getattr(target, name)
        if a is None and b is None and name != "clip":
            verdict: Verdict = "unseen"
        elif (a is None or b is None) and name != "clip":
            verdict = "unseen"
        elif _same(name, a, b, sixteen_bit):
            verdict = "equal"
        else:
            explained = topic in lossy if topic else bool(lossy)
            # Before the first update nothing but the dtypes can differ.
            first_is_off = name == "losses" and not math.isclose(a[0], b[0], rel_tol=_SIXTEEN_BIT)
            verdict = "reported" if explained and not first_is_off else "different"
        rows.append(Compared(quantity=name, source=a, target=b, verdict=verdict))
    return rows


def _same(name: str, a: Any, b: Any, sixteen_bit: bool) -> bool:
    if name not in ("rates", "losses"):
        return a == b
    tolerance = _SIXTEEN_BIT if sixteen_bit and name == "losses" else _EXACT
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=tolerance) for x, y in zip(a, b, strict=True))


def _recipe(source: Source, reading: Reading, given: dict[str, Any]) -> Recipe:
    """The recipe of both sides: what the source says, a script's part for the rest, and a tiny model."""
    first = migrate(source, reading, "samestep", given)
    if first.missing:
        # The reading was made without these values; said beside it, they fill the gaps only.
        more = given | {path: _SCRIPT[path] for path in first.missing if path in _SCRIPT}
        first = migrate(source, reading, "samestep", more)
    if first.missing:
        flags = " ".join(f"--set {path}=..." for path in first.missing)
        raise MigrationError("does not say everything.", where=str(source.path), remedy=f"Give also: {flags}")
    recipe = parse(first.text, source=str(source.path))
    engine: dict[str, Any] = {"ranks": RANKS, "unit_classes": None, "ignored_modules": [], "shard_ranks": None}
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


def _side_of_source(reading: Reading) -> tuple[str, dict[str, Any]]:
    if reading.kind == "samestep":
        return "samestep", {}
    if reading.meaning.whole != "deepspeed":
        what = f"a configuration of this kind ({reading.kind}, without DeepSpeed) cannot be run on CPU ranks."
        raise MigrationError(what, remedy="Leave out --check.")
    return reading.kind, nest(reading.meaning.carried["deepspeed"])


def _side_of_target(migration: Migration) -> tuple[str, dict[str, Any]]:
    if migration.target == "samestep":
        return "samestep", {}
    if migration.target == "deepspeed":
        return "deepspeed", json.loads(migration.text)
    if migration.target == "accelerate-deepspeed":
        inside = parse_text(migration.text, "the migrated configuration").data
        return "accelerate", json.loads(inside["deepspeed_config"]["deepspeed_config_file"])
    raise MigrationError(f"{migration.target} cannot be run on CPU ranks.", remedy="Leave out --check.")


def runnable(config: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """What the check runs of a DeepSpeed configuration: no offload, logging, `auto` or compiled kernels."""
    leaves = {path: value for path, value in flatten(config) if value != "auto"}
    kept = {path: value for path, value in leaves.items() if path.split(".")[0] not in _LEFT_OUT}
    kept = {path: value for path, value in kept.items() if "offload" not in path}
    kept |= {
        "train_micro_batch_size_per_gpu": recipe.train.micro_batch,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    kept.setdefault("gradient_accumulation_steps", recipe.train.accumulation)
    if str(kept.get("optimizer.type", "")).lower() in ("adam", "adamw"):
        kept["optimizer.params.torch_adam"] = True
    for name in ("bf16", "fp16"):
        # An `auto` that was left out: what the recipe has.
        if leaves.get(f"{name}.enabled") is None and f"{name}.enabled" in dict(flatten(config)):
            low = {"bf16": "bfloat16", "fp16": "float16"}[name]
            kept[f"{name}.enabled"] = recipe.precision.regime != "full" and recipe.precision.low_dtype == low
    # The largest buckets would be larger than the machine.
    kept["zero_optimization.reduce_bucket_size"] = kept["zero_optimization.allgather_bucket_size"] = 10**6
    return nest(kept)


def _run(tool: Any, recipe: Recipe, config: dict[str, Any]) -> Observed:
    with tempfile.TemporaryDirectory(prefix="samestep-") as scratch:
        report, order = Path(scratch) / "report.json", Path(scratch) / "order.json"
        wanted = Order(
            tool=tool,
            recipe=recipe.model_dump(mode="json"),
            config=runnable(config, recipe) if tool != "samestep" else {},
            report=str(report),
        )
        order.write_text(json.dumps(dataclasses.asdict(wanted)), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        command += ["-m", "samestep.crosscheck.rank", str(order)]
        private = {"TORCH_EXTENSIONS_DIR": scratch, "OMP_NUM_THREADS": "1",
                   "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
        done = subprocess.run(
            command, env=os.environ | private, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if not report.is_file():
            raise RunError(f"{tool} did not run: {_reason(done.stderr)}", remedy="Leave out --check.")
        return Observed(**json.loads(report.read_text(encoding="utf-8")))


def _reason(log: str) -> str:
    """The last line of a log that names an error."""
    lines = [line.split("]:")[-1].strip() for line in log.splitlines()]
    errors = [line for line in lines if "Error" in line.split(":")[0] and "ChildFailedError" not in line]
    return errors[-1] if errors else "no message"


def _lossy_topics(migration: Migration, reading: Reading) -> set[str]:
    topics = set()
    for entry in (*migration.fields, *migration.defaults):
        if entry.status in ("lossy", "impossible"):
            row = reading.rows.get(entry.path) or tables.find(entry.path)
            topics.add(row.topic if row is not None else "other")
    return topics
