"""P97: an engine that is asked for is the engine that runs, on the CPU as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from samestep.recipe import Recipe
from tests.distributed import run_jobs
from tests.small_runs import make_folder, make_model

if TYPE_CHECKING:
    from tests.distributed.ranks import RankPools

ALL = sum(p.numel() for p in make_model().parameters())
DEEPSPEED = ("zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("engines"))


def recipe(folder: Path, engine: str) -> dict[str, Any]:
    content: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl"), "format": "text"},
        "precision": {"max_lost_update_share": None},
        "engine": {"name": engine, "ranks": 2},
        "train": {"steps": 1, "micro_batch": 2},
    }
    if engine == "zero3":
        content["engine"]["persistent_elements"] = 1
    if engine == "hsdp":
        content["engine"]["shard_ranks"] = 2
    return Recipe.model_validate(content).model_dump(mode="json")


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp", "hsdp", *DEEPSPEED])
def test_p97_what_the_engine_holds(ranks: RankPools, folder: Path, engine: str) -> None:
    if engine in DEEPSPEED:
        pytest.importorskip("deepspeed")
    seen = ranks.run(1 if engine == "single" else 2, run_jobs.engine_made, recipe=recipe(folder, engine))
    assert {rank["device"] for rank in seen} == {"cpu"}
    assert {rank["engine"] for rank in seen} == {"DeepSpeedEngine" if engine in DEEPSPEED else "TorchEngine"}
    assert seen[0]["stage"] == (int(engine[-1]) if engine in DEEPSPEED else None)
    masters = [rank["masters"] for rank in seen]
    if engine in ("single", "ddp"):
        assert masters == [ALL] * len(seen)
        assert seen[0]["mesh_sizes"] == [1]
    else:
        assert sum(masters) == ALL
        assert max(masters) < 0.7 * ALL
    if engine in ("fsdp", "hsdp"):
        assert seen[0]["mesh_sizes"] == [2]
        assert sum(rank["parameters"] for rank in seen) == ALL
    if engine in DEEPSPEED:
        assert (seen[0]["parameters"] < ALL) is (engine == "zero3")
    # The decoder's three layers and the root.
    assert seen[0]["sharded_modules"] == (0 if engine in DEEPSPEED else 4)


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp", "zero2"])
def test_p97_what_the_run_says(ranks: RankPools, folder: Path, engine: str, tmp_path: Path) -> None:
    if engine in DEEPSPEED:
        pytest.importorskip("deepspeed")
    ranks.run(1 if engine == "single" else 2, run_jobs.train, recipe=recipe(folder, engine), out=str(tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text())["engine"] == engine
    assert Recipe.model_validate(_resolved(tmp_path)).engine.name == engine


def _resolved(out: Path) -> Any:
    import yaml

    return yaml.safe_load((out / "recipe.yaml").read_text())
