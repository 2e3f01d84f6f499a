"""Ranks that die by SIGKILL while a checkpoint is written: the one before is whole, and the run goes on from it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from samestep.checkpoint import store
from samestep.checkpoint.manifest import damages, read_manifest
from tests.distributed import run_jobs
from tests.small_runs import assert_short_message, finish, make_folder, processes_of, ranks_of, start, wait_until

if TYPE_CHECKING:
    from tests.distributed.ranks import RankPools

ROOT = Path(__file__).parents[2]
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find processes")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder to run in; whatever a test leaves running there is ended."""
    yield make_folder(tmp_path)
    for pid in processes_of(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_few_tries_of_the_benchmark() -> None:
    """benchmarks/kill_during_save.py has many."""
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    command = [sys.executable, str(ROOT / "benchmarks" / "kill_during_save.py"), "--tries", "5", "--seed", "5"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 tries, nothing lost: 3 times one rank was killed, 2 times all" in done.stdout


@needs_proc
def test_a_run_goes_on_after_each_kill(folder: Path) -> None:
    """First one rank is killed while a checkpoint is written, then, in the run that went on, every process."""
    often = ("--engine", "fsdp", "--set", "checkpoint.every=1", "--set", "train.steps=20000")
    process = start(folder, *often)
    step = _while_saving(folder, process, after=0)
    os.kill(ranks_of(folder)[1], signal.SIGKILL)
    code, err = finish(process, folder)
    assert code == 1
    assert_short_message(err, "rank 1 died (signal 9)")
    step = _whole(folder, step)
    process = start(folder, *often, "--resume")
    step = _while_saving(folder, process, after=step)
    for pid in [*ranks_of(folder), process.pid]:
        os.kill(pid, signal.SIGKILL)
    finish(process, folder)
    step = _whole(folder, step)
    code, err = finish(start(folder, *often, "--resume", "--stop-after", str(step + 2)), folder)
    assert code == 0, err
    lines = (folder / "out" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 3))
    assert _whole(folder, step) == step + 2
    assert list((folder / "out" / "checkpoints").glob(".*")) == []


def _while_saving(folder: Path, process: subprocess.Popen[str], *, after: int) -> int:
    """Waits until a run writes a checkpoint and two steps after `after` are complete; the newest of them."""
    checkpoints = folder / "out" / "checkpoints"

    def step() -> int:
        return max((int(path.name.removeprefix("step-")) for path in store.complete(checkpoints)), default=0)

    wait_until(lambda: step() >= after + 2 and list(checkpoints.glob(".step-*.partial")), process)
    return step()


def _whole(folder: Path, step: int) -> int:
    """The newest step that is complete after a kill; nothing is running, nothing damaged, and `step` is not lost."""
    deadline = time.monotonic() + 60
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.05)  # what was killed takes a moment to be gone
    assert processes_of(folder) == []
    newest = store.newest(folder / "out")
    manifest = read_manifest(newest)
    assert damages(newest, manifest) == []
    assert manifest.step >= step
    return manifest.step


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_fills_up_on_one_rank(ranks: RankPools, tmp_path: Path, asynchronous: bool) -> None:
    """All ranks end with the message of the one that could not write."""
    folder = make_folder(tmp_path)
    recipe: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl"), "format": "text"},
        "precision": {"max_lost_update_share": None},
        "engine": {"name": "fsdp", "ranks": 2},
        "train": {"steps": 4, "micro_batch": 2, "optimizer": {"lr": 1e-2}},
        "checkpoint": {"every": 2, "asynchronous": asynchronous},
    }
    out = str(folder / "out")
    ranks.run(2, run_jobs.train, recipe=recipe, out=out, stop_after=2)
    for answer in ranks.run(2, run_jobs.full_disk, recipe=recipe, out=out, rank=1, bytes_left=20_000):
        assert "rank 1 cannot write its part: File too large" in answer
    newest = store.newest(folder / "out")
    assert newest.name == "step-00000002"
    assert damages(newest, read_manifest(newest)) == []
    summary, _ = ranks.run(2, run_jobs.train, recipe=recipe, out=out, resume=out)
    assert (summary["status"], summary["steps"]) == ("completed", 4)
