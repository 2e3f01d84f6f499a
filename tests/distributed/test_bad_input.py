"""What goes wrong with real ranks: each failure is one short message, and no process stays behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.distributed import run_jobs
from tests.small_runs import (
    assert_short_message,
    change,
    finish,
    half_written,
    make_folder,
    processes_of,
    ranks_of,
    start,
    steps_of,
    wait_until,
)

if TYPE_CHECKING:
    from tests.distributed.ranks import RankPools

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find processes")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def assert_nothing_left(folder: Path) -> None:
    deadline = time.monotonic() + 10
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(folder) == []
    assert half_written(folder / "out") == []
    assert list((folder / "scratch").glob("samestep-*")) == []


def test_what_every_rank_refuses_is_said_once(folder: Path) -> None:
    (folder / "model" / "config.json").write_text("{")
    code, err = finish(start(folder, "--engine", "fsdp"), folder)
    assert code == 2
    assert_short_message(err, "model.path")
    assert_nothing_left(folder)


def test_a_rank_that_is_killed_while_it_starts(folder: Path) -> None:
    process = start(folder, "--engine", "fsdp")
    wait_until(lambda: len(ranks_of(folder)) == 2, process)
    os.kill(ranks_of(folder)[1], signal.SIGKILL)
    code, err = finish(process, folder)
    assert code == 1
    assert_short_message(err, "rank 1 died (signal 9) without a message")
    assert_nothing_left(folder)


def test_a_rank_that_is_killed_during_the_run(folder: Path) -> None:
    process = start(folder, "--engine", "zero2", "--set", "train.steps=1000000")
    steps = folder / "out" / "steps.jsonl"
    wait_until(lambda: steps.exists() and steps.stat().st_size, process)
    os.kill(ranks_of(folder)[0], signal.SIGKILL)
    code, err = finish(process, folder)
    assert code == 1
    assert_short_message(err, "rank 0 died (signal 9) without a message")
    assert [step["step"] for step in steps_of(folder / "out")][:1] == [1]
    assert_nothing_left(folder)


def test_ranks_whose_launcher_is_killed_end_by_themselves(folder: Path) -> None:
    process = start(folder, "--engine", "fsdp", "--set", "train.steps=1000000")
    steps = folder / "out" / "steps.jsonl"
    wait_until(lambda: steps.exists() and steps.stat().st_size, process)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(folder) == []
    assert steps_of(folder / "out")
    assert "Traceback" not in (folder / "stderr").read_text()


def test_a_loss_that_is_not_finite_ends_all_ranks(folder: Path) -> None:
    arguments = ("--engine", "ddp", "--set", "train.optimizer.lr=1e30", "--set", "train.steps=9")
    code, err = finish(start(folder, *arguments), folder)
    assert code == 1
    assert_short_message(err, "is not finite", "on_non_finite: skip")
    last = steps_of(folder / "out")[-1]
    assert last["skipped"] is True
    assert None in (last["loss"], last["grad_norm"])
    assert_nothing_left(folder)


def test_a_port_that_another_program_holds(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, err = finish(start(folder, "--engine", "fsdp", "--port", str(port)), folder)
    assert code == 1
    assert_short_message(err, f"port {port} cannot be used")
    assert_nothing_left(folder)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_torchrun_with_another_number_of_ranks(folder: Path) -> None:
    change(folder, {"engine.name": "fsdp", "engine.ranks": 3})
    code, err = finish(start(folder, launcher=TORCHRUN), folder)
    assert code == 1  # torchrun's own
    assert "the recipe asks for 3 ranks, but 2 were started" in err
    # torchrun itself ends with a traceback of its own; ours is not one.
    assert "samestep/" not in "".join(line for line in err.splitlines() if line.lstrip().startswith("File "))
    assert_nothing_left(folder)


def test_torchrun_with_the_recipes_number_of_ranks(folder: Path) -> None:
    code, err = finish(start(folder, "--engine", "ddp", launcher=TORCHRUN), folder)
    assert code == 0, err
    assert len(steps_of(folder / "out")) == 2
    assert (folder / "out" / "export" / "model.safetensors").exists()


def test_single_on_two_ranks(ranks: RankPools, folder: Path) -> None:
    recipe = {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl"), "format": "text"},
        "engine": {"name": "single"},
        "train": {"steps": 2, "micro_batch": 2, "optimizer": {"lr": 1e-2}},
    }
    for answer in ranks.run(2, run_jobs.refusal, recipe=recipe, out=str(folder / "out")):
        assert "single is one process, but 2 were started" in answer
    assert half_written(folder / "out") == []
