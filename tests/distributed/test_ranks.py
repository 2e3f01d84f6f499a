"""The ranks of the tests: one group for many jobs, readable failures, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.ranks import RankFailure, RankPools, Ranks

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(180)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 20.0) -> bool:
    """Whether the processes are gone, or go before the time is up."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def test_results_come_by_rank_and_the_ranks_stay(ranks):
    first = ranks.run(2, jobs.who_am_i)
    assert [(rank, size) for rank, size, _ in first] == [(0, 2), (1, 2)]
    assert ranks.run(2, jobs.who_am_i) == first
    assert ranks.run(2, jobs.sum_of, value=0.5) == [2.0, 2.0]
    assert [t.tolist() for t in ranks.run(2, jobs.echo, tensor=torch.arange(3))] == [[0, 1, 2], [1, 2, 3]]


def test_ranks_of_several_numbers_live_side_by_side(ranks):
    assert ranks.run(1, jobs.sum_of, value=1.0) == [1.0]
    assert ranks.run(4, jobs.sum_of, value=1.0) == [10.0] * 4


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to count threads")
def test_ranks_in_which_jobs_have_left_much_are_replaced(ranks):
    few = ranks.run(1, jobs.make_groups, count=1)
    assert ranks.run(1, jobs.make_groups, count=100) == few
    assert ranks.run(1, jobs.make_groups, count=0) != few
    assert gone(few)


def test_surroundings(ranks):
    one, other = ranks.run(2, jobs.surroundings)
    assert one == other
    assert one["threads"] == 1
    assert one["DS_ACCELERATOR"] == "cpu"
    assert one["HF_HUB_OFFLINE"] == "1"
    alone = ranks.run(1, jobs.surroundings)[0]
    assert alone["MASTER_PORT"] != one["MASTER_PORT"]
    assert alone["TORCH_EXTENSIONS_DIR"] != one["TORCH_EXTENSIONS_DIR"]


@pytest.fixture
def own_ranks():
    """Ranks that the test may lose."""
    pools = RankPools()
    yield pools
    pools.close()


def test_failures_hangs_and_deaths_are_told_and_the_next_job_works(own_ranks):
    first = own_ranks.of(2)
    pids = first.pids
    with pytest.raises(RankFailure) as failure:
        own_ranks.run(2, jobs.fail_on, rank=1)
    message = str(failure.value)
    assert "jobs.fail_on on 2 ranks" in message
    assert "rank 1 failed" in message
    assert "ValueError: rank 1 was told to fail" in message
    assert "rank 0 did not answer" in message
    assert gone(pids, seconds=0)

    assert own_ranks.run(2, jobs.sum_of, value=0.0) == [1.0, 1.0]
    pids = own_ranks.of(2).pids
    with pytest.raises(RankFailure) as failure:
        own_ranks.run(2, jobs.sleep, seconds=600.0, timeout_seconds=1.0)
    message = str(failure.value)
    assert "rank 0 did not answer within 1 s" in message
    assert "rank 1 did not answer within 1 s" in message
    assert "about to sleep" in message
    assert "in sleep" in message  # the stack says where it hangs
    assert gone(pids, seconds=0)

    with pytest.raises(RankFailure, match="rank 0 failed:\ndied with exit code 7"):
        own_ranks.run(2, jobs.die_on, rank=0)
    assert own_ranks.run(2, jobs.sum_of, value=0.0) == [1.0, 1.0]


def test_an_interrupted_test_ends_its_ranks(own_ranks):
    """As a time-out of pytest or Ctrl-C would interrupt it."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    pids = own_ranks.of(2).pids
    usual = signal.signal(signal.SIGALRM, interrupt)
    left, _ = signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            own_ranks.run(2, jobs.sleep, seconds=600.0)
    finally:
        signal.signal(signal.SIGALRM, usual)
        signal.setitimer(signal.ITIMER_REAL, left)
    assert gone(pids, seconds=0)


def test_a_result_that_cannot_travel_is_a_failure(own_ranks):
    with pytest.raises(RankFailure, match="pickle"):
        own_ranks.run(1, jobs.refuse_to_pickle)


def test_closing_leaves_nothing():
    ranks = Ranks(2)
    pids, folder = ranks.pids, ranks.run(jobs.surroundings)[0]["TORCH_EXTENSIONS_DIR"]
    ranks.close()
    assert gone(pids, seconds=0)
    assert not Path(str(folder)).parent.exists()


OWNER = """
import sys, threading
from tests.distributed import jobs
from tests.distributed.ranks import Ranks
if __name__ == "__main__":
    ranks = Ranks(2)
    print(*ranks.pids, flush=True)
    if sys.argv[1] == "busy":
        ranks.run(jobs.sleep, seconds=600.0, timeout_seconds=600.0)
    elif sys.argv[1] == "idle":
        threading.Event().wait()
"""


@pytest.mark.parametrize("owner_is", ["busy", "idle", "done"])
def test_ranks_do_not_outlive_the_session(tmp_path, owner_is):
    """The owner is killed while its ranks work or wait, or ends without closing them."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, str(script), owner_is]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    assert owner.stdout is not None
    try:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        if owner_is != "done":
            assert all(map(is_running, pids))
            owner.send_signal(signal.SIGKILL)
        owner.wait(30)
        assert gone(pids)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
