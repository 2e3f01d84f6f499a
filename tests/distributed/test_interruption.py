"""Ctrl-C and SIGTERM: the step is finished, what was trained is exported, every process ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from samestep.checkpoint import store
from samestep.checkpoint.manifest import damages, read_manifest
from tests.small_runs import (
    assert_short_message,
    finish,
    half_written,
    make_folder,
    processes_of,
    ranks_of,
    start,
    steps_of,
    wait_until,
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find processes")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


@pytest.mark.parametrize(
    ("engine", "number", "to"),
    [
        ("single", signal.SIGHUP, "process"),
        ("fsdp", signal.SIGTERM, "every process"),
        ("zero2", signal.SIGINT, "group"),
    ],
)
def test_a_run_that_is_asked_to_end(folder: Path, engine: str, number: signal.Signals, to: str) -> None:
    """A terminal sends Ctrl-C to the group, and SIGHUP when it is closed; a scheduler sends SIGTERM to one process or
    to every one of the job."""
    process = start(folder, "--engine", engine, "--set", "train.steps=1000000")
    steps = folder / "out" / "steps.jsonl"
    wait_until(lambda: steps.exists() and len(steps.read_text().splitlines()) > 2, process)
    if to == "process":
        process.send_signal(number)
    elif to == "group":
        os.killpg(process.pid, number)
    else:
        for pid in [*ranks_of(folder), process.pid]:
            os.kill(pid, number)
    code, err = finish(process, folder)
    assert code == 130, err
    assert "Traceback" not in err
    assert "stopped as asked after" in err
    assert "torch/distributed" not in err
    assert processes_of(folder) == []
    assert half_written(folder / "out") == ["export", "summary.json"]
    done = steps_of(folder / "out")
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", len(done))
    assert [step["step"] for step in done] == list(range(1, len(done) + 1))
    checkpoint = store.newest(folder / "out")
    assert checkpoint.name == f"step-{len(done):08d}"
    assert damages(checkpoint, read_manifest(checkpoint)) == []
    model = AutoModelForCausalLM.from_pretrained(folder / "out" / "export", dtype="auto")
    assert model.num_parameters() > 3000


def test_asked_before_the_first_step(folder: Path) -> None:
    process = start(folder, "--engine", "fsdp")
    wait_until(lambda: len(ranks_of(folder)) == 2, process)
    process.send_signal(signal.SIGINT)
    code, err = finish(process, folder)
    assert code == 130
    assert_short_message(err, "interrupted before its first step")
    # The launcher may have been asked before it knew the ranks that it had just started; these see that it is gone.
    deadline = time.monotonic() + 60
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(folder) == []
    assert half_written(folder / "out") == []
