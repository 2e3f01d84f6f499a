"""The process of a variant: how it fails, and that nothing of it stays behind."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from samestep.compare import child
from samestep.errors import OutputError, SamestepError
from samestep.recipe import Recipe, load, parse

GOOD = "name: story\nmodel: {path: ./m}\ndata: {path: d.jsonl}\nengine: {ranks: 2}\ntrain: {steps: 2}\n"


@pytest.fixture
def recipe() -> Recipe:
    return parse(GOOD)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit(3)", r"died \(exit code 3\) without a message. See .*x.log"),
        ("import os; os.kill(os.getpid(), 9)", r"died \(signal 9\) without a message"),
    ],
)
def test_a_process_that_dies_without_a_word(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with child.Child(recipe, tmp_path / "x", tmp_path / "x.log") as started:
        assert started.ended(60)
        failure = started.failure()
    assert failure is not None
    assert failure.exit_code == 1
    with pytest.raises(SamestepError, match=message):
        raise failure


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find what a process started")
def test_leaving_early_ends_the_process_and_what_it_started(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    # Deaf to SIGTERM, with a child in a session of its own, as ranks are.
    script.write_text(
        f"#!{sys.executable}\n"
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"rank = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(rank.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(child, "_GRACE_SECONDS", 0.5)
    log = tmp_path / "x.log"
    with child.Child(recipe, tmp_path / "x", log) as started:
        while not log.read_text().endswith("\n"):
            assert not started.ended(0.05)
    assert started.ended(0)
    # It was sent SIGKILL and is nobody's child here, so its end is waited for; it would sleep for longer than that.
    deadline = time.monotonic() + 30
    while not _has_ended(int(log.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _has_ended(int(log.read_text()))


def _has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that whoever adopted it has not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_log_that_cannot_be_written(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        child.Child(recipe, tmp_path / "x", tmp_path / "no" / "x.log")


def test_recipes_survive_the_way_to_the_process(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    recipe = load(tmp_path / "r.yaml", ["engine.offload={optimizer: cpu}", "engine.name=zero3", "data.held_out=0.25"])
    assert Recipe.model_validate(json.loads(json.dumps(recipe.model_dump(mode="json")))) == recipe


def test_it_sees_the_devices_that_it_was_given(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as this process sees them: what is its device 1 may be the machine's device 6."""
    seen, script = tmp_path / "seen", tmp_path / "python"
    write = f"import os; open({str(seen)!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    script.write_text(f"#!{sys.executable}\n{write}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    for ours, told in ((None, "2,1"), ("4,6,GPU-7", "GPU-7,6")):
        if ours is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)
        with child.Child(recipe, tmp_path / "x", tmp_path / "x.log", devices="2,1") as running:
            assert running.ended(60)
        assert seen.read_text() == told
