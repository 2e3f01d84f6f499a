"""`samestep bench` as people run it: real ranks, an engine of ours and a loop of another tool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_runs import change, make_folder, processes_of


def test_an_engine_and_a_loop_take_turns(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    folder = make_folder(tmp_path, rows=40)
    change(folder, {"engine.name": "fsdp", "precision.regime": "full", "train.max_grad_norm": 0.5})
    arguments = ["--engines", "zero3", "--against", "fsdp2", "--rounds", "1"]
    arguments += ["--warmup", "1", "--steps", "2", "--split", "1", "--out", "b"]
    done = subprocess.run(
        [sys.executable, "-m", "samestep", "bench", "r.yaml", *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "scratch"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "b" / "bench.json").read_text())
    ours, raw = report["rows"]
    assert [row["engine"] for row in report["rows"]] == ["zero3", "fsdp2"]
    # The same work, to fp32's rounding: the loop has its own clipping and its own sums.
    assert ours["losses"]["bit_equal"]
    assert raw["losses"]["max_abs_gap"] < 1e-4
    assert list(report["ratios"]) == ["zero3/fsdp2"]
    lines = [json.loads(line) for line in (folder / "b" / "rounds.jsonl").read_text().splitlines()]
    for row, line in zip(report["rows"], lines, strict=True):
        assert len(line["step_seconds"]) == 2
        assert row["mfu"] is None
        assert len(row["peak_memory_bytes_by_rank"]) == 2
        assert all(value is not None and value > 0 for value in row["split_seconds"].values()), row["split_seconds"]
    assert "| samestep zero3 |" in (folder / "b" / "bench.md").read_text()
    assert processes_of(folder) == []
