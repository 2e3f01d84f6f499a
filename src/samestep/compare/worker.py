"""One variant as a process of its own: `python -m samestep.compare.worker REQUEST`. Started by `child`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

from samestep.errors import SamestepError


def main(order: Path) -> int:
    """Runs the recipe in the request; a failure is left beside the request as one message for the parent."""
    warnings.filterwarnings("ignore")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    content = json.loads(order.read_text(encoding="utf-8"))
    try:
        from samestep import world
        from samestep.recipe import Recipe
        from samestep.training.launch import train

        try:
            recipe, out = Recipe.model_validate(content["recipe"]), Path(content["out"])
            train(recipe, out, keep_masters=True, resume=content["resume"])
        finally:
            world.stop()
    except SamestepError as error:
        return _fail(order, str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        _fail(order, f"unexpected {type(error).__name__}: {first_line}", 1)
        # Standard error is the variant's log: the place for the rest.
        raise
    return 0


def _end_with_parent() -> None:
    """Asks this process to end once the parent's end of the pipe is closed, however the parent died."""
    # Not through sys.stdin: a thread that waits in it would abort the interpreter's shutdown.
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _fail(order: Path, message: str, exit_code: int) -> int:
    report = order.with_name("error.json")
    report.write_text(json.dumps({"message": message, "exit_code": exit_code}), encoding="utf-8")
    return exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
