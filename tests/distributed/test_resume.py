"""Whole runs that stop and go on: the run folder they leave is that of a run that never stopped."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

from samestep.checkpoint import store
from samestep.checkpoint.difference import differences
from samestep.checkpoint.manifest import read_manifest
from samestep.errors import CheckpointError
from samestep.training.converting import convert
from samestep.training.exporting import export_checkpoint
from tests.distributed import run_jobs
from tests.distributed.ranks import Ranks
from tests.small_runs import make_folder

if TYPE_CHECKING:
    from tests.distributed.ranks import RankPools

MEASURED = ("step_seconds", "tokens_per_second_per_device", "peak_memory_bytes")
# fp64 sums over each rank's samples: their last bits depend on how the engine of that step cuts tensors.
LENGTHS = ("lost_update_length", "unseen_update_length")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("source"), rows=23)


def recipe(source: Path, engine: str, **changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "model": {"path": str(source / "model"), "load_dtype": "bfloat16"},
        "data": {"path": str(source / "rows.jsonl"), "format": "text", "held_out": 3},
        "precision": {"max_lost_update_share": None},
        "engine": {"name": engine, "ranks": 2},
        "train": {"steps": 9, "micro_batch": 2, "optimizer": {"lr": 1e-2}, "evaluate_every": 2},
        "checkpoint": {"every": 3},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        content[section][key] = value
    return content


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in MEASURED} for line in found]


@pytest.fixture(scope="module")
def unbroken(source: Path, ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken")
    ranks.run(2, run_jobs.train, recipe=recipe(source, "fsdp"), out=str(out), keep_masters=True)
    return out


def check_lines(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """Equal in every bit but the lengths, which are equal to 12 places."""
    lengths = [[line.pop(name, None) for line in found for name in LENGTHS] for found in (theirs, ours)]
    assert theirs == ours
    for a, b in zip(*lengths, strict=True):
        assert a is b is None or a == pytest.approx(b, rel=0, abs=1e-12)


def check_equal(unbroken: Path, out: Path) -> None:
    for name in ("steps.jsonl", "evaluations.jsonl"):
        check_lines(lines(unbroken / name), lines(out / name))
    for name in ("export/model.safetensors", "masters.safetensors"):
        assert (unbroken / name).read_bytes() == (out / name).read_bytes()
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (out, unbroken))
    assert ours["status"] == "completed"
    for key in ("first_loss", "last_loss", "weights_sha256"):
        assert ours[key] == theirs[key]
    looked = [json.loads((folder / "precision.json").read_text())["forecast"] for folder in (out, unbroken)]
    assert looked[0] == looked[1] is not None


@pytest.mark.parametrize(("first", "second"), [("fsdp", "fsdp"), ("zero3", "ddp"), ("hsdp", "zero1")])
def test_goes_on_in_its_folder(source, unbroken, ranks, tmp_path, first, second):
    """Stopped in the middle of an epoch, between evaluations; by another engine than it began on."""
    before, _ = ranks.run(2, run_jobs.train, recipe=recipe(source, first), out=str(tmp_path), stop_after=5)
    assert (before["status"], before["steps"]) == ("stopped", 5)
    assert [path.name for path in store.complete(tmp_path / "checkpoints")] == ["step-00000003", "step-00000005"]
    arguments = {"out": str(tmp_path), "resume": str(tmp_path), "keep_masters": True}
    ranks.run(2, run_jobs.train, recipe=recipe(source, second), **arguments)
    check_equal(unbroken, tmp_path)
    assert [path.name for path in store.complete(tmp_path / "checkpoints")] == ["step-00000006", "step-00000009"]
    assert read_manifest(store.newest(tmp_path)).engine == second


def test_steps_after_the_checkpoint_are_made_again(source, unbroken, ranks, tmp_path):
    """As after a crash: the files know of steps that no checkpoint has, the last line is not finished."""
    ranks.run(2, run_jobs.train, recipe=recipe(source, "fsdp"), out=str(tmp_path), stop_after=5)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000005")
    for name in ("steps.jsonl", "evaluations.jsonl"):
        with open(tmp_path / name, "a", encoding="utf-8") as file:
            file.write('{"step": 6, "lo')
    (tmp_path / ".summary.json.partial").write_text("{")
    arguments = {"out": str(tmp_path), "resume": str(tmp_path), "keep_masters": True}
    ranks.run(2, run_jobs.train, recipe=recipe(source, "fsdp"), **arguments)
    check_equal(unbroken, tmp_path)


def test_p70_p72_from_one_engine_to_the_next_and_back(source, unbroken, ranks, tmp_path):
    """single, fsdp, zero3, ddp and single again: nothing starts afresh, and not a bit is lost on the way."""
    single = recipe(source, "single")
    for engine, last in [("single", 2), ("fsdp", 4), ("zero3", 6), ("ddp", 8), ("single", None)]:
        wanted = single if engine == "single" else recipe(source, engine)
        arguments: dict[str, Any] = {"out": str(tmp_path), "stop_after": last, "keep_masters": last is None}
        if last != 2:
            arguments["resume"] = str(tmp_path)
        ranks.run(1 if engine == "single" else 2, run_jobs.train, recipe=wanted, **arguments)
    check_equal(unbroken, tmp_path)


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_p71_moments_leave_zero_by_name(source, ranks, tmp_path, engine):
    """What one process without ZeRO has of every weight: the same masters and moments, bit for bit."""
    for name, size in (("single", 1), (engine, 2)):
        ranks.run(size, run_jobs.train, recipe=recipe(source, name), out=str(tmp_path / name), stop_after=4)
    one, other = (store.newest(tmp_path / name) for name in ("single", engine))
    keys = {name.rpartition(".")[2] for name in read_manifest(other).tensors if name.startswith("optim.state.")}
    assert keys == {"exp_avg", "exp_avg_sq"}
    assert read_manifest(other).updates == 4
    assert differences(one, other) == []


def test_an_export_of_a_checkpoint_is_that_of_the_run(unbroken, tmp_path):
    export_checkpoint(store.newest(unbroken), tmp_path / "model", dtype=None, overwrite=False)
    name = "model.safetensors"
    assert (tmp_path / "model" / name).read_bytes() == (unbroken / "export" / name).read_bytes()


def test_in_another_folder(source, unbroken, ranks, tmp_path):
    ranks.run(2, run_jobs.train, recipe=recipe(source, "fsdp"), out=str(tmp_path / "a"), stop_after=5)
    arguments = {"out": str(tmp_path / "b"), "resume": str(tmp_path / "a")}
    ranks.run(2, run_jobs.train, recipe=recipe(source, "zero2", checkpoint__asynchronous=True), **arguments)
    check_lines(lines(unbroken / "steps.jsonl")[5:], lines(tmp_path / "b" / "steps.jsonl"))
    assert [path.name for path in store.complete(tmp_path / "b" / "checkpoints")] == ["step-00000006", "step-00000009"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"train__optimizer": {"lr": 2e-2}}, "train.optimizer.lr was 0.01, now it is 0.02"),
        ({"train__micro_batch": 3}, "a step takes 6 rows (ranks x micro_batch x accumulation), not 4"),
        ({"data__held_out": 4}, "the rows of the training data are others"),
        ({"precision__regime": "low"}, "precision.regime was mixed, now it is low"),
        ({"model__freeze": ["model.norm.*"]}, "trains other parameters than the recipe; model.norm.weight"),
        ({"train__steps": 5}, "train.steps was 9, now it is 5"),
    ],
)
def test_another_run_is_refused(source, unbroken, ranks, tmp_path, changes, what):
    arguments = {"out": str(tmp_path), "resume": str(unbroken)}
    for answer in ranks.run(2, run_jobs.refusal, recipe=recipe(source, "fsdp", **changes), **arguments):
        assert what in answer
        assert "Traceback" not in answer
    assert not (tmp_path / "steps.jsonl").exists()


@pytest.mark.parametrize(
    "model",
    [
        {"model__freeze": ["model.embed_tokens.*"]},
        {"model__lora": {"rank": 2, "target_modules": ["q_proj"], "export_merged": True}},
    ],
    ids=["frozen layers", "adapters"],
)
def test_other_frozen_weights_are_refused(ranks, tmp_path, model):
    """Nothing of a checkpoint says that the model it belongs to has been changed in its place, but for a digest."""
    place = tmp_path / "source"
    place.mkdir()
    stored = make_folder(place, rows=23) / "model" / "model.safetensors"
    out, original = tmp_path / "out", stored.read_bytes()
    ranks.run(2, run_jobs.train, recipe=recipe(place, "fsdp", **model), out=str(out), stop_after=4)
    # Taken up with the same weights by an engine that holds them otherwise, and exported.
    ranks.run(2, run_jobs.train, recipe=recipe(place, "zero2", **model), out=str(tmp_path / "on"), resume=str(out))
    export_checkpoint(store.newest(out), tmp_path / "exported")
    for to in ("torch", "deepspeed-universal"):
        convert(store.newest(out), tmp_path / to, to=to, overwrite=False)

    weights = load_file(stored)
    weights["model.embed_tokens.weight"][3, 1] *= 1.5
    save_file(weights, stored, metadata={"format": "pt"})
    arguments = {"out": str(tmp_path / "no"), "resume": str(out)}
    refused = ranks.run(2, run_jobs.refusal, recipe=recipe(place, "zero2", **model), **arguments)
    for number, write in enumerate((export_checkpoint, partial(convert, to="torch", overwrite=False))):
        with pytest.raises(CheckpointError) as caught:
            write(store.newest(out), tmp_path / str(number))
        refused.append(str(caught.value))
        assert not (tmp_path / str(number)).exists()
    for answer in refused:
        assert "was made with other frozen weights than the recipe's model has now" in answer
    stored.write_bytes(original)
    ranks.run(2, run_jobs.train, recipe=recipe(place, "zero2", **model), out=str(tmp_path / "yes"), resume=str(out))


def test_nothing_is_left_to_do(source, unbroken, ranks, tmp_path):
    arguments = {"out": str(tmp_path), "resume": str(unbroken)}
    for answer in ranks.run(2, run_jobs.refusal, recipe=recipe(source, "fsdp"), **arguments):
        assert "is of step 9, and the run has 9: nothing is left to do" in answer


def test_a_damaged_checkpoint_is_refused_on_all_ranks(source, unbroken, ranks, tmp_path):
    shutil.copytree(store.newest(unbroken), tmp_path / "damaged")
    path = tmp_path / "damaged" / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    arguments = {"out": str(tmp_path / "out"), "resume": str(tmp_path / "damaged")}
    for answer in ranks.run(2, run_jobs.refusal, recipe=recipe(source, "fsdp"), **arguments):
        assert "is damaged: __1_0.distcp: other contents than were written" in answer


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_place_that_cannot_be_written_ends_the_run(source, ranks, tmp_path, asynchronous):
    """A checkpoint that fails ends the run on all ranks, with one message."""
    out = tmp_path / "out"
    out.mkdir()
    wanted = recipe(source, "fsdp", checkpoint__asynchronous=asynchronous)
    answers = ranks.run(2, run_jobs.cannot_save, recipe=wanted, out=str(out))
    for answer in answers:
        assert "cannot be written: File exists" in answer
        assert "go on from it with --resume" in answer
    assert len(lines(out / "steps.jsonl")) >= 3
    assert not (out / "summary.json").exists()


def test_p78_a_rank_that_does_not_come_is_named(tmp_path):
    # Ranks of its own: a group in which one waited in vain is of no use to later tests.
    ranks = Ranks(2)
    try:
        answer, _ = ranks.run(run_jobs.late_for_a_checkpoint, out=str(tmp_path))
    finally:
        ranks.kill()
    assert "not all ranks came to save step 1" in answer
    assert "1" in answer.split("save step 1: ")[1]
    assert not (tmp_path / "checkpoints").exists()
