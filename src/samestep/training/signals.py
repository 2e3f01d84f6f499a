"""Signals while something runs: who handles them, and a request to stop as a question between steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

# One request may come twice: to a whole job by its scheduler, and once more from the launcher, which passes it on.
_SAME_REQUEST_SECONDS = 2.0


@contextmanager
def handled(handle: Callable[[int, object], None], *numbers: int, also_restored: Iterable[int] = ()) -> Generator[None]:
    """Gives these signals to `handle`, and at the end back to whoever had them; those in `also_restored` too, whose
    handlers change in between. A SIGHUP that nohup has had ignored stays ignored. In a thread, where Python lets nobody
    handle signals, nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*numbers, *also_restored)}
    for number in numbers:
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def as_interrupt() -> Generator[None]:
    """SIGTERM and a closed terminal raise KeyboardInterrupt, as Ctrl-C does: what is under way ends in order."""

    def handle(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    with handled(handle, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def stop_requests() -> Generator[Callable[[], bool]]:
    """Turns SIGINT, SIGTERM and SIGHUP into a question that can be asked between steps. A later one ends at once."""
    asked = threading.Event()
    first = 0.0

    def handle(_number: int, _frame: object) -> None:
        nonlocal first
        now = time.monotonic()
        if not asked.is_set():
            first = now
            asked.set()
        elif now - first > _SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt

    with handled(handle, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield asked.is_set
