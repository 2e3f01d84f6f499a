"""One rank of one round as a process of its own: `python -m samestep.bench.worker ORDER`. Started by `run`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from samestep.training.worker import run_rank


def _round(content: dict[str, Any]) -> None:
    from samestep.bench.order import Order
    from samestep.bench.rank import measure

    order = Order.of(content)
    # What the engines and libraries print is kept, but not on the screen.
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    measure(order)


if __name__ == "__main__":
    code = run_rank(Path(sys.argv[1]), _round)
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. Threads that a library or the profiler has left would abort an orderly exit now and then.
    os._exit(code)
