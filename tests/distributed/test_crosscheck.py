"""A migration against its source, both run: what was mapped rightly is equal, what was mapped wrongly is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samestep.crosscheck import rank
from samestep.crosscheck.check import Runner, check
from samestep.crosscheck.launch import run_side
from samestep.crosscheck.side import Observed, Order, Tool
from samestep.migrate import Migration, Source, migrate, read, read_as
from samestep.migrate.reading import Reading
from samestep.recipe.schema import Recipe
from tests.distributed.ranks import RankPools

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.05,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
}
ACCELERATE = """\
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 2
deepspeed_config:
  zero_stage: 3
  gradient_accumulation_steps: 2
  gradient_clipping: 0.05
"""
SCRIPT = {"train.micro_batch": 2, "train.steps": 5, "train.optimizer.lr": 0.01, "model.path": "m", "data.path": "d",
          "engine.ranks": 2}  # fmt: skip


def sides(folder: Path, name: str, text: str, kind: str) -> tuple[Source, Reading, Migration]:
    file = folder / name
    file.write_text(text)
    source = read(file)
    reading = read_as(kind, source, SCRIPT)
    return source, reading, migrate(source, reading, "samestep", SCRIPT)


def verdicts(parts: tuple[Source, Reading, Migration], run: Runner) -> dict[str, str]:
    return {row.quantity: row.verdict for row in check(*parts, SCRIPT, run)}


def mistaken(parts: tuple[Source, Reading, Migration], right: str, wrong: str) -> tuple[Source, Reading, Migration]:
    """The migration as it would be if it had mapped one field wrongly."""
    source, reading, migration = parts
    assert right in migration.text
    return source, reading, replace(migration, text=migration.text.replace(right, wrong))


def runner(ranks: RankPools) -> Runner:
    """Runs sides on ranks that live already, Accelerate's under its own launcher; each source once."""
    seen: dict[str, Observed] = {}

    def run(tool: Tool, recipe: Recipe, config: dict[str, Any], rates: list[float] | None) -> Observed:
        key = json.dumps([tool, config, recipe.train.accumulation, rates])
        if tool == "accelerate":
            return seen[key] if key in seen else seen.setdefault(key, run_side(tool, recipe, config, rates))
        order = Order(tool=tool, recipe=recipe.model_dump(mode="json"), config=config, report="", rates=rates)
        return ranks.run(2, rank.run, order=order)[0]

    return run


@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        ("max_grad_norm: 0.05", "max_grad_norm: null", "clip"),
        ("accumulation: 2", "accumulation: 4", "accumulation"),
        ("weight_decay: 0.1", "weight_decay: 0.0", "optimizer"),
        ("lr: 0.01", "lr: 0.02", "rates"),
        ("regime: full", "regime: mixed", "compute"),
    ],
)
def test_a_field_of_a_deepspeed_json_that_is_mapped_wrongly_is_found(
    ranks: RankPools, tmp_path: Path, right: str, wrong: str, found: str
) -> None:
    parts = sides(tmp_path, "ds.json", json.dumps(DEEPSPEED), "deepspeed")
    assert verdicts(mistaken(parts, right, wrong), runner(ranks))[found] == "different"


def test_a_deepspeed_json_in_fp32_and_its_recipe_do_the_same(ranks: RankPools, tmp_path: Path) -> None:
    found = verdicts(sides(tmp_path, "ds.json", json.dumps(DEEPSPEED), "deepspeed"), runner(ranks))
    assert set(found.values()) == {"equal"}


def test_what_deepspeed_does_in_bf16_differs_in_what_the_report_says(ranks: RankPools, tmp_path: Path) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.01, "warmup_type": "linear"}}
    text = json.dumps(DEEPSPEED | {"bf16": {"enabled": True}, "scheduler": schedule})
    found = verdicts(sides(tmp_path, "ds.json", text, "deepspeed"), runner(ranks))
    assert {name for name, verdict in found.items() if verdict == "different"} == set()
    # DeepSpeed accumulates in bf16, and its schedule is late.
    assert {found["gradient"], found["rates"]} == {"reported"}
    assert {found[name] for name in ("master", "moments", "compute", "reduce", "clip", "accumulation")} == {"equal"}


@pytest.mark.parametrize(
    ("wrong", "losses"),
    # Of AdamW's first steps another eps changes the size; a mistake that a late schedule excused once.
    [({}, "reported"), ({"eps: 1.0e-08": "eps: 0.1"}, "different")],
)
def test_a_schedule_that_is_late_excuses_nothing_else(
    ranks: RankPools, tmp_path: Path, wrong: dict[str, str], losses: str
) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.01, "warmup_type": "linear"}}
    parts = sides(tmp_path, "ds.json", json.dumps(DEEPSPEED | {"scheduler": schedule}), "deepspeed")
    for right, mistake in wrong.items():
        parts = mistaken(parts, right, mistake)
    found = verdicts(parts, runner(ranks))
    assert found["rates"] == "reported"
    assert found["losses"] == losses


def test_accelerates_own_deepspeed_run_and_its_recipe(ranks: RankPools, tmp_path: Path) -> None:
    run = runner(ranks)
    parts = sides(tmp_path, "accelerate.yaml", ACCELERATE, "accelerate")
    found = verdicts(parts, run)
    assert found.pop("gradient") == "reported"
    assert set(found.values()) == {"equal"}
    wrong = verdicts(mistaken(parts, "max_grad_norm: 0.05", "max_grad_norm: null"), run)
    assert wrong["clip"] == "different"
