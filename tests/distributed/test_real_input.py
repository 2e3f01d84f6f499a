"""A really trained model on rows that people wrote; skipped where the shared material is absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from samestep.recipe import Recipe
from tests.distributed import run_jobs
from tests.small_runs import steps_of

if TYPE_CHECKING:
    from tests.distributed.ranks import RankPools

SHARED = Path(__file__).parents[2].parent / "shared"
MODEL = SHARED / "models" / "stories260K"
INSTRUCTIONS = SHARED / "data" / "llmfs_instruct_1100.jsonl"
QUESTIONS = SHARED / "data" / "gsm8k_train_first2000.jsonl"
ENGINES = ["single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]

pytestmark = pytest.mark.skipif(not MODEL.is_dir() or not INSTRUCTIONS.is_file(), reason="no shared material")


def recipe(engine: str, data: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    content = {
        "model": {"path": str(MODEL)},
        "data": data,
        "engine": {"name": engine, "ranks": 2},
        "train": train,
    }
    return Recipe.model_validate(content).model_dump(mode="json")


def test_instructions_are_learned_in_one_epoch(ranks: RankPools, tmp_path: Path) -> None:
    """Held-out loss falls from 4.7 to under 2.5. In fp32: CPUs without bf16 instructions take three times as long for
    mixed."""
    data = {"path": str(INSTRUCTIONS), "held_out": 100}
    train = {"epochs": 1.0, "micro_batch": 4, "optimizer": {"lr": 3e-3}, "schedule": {"warmup_steps": 5}}
    asked = recipe("fsdp", data, train) | {"precision": {"regime": "full"}}
    summary, nothing = ranks.run(2, run_jobs.train, recipe=asked, out=str(tmp_path), timeout_seconds=500)
    assert nothing is None
    assert (summary["status"], summary["steps"]) == ("completed", 125)
    first, last = summary["evaluations"]
    assert (first["step"], last["step"]) == (0, 125)
    assert (first["rows"], last["rows"]) == (100, 100)
    assert 4 < first["loss"] < 6
    assert last["loss"] < 2.5


@pytest.mark.skipif(not QUESTIONS.is_file(), reason="no shared material")
@pytest.mark.parametrize(
    "layout",
    [
        {"format": "prompt_completion", "columns": {"prompt": "question", "completion": "answer"}},
        {"template": "### Question: {question}\n ### Answer: {answer}", "response_marker": " ### Answer:"},
    ],
    ids=["columns", "template"],
)
def test_questions_give_the_same_steps_on_every_engine(
    ranks: RankPools, tmp_path: Path, layout: dict[str, Any]
) -> None:
    pytest.importorskip("deepspeed")
    data = {"path": str(QUESTIONS), "rows": 24, "max_tokens": 200, "held_out": 4, **layout}
    train = {"steps": 5, "micro_batch": 1, "accumulation": 2, "max_grad_norm": 1.0, "optimizer": {"lr": 1e-3}}
    told = {}
    for engine in ENGINES:
        out, size = tmp_path / engine, 1 if engine == "single" else 2
        ranks.run(size, run_jobs.train, recipe=recipe(engine, data, train), out=str(out), timeout_seconds=200)
        summary = json.loads((out / "summary.json").read_text())
        steps = [{key: step[key] for key in _SAME} for step in steps_of(out)]
        told[engine] = steps, summary["evaluations"], summary["weights_sha256"]
        assert (out / "export" / "model.safetensors").read_bytes() == _exported(tmp_path)
    assert len(told["single"][0]) == 5
    assert told["single"][0][0]["loss"] > told["single"][0][-1]["loss"]
    for engine in ENGINES[1:]:
        assert told[engine] == told["single"], engine


_SAME = ("step", "epoch", "loss", "grad_norm", "grad_norm_clipped", "lr", "label_tokens", "tokens", "skipped")


def _exported(folder: Path) -> bytes:
    return (folder / "single" / "export" / "model.safetensors").read_bytes()
