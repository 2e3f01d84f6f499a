"""Being asked to stop: Ctrl-C, SIGTERM and a closed terminal as a question that can be asked between steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

# One request may come twice: to a whole job by its scheduler, and once more from the launcher, which passes it on.
_SAME_REQUEST_SECONDS = 2.0


@contextmanager
def stop_requests() -> Generator[Callable[[], bool]]:
    """Turns SIGINT, SIGTERM and SIGHUP into a question that can be asked between steps. A later one ends at once."""
    asked = threading.Event()
    first = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handle(_number: int, _frame: object) -> None:
        nonlocal first
        now = time.monotonic()
        if not asked.is_set():
            first = now
            asked.set()
        elif now - first > _SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
