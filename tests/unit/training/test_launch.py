"""Which of several failures is told: the one that the others follow from."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from samestep import world
from samestep.errors import EngineError, SamestepError
from samestep.training import launch, worker

BROKEN = "unexpected RuntimeError at reduction.py:1: Connection closed by peer"


def report(folder: Path, rank: int, message: str, *, seconds: float, code: int = 1, unexpected: bool = False) -> None:
    content = {"message": message, "exit_code": code, "unexpected": unexpected, "seconds": seconds}
    (folder / f"error-{rank}.json").write_text(json.dumps(content))


def ended(**seen: tuple[int, int]) -> ChildFailedError:
    """What the launcher saw: exit code and second of each rank, given as rank0=(1, 100)."""
    failures = {}
    for name, (code, seconds) in seen.items():
        rank = int(name.removeprefix("rank"))
        failure = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        failure.timestamp = seconds
        failures[rank] = failure
    return ChildFailedError("worker", failures)


def told(folder: Path, error: ChildFailedError) -> SamestepError:
    return launch._reported(folder, error)


def test_a_rank_that_died_without_a_word(tmp_path: Path) -> None:
    error = told(tmp_path, ended(rank1=(-9, 100)))
    assert str(error).startswith("rank 1 died (signal 9) without a message")
    assert error.exit_code == 1


def test_the_rank_that_died_and_not_the_one_that_lost_its_connection(tmp_path: Path) -> None:
    report(tmp_path, 0, BROKEN, seconds=100.3, unexpected=True)
    error = told(tmp_path, ended(rank0=(1, 100), rank1=(-9, 100)))
    assert str(error).startswith("rank 1 died (signal 9)")


def test_an_exit_code_is_said(tmp_path: Path) -> None:
    report(tmp_path, 1, BROKEN, seconds=100.3, unexpected=True)
    assert "rank 0 died (exit code 7)" in str(told(tmp_path, ended(rank0=(7, 100), rank1=(1, 100))))


@pytest.mark.parametrize("code", [-signal.SIGTERM, 128 + signal.SIGTERM])
def test_a_rank_that_we_ended_did_not_fail(tmp_path: Path, code: int) -> None:
    report(tmp_path, 0, "unexpected ValueError at steps.py:1: no", seconds=100.3, unexpected=True)
    error = told(tmp_path, ended(rank0=(1, 100), rank1=(code, 100)))
    assert str(error) == "unexpected ValueError at steps.py:1: no"


def test_a_rank_that_had_to_be_killed_afterwards_did_not_fail(tmp_path: Path) -> None:
    report(tmp_path, 0, "unexpected ValueError at steps.py:1: no", seconds=100.3, unexpected=True)
    assert "ValueError" in str(told(tmp_path, ended(rank0=(1, 100), rank1=(-9, 130))))


def test_a_message_meant_for_people_wins(tmp_path: Path) -> None:
    report(tmp_path, 1, "the data is empty", seconds=100.4, code=2)
    report(tmp_path, 0, BROKEN, seconds=100.3, unexpected=True)
    error = told(tmp_path, ended(rank0=(1, 100), rank1=(2, 100)))
    assert (str(error), error.exit_code) == ("the data is empty", 2)


def test_the_first_of_two_messages(tmp_path: Path) -> None:
    report(tmp_path, 0, "later", seconds=100.5, code=2)
    report(tmp_path, 1, "earlier", seconds=100.4, code=2)
    assert str(told(tmp_path, ended(rank0=(2, 100), rank1=(2, 100)))) == "earlier"


def test_ctrl_c_ends_the_ranks_as_sigterm_does_and_the_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SignalException) as raised, launch._interrupt_as_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGINT)
    assert raised.value.sigval == signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("launcher_lives", [True, False])
def test_a_rank_ends_with_its_launcher(launcher_lives: bool) -> None:
    launcher = os.getppid() if launcher_lives else 0
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    try:
        threading.Thread(target=worker._end_with, args=(launcher,), daemon=True).start()
        deadline = time.monotonic() + (1 if launcher_lives else 30)
        while not asked and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == ([] if launcher_lives else [signal.SIGTERM])


def test_more_ranks_than_the_machine_holds_are_refused_before_any_starts() -> None:
    with pytest.raises(EngineError, match=r"100000 ranks need 25,000 GiB|has no device"):
        world.require_room(100_000)
    world.require_room(1)
