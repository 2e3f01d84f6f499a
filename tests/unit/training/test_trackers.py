"""TensorBoard and trackio get what steps.jsonl has, and nothing is written elsewhere."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from samestep import world
from samestep.cli import main
from tests.small_runs import change, make_folder, steps_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_folder(tmp_path)


def test_tensorboard(folder: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    change(folder, {"log.trackers": ["tensorboard"], "log.every": 2, "train.steps": 5, "data.held_out": 3})
    try:
        assert main(["train", "r.yaml", "--out", "out"]) == 0
    finally:
        world.stop()
    events = EventAccumulator(str(folder / "out" / "tensorboard"))
    events.Reload()
    steps = {step["step"]: step for step in steps_of(folder / "out")}
    for name in ("loss", "grad_norm", "grad_norm_clipped", "lr"):
        seen = {event.step: event.value for event in events.Scalars(name)}
        assert sorted(seen) == [2, 4]
        # TensorBoard keeps fp32.
        assert seen == {step: pytest.approx(steps[step][name], rel=1e-6) for step in seen}
    held_out = {event.step: event.value for event in events.Scalars("held_out_loss")}
    evaluations = json.loads((folder / "out" / "summary.json").read_text())["evaluations"]
    assert held_out == {row["step"]: pytest.approx(row["loss"], rel=1e-6) for row in evaluations}


@pytest.mark.slow
def test_trackio(folder: Path) -> None:
    pytest.importorskip("trackio")
    change(folder, {"log.trackers": ["trackio"], "train.steps": 3})
    (folder / "home").mkdir()
    # A process of its own: trackio reads its folder when it is imported.
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder / "home")}
    command = [sys.executable, "-m", "samestep", "train", "r.yaml", "--out", "out", "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "completed"
    with sqlite3.connect(folder / "trackio" / "samestep.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert {name for name, _, _ in rows} == {"tiny"}
    logged = {step: json.loads(metrics) for _, step, metrics in rows}
    steps = {step["step"]: step for step in steps_of(folder / "out")}
    assert {step: values["loss"] for step, values in logged.items()} == {n: s["loss"] for n, s in steps.items()}
    assert not [path for path in (folder / "home").rglob("*") if "trackio" in path.name]
