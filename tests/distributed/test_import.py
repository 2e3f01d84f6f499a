"""Checkpoints that DeepSpeed and FSDP made on two ranks, imported: every value is what it was in the live run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.checkpoint.importing import recognise
from samestep.checkpoint.manifest import read_manifest
from samestep.checkpoint.tensors import whole_tensors
from samestep.errors import CheckpointError
from samestep.recipe import load
from samestep.training.importing import import_checkpoint
from tests.distributed import foreign_jobs, run_jobs
from tests.small_runs import make_folder, steps_of

pytestmark = pytest.mark.timeout(240)

DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2, round robin": {"stage": 2, "round_robin_gradients": True},
    "zero2, fp16": {"stage": 2, "dtype": "fp16"},
    "zero2, frozen": {"stage": 2, "frozen": "embed"},
    "zero3, frozen, small sub-groups": {"stage": 3, "frozen": "embed", "sub_group_size": 300},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, its model and its rows."""
    return make_folder(tmp_path_factory.mktemp("recipe"))


def assert_imported(path: Path, live: dict[str, torch.Tensor], folder: Path, out: Path, *overrides: str) -> None:
    found = import_checkpoint(path, load(folder / "r.yaml", overrides), out).folder
    manifest = read_manifest(found)
    assert (manifest.step, manifest.updates) == (foreign_jobs.STEPS, foreign_jobs.STEPS)
    ours = dict(whole_tensors(found, manifest.tensors))
    assert ours.keys() == live.keys()
    assert [name for name in live if not torch.equal(ours[name], live[name])] == []


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed(ranks: Any, folder: Path, tmp_path: Path, name: str) -> None:
    """P67, P70: tied, frozen and sharded parameters are complete; masters are the fp32 ones."""
    live = ranks.run(2, foreign_jobs.deepspeed, out=str(tmp_path / "it"), **DEEPSPEED[name])[0]
    if "round robin" in name:
        # Where DeepSpeed says that parameters lie is wrong then; the numbers do not depend on the order.
        straight = {"stage": 2, "out": str(tmp_path / "straight")}
        live = ranks.run(2, foreign_jobs.deepspeed, **straight)[0]
    changes = ['model.freeze=["*embed*"]'] if "frozen" in name else []
    changes += ["precision.low_dtype=float16"] if "fp16" in name else []
    assert_imported(tmp_path / "it", live, folder, tmp_path / "out", *changes)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_universal(ranks: Any, folder: Path, tmp_path: Path, stage: int) -> None:
    """P70: what DeepSpeed's own converter makes of its checkpoint."""
    live = ranks.run(2, foreign_jobs.deepspeed, out=str(tmp_path / "it"), stage=stage)[0]
    ranks.run(
        1, foreign_jobs.to_universal, folder=str(tmp_path / "it" / "global_step3"), out=str(tmp_path / "universal")
    )
    assert recognise.read(tmp_path / "universal").kind == "DeepSpeed universal"
    assert_imported(tmp_path / "universal", live, folder, tmp_path / "out")


def test_fsdp1(ranks: Any, folder: Path, tmp_path: Path) -> None:
    """P72: sharded, and full ones of flat parameters, in one file and in accelerate's two; a full one of original
    parameters, of which torch loses a moment on the CPU, is refused."""
    live = ranks.run(2, foreign_jobs.fsdp1, out=str(tmp_path / "it"), sharded=True)[0]
    assert_imported(tmp_path / "it", live, folder, tmp_path / "out")
    ranks.run(2, foreign_jobs.fsdp1, out=str(tmp_path / "flat.pt"), sharded=False, original=False)
    assert_imported(tmp_path / "flat.pt", live, folder, tmp_path / "flat")
    content = torch.load(tmp_path / "flat.pt", weights_only=True)
    (tmp_path / "two").mkdir()
    torch.save(content["model"], tmp_path / "two" / "pytorch_model_fsdp.bin")
    torch.save(content["optimizer"], tmp_path / "two" / "optimizer.bin")
    assert_imported(tmp_path / "two", live, folder, tmp_path / "two files")
    ranks.run(2, foreign_jobs.fsdp1, out=str(tmp_path / "full.pt"), sharded=False)
    with pytest.raises(CheckpointError, match="has one tensor for exp_avg and exp_avg_sq of"):
        recognise.read(tmp_path / "full.pt")


@pytest.mark.parametrize(("version", "sharded"), [(1, True), (2, True), (2, False)])
def test_accelerate_fsdp(ranks: Any, folder: Path, tmp_path: Path, version: int, sharded: bool) -> None:
    live = ranks.run(2, foreign_jobs.accelerate_fsdp, out=str(tmp_path / "it"), version=version, sharded=sharded)[0]
    assert_imported(tmp_path / "it", live, folder, tmp_path / "out")


def test_any_engine_goes_on_from_it(ranks: Any, folder: Path, tmp_path: Path) -> None:
    """P71, P80: from ZeRO-2 with its moments to FSDP, to ZeRO-3 and to one process, which take the same next step."""
    ranks.run(2, foreign_jobs.deepspeed, out=str(tmp_path / "it"), stage=2)
    changes = ["precision.regime=mixed", "engine.ranks=2", "train.steps=4", "train.schedule.name=constant"]
    import_checkpoint(tmp_path / "it", load(folder / "r.yaml", changes), tmp_path / "imported")
    records = []
    for engine in ("single", "fsdp", "zero3"):
        recipe = load(folder / "r.yaml", [*changes, f"engine.name={engine}"]).model_dump(mode="json")
        out = tmp_path / engine
        ranks.run(
            1 if engine == "single" else 2,
            run_jobs.train,
            recipe=recipe,
            out=str(out),
            resume=str(tmp_path / "imported"),
        )
        (record,) = steps_of(out)
        records.append((record["step"], record["loss"], record["grad_norm"], record["lr"]))
    assert records[0][0] == 4
    assert records[1:] == records[:1] * 2
