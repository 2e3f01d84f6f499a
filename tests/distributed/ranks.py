"""Real ranks for tests: processes that join one gloo group once and then run one job after another.

A job is an importable function; every rank calls it with the same keyword arguments, and the results come back in
the order of ranks. Starting a rank costs seconds of imports, so a session keeps its ranks. A job that fails or hangs
takes its ranks with it, since nobody knows what state they are in; the next job gets fresh ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_START_SECONDS = 120.0
_GRACE_SECONDS = 5.0
"""How long the other ranks may still work once one has failed."""
_MOST_THREADS = 200
"""Every gloo group that a job makes leaves three threads behind, one of which wakes up a hundred times a second."""
_LOG_LINES = 40
_STACK_FRAMES = 10


class RankFailure(Exception):
    """A job that raised, hung or lost a rank; the message says which rank and how."""


class Ranks:
    """`size` live ranks. `run` raises RankFailure and ends all of them when a job does not succeed on every rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        # Spawned, not forked: threads that torch has started here would not survive a fork.
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                arguments = (theirs, rank, size, self._folder.name)
                process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank} of {size}")
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            # Rank 0 takes a free port and says which, so no two groups can meet on one.
            port = self._collect("start", [0], _START_SECONDS)[0]
            for pipe in self._pipes[1:]:
                pipe.send_bytes(pickle.dumps(port))
            self._collect("start", range(size), _START_SECONDS)
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    @property
    def worn(self) -> bool:
        """Whether what jobs have left in these ranks costs more than new ones; never where the system does not tell."""
        tasks = Path(f"/proc/{self.pids[0]}/task")
        return tasks.is_dir() and len(list(tasks.iterdir())) > _MOST_THREADS

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(self, job: Callable[..., Any], *, timeout_seconds: float = 90.0, **arguments: Any) -> list[Any]:
        """Calls `job(**arguments)` on every rank and returns the results by rank."""
        name = f"{job.__module__}.{job.__qualname__}"
        order = pickle.dumps((job, arguments))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(order)
            return self._collect(name, range(self.size), timeout_seconds)
        except BaseException:  # a test that is interrupted leaves its job behind as well
            self.kill()
            raise

    def _collect(self, what: str, ranks: Iterable[int], seconds: float) -> list[Any]:
        """One answer of each of the ranks. Raises RankFailure when one of them is a failure or does not come."""
        waiting = {self._pipes[rank]: rank for rank in ranks}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    succeeded, content = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(_GRACE_SECONDS)
                    succeeded, content = False, f"died with exit code {self._processes[rank].exitcode}"
                (results if succeeded else failures)[rank] = content
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures or waiting:
            raise RankFailure(self._story(what, failures, sorted(waiting.values()), seconds))
        return [results[rank] for rank in sorted(results)]

    def _story(self, what: str, failures: dict[int, str], silent: list[int], seconds: float) -> str:
        self._ask_for_stacks(silent)
        lines = [f"{what} on {self.size} ranks"]
        lines += [f"rank {rank} failed:\n{text}" for rank, text in sorted(failures.items())]
        for rank in silent:
            after = "while another one had failed" if failures else f"within {seconds:g} s"
            lines.append(f"rank {rank} did not answer {after}; its output ends with:\n{self._log(rank)}")
        return "\n".join(lines)

    def _ask_for_stacks(self, silent: list[int]) -> None:
        for rank in silent:
            with contextlib.suppress(OSError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if silent:
            time.sleep(0.5)

    def _log(self, rank: int) -> str:
        path = Path(self._folder.name) / f"rank-{rank}.log"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return "\n".join(text.splitlines()[-_LOG_LINES:])

    def close(self) -> None:
        """Ends idle ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        for process in self._processes:
            process.join(_GRACE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Ends the ranks whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()


class RankPools:
    """Ranks by number, started when first asked for and again when they are gone."""

    def __init__(self) -> None:
        self._pools: dict[int, Ranks] = {}

    def of(self, size: int) -> Ranks:
        pool = self._pools.get(size)
        if pool is None or not pool.alive or pool.worn:
            if pool is not None:
                pool.kill()
            pool = self._pools[size] = Ranks(size)
        return pool

    def run(self, size: int, job: Callable[..., Any], *, timeout_seconds: float = 90.0, **arguments: Any) -> list[Any]:
        """Calls `job(**arguments)` on `size` ranks and returns the results by rank. Raises RankFailure."""
        return self.of(size).run(job, timeout_seconds=timeout_seconds, **arguments)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _serve(pipe: Connection, rank: int, size: int, folder: str) -> None:
    """What a rank does all its life."""
    _prepare(rank, size, Path(folder))
    try:
        _join_group(pipe, rank, size)
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc(limit=-_STACK_FRAMES))))
        return
    pipe.send_bytes(pickle.dumps((True, None)))
    modules = 0
    while order := pipe.recv_bytes():
        try:
            job, arguments = pickle.loads(order)
            if len(sys.modules) != modules:
                # DeepSpeed collects garbage several times per engine; what libraries left at import is none.
                modules = len(sys.modules)
                gc.freeze()
            # Plain pickle copies tensors; the pipe's own would hand over shared memory.
            answer = pickle.dumps((True, job(**arguments)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc(limit=-_STACK_FRAMES)))
        pipe.send_bytes(answer)
    # Nothing that a library does at exit may keep a rank alive.
    os._exit(0)


def _prepare(rank: int, size: int, folder: Path) -> None:
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the session's to handle
    faulthandler.register(signal.SIGUSR1, file=2)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="localhost",
        DS_ACCELERATOR="cpu",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        TORCH_EXTENSIONS_DIR=str(folder / "extensions"),
    )


def _join_group(pipe: Connection, rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        pipe.send_bytes(pickle.dumps((True, store.port)))
    else:
        store = dist.TCPStore("localhost", pickle.loads(pipe.recv_bytes()), is_master=False, wait_for_workers=False)
    os.environ["MASTER_PORT"] = str(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _die_with(sentinel: int) -> None:
    """Ends this process when the one that started it is gone, whatever the job is doing."""
    wait([sentinel])
    os._exit(1)
