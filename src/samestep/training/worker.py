"""One rank of a run as a process of its own: `python -m samestep.training.worker REQUEST`. Started by `launch`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.errors import SamestepError


def run_rank(order: Path, work: Callable[[dict[str, Any]], None]) -> int:
    """Does `work` with the content of the request and returns the exit code; a failure is left beside the request as
    one message for the launcher."""
    try:
        content = json.loads(order.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 130  # the launcher was interrupted while it started us
    threading.Thread(target=_end_with, args=(content["launcher"],), daemon=True).start()
    warnings.filterwarnings("ignore")
    from samestep import world

    try:
        work(content)
    except SamestepError as error:
        return _fail(order, str(error), error.exit_code, unexpected=False)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        import traceback

        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        return _fail(order, f"unexpected {type(error).__name__} at {place}: {first_line}", 1, unexpected=True)
    finally:
        world.stop()
    return 0


def _end_with(launcher: int) -> None:
    """Asks this process to end once its launcher is gone, however that died."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def _fail(order: Path, message: str, exit_code: int, *, unexpected: bool) -> int:
    from samestep import world

    report = order.with_name(f"error-{world.launched_rank()}.json")
    content = {"message": message, "exit_code": exit_code, "unexpected": unexpected, "seconds": time.time()}
    report.write_text(json.dumps(content), encoding="utf-8")
    return exit_code


def _train(content: dict[str, Any]) -> None:
    from samestep.training.rank import run
    from samestep.training.request import Request

    run(Request.of(content))


if __name__ == "__main__":
    sys.exit(run_rank(Path(sys.argv[1]), _train))
