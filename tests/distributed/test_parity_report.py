"""What users asked for when their curves parted between engines: a report that says equal, or where and why not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from samestep.compare.finished import compare_finished
from samestep.recipe import Recipe
from tests.distributed import run_jobs
from tests.small_runs import make_folder

if TYPE_CHECKING:
    from tests.distributed.ranks import RankPools

pytestmark = pytest.mark.timeout(120)


def trained(ranks: RankPools, folder: Path, engine: str, name: str, precision: dict[str, Any]) -> Path:
    """A run of four micro-batches a step, with its masters."""
    content = {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl"), "format": "text"},
        "precision": {"regime": "mixed", **precision},
        "engine": {"name": engine, "ranks": 2},
        "train": {"steps": 5, "micro_batch": 1, "accumulation": 4, "max_grad_norm": 1.0, "optimizer": {"lr": 1e-2}},
    }
    recipe = Recipe.model_validate(content).model_dump(mode="json")
    ranks.run(2, run_jobs.train, recipe=recipe, out=str(folder / name), keep_masters=True)
    return folder / name


def test_accumulation_is_the_same_on_every_engine_and_a_reduction_in_bf16_is_named(
    ranks: RankPools, tmp_path: Path
) -> None:
    """P32, P07, P131, P133 (DeepSpeed#5898, transformers#26498, slime#290, pytorch#102731): curves of two engines
    parted, with accumulation only in the first, and nobody could say why. There it was the dtype in which gradients
    were reduced."""
    pytest.importorskip("deepspeed")
    folder = make_folder(tmp_path)
    runs = [trained(ranks, folder, engine, engine, {}) for engine in ("fsdp", "ddp", "zero1", "zero2", "zero3")]
    report, _ = compare_finished(runs)
    assert report["ok"]
    assert len(report["pairs"]) == 10
    assert all(pair["bit_equal"] and pair["cause"] is None for pair in report["pairs"])
    rounded = trained(ranks, folder, "zero2", "rounded", {"overrides": {"reduce": "bfloat16"}})
    report, _ = compare_finished([runs[0], rounded], tested=["precision.overrides.reduce"])
    (pair,) = report["pairs"]
    assert pair["first_difference"] == {"step": 1, "quantity": "grad_norm"}
    assert "reduce is float32 in fsdp and bfloat16 in rounded" in pair["cause"]
