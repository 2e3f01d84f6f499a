"""Checkpoints that cannot be written: one message, the one before is whole, and the run goes on from it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint import store
from samestep.checkpoint.manifest import damages, read_manifest
from samestep.errors import OutputError
from samestep.recipe import Recipe
from samestep.training import folder
from samestep.training.rank import run
from samestep.training.request import Request
from tests.small_runs import make_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def request(source: Path, *, resume: bool = False, **checkpoint: Any) -> Request:
    """A run into `out`; with `resume`, on from its newest checkpoint."""
    recipe = Recipe.model_validate(
        {
            "model": {"path": str(source / "model")},
            "data": {"path": str(source / "rows.jsonl"), "format": "text"},
            "precision": {"max_lost_update_share": None},
            "engine": {"name": "single", "ranks": 2},
            "train": {"steps": 6, "micro_batch": 2, "optimizer": {"lr": 1e-2}},
            "checkpoint": {"every": 2, **checkpoint},
        }
    )
    out = source / "out"
    out.mkdir(exist_ok=True)
    if resume:
        folder.reopen(out)
    return Request(recipe=recipe, out=out, resume=store.newest(out) if resume else None)


@contextlib.contextmanager
def full_disk(bytes_left: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: for whoever writes, the disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def stopped_after(source: Path, step: int) -> None:
    """A run that was stopped at a checkpoint."""
    asked = request(source)
    run(Request(recipe=asked.recipe, out=asked.out, stop_after=step))


def check_whole(source: Path, step: int) -> None:
    out = source / "out"
    newest = store.newest(out)
    assert newest.name == store.name_of(step)
    assert damages(newest, read_manifest(newest)) == []
    assert (out / "checkpoints" / "latest").read_text() == f"{newest.name}\n"
    assert [path.name for path in (out / "checkpoints").iterdir() if path.name.startswith(".")] == []
    assert not (out / "summary.json").exists()


def check_goes_on(source: Path) -> None:
    summary = run(request(source, resume=True))
    assert summary is not None and (summary["status"], summary["steps"]) == ("completed", 6)
    lines = (source / "out" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert store.newest(source / "out").name == store.name_of(6)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_fills_up(source: Path, asynchronous: bool) -> None:
    stopped_after(source, 2)
    with full_disk(20_000), pytest.raises(OutputError) as caught:
        run(request(source, resume=True, asynchronous=asynchronous))
    assert "rank 0 cannot write its part: File too large" in str(caught.value)
    check_whole(source, 2)
    check_goes_on(source)


@pytest.mark.parametrize("failing", [".metadata.tmp", "manifest.json", ".latest.partial"])
def test_a_disk_that_is_full_in_the_end(source: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """What is written last does not fit any more: when it is flushed, or already when it is written."""
    stopped_after(source, 2)
    fsync, failed = os.fsync, []

    def full(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith(failing):
            failed.append(handle)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match="No space left on device"):
            run(request(source, resume=True))
    assert failed
    # Step 4 itself was complete when only the name of the newest one could not be written.
    step = 4 if failing == ".latest.partial" else 2
    newest = store.newest(source / "out")
    assert newest.name == store.name_of(step)
    assert damages(newest, read_manifest(newest)) == []
    check_goes_on(source)


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that not even root can write to")
def test_a_folder_that_may_not_be_written(source: Path, tmp_path: Path) -> None:
    stopped_after(source, 2)
    checkpoints = source / "out" / "checkpoints"
    kept = checkpoints.rename(source / "kept")
    asked = request(source)
    folder.reopen(asked.out)
    checkpoints.symlink_to("/sys/kernel")
    with pytest.raises(OutputError, match=r"cannot be written: (Operation not permitted|Permission denied|Read-only)"):
        run(Request(recipe=asked.recipe, out=asked.out, resume=store.newest(kept)))
    checkpoints.unlink()
    kept.rename(checkpoints)
    check_whole(source, 2)
    check_goes_on(source)
