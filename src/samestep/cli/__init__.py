"""The command line. Every command is a thin file; this one turns errors into one short message and an exit code.

Exit codes: 0 done; 1 the job ran and its verdict is bad; 2 the request is wrong; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from samestep.errors import SamestepError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Tracebacks are shown with --debug only."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 1
    except KeyboardInterrupt:
        return _end("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output has left; nothing may be written to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        return _report(error, debug)


def _run(arguments: list[str]) -> int:
    from samestep.cli.app import app

    result = app(arguments, prog_name="samestep", standalone_mode=False)
    return result if isinstance(result, int) else 0


def _report(error: Exception, debug: bool) -> int:
    import typer

    if isinstance(error, SamestepError):
        return _end(f"error: {_indented(error)}", error.exit_code)
    if isinstance(error, typer.TyperException):
        return _end(f"error: {error.format_message()}", error.exit_code)
    if isinstance(error, typer.Abort):
        return _end("cancelled", 130)
    hint = "" if debug else " Run it again with --debug for the traceback."
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return _end(f"error: {place}{error.strerror}.{hint}", 1)
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    return _end(f"error: unexpected {type(error).__name__}: {first_line}.{hint}", 1)


def _indented(error: SamestepError) -> str:
    """The message; one of several lines is put under its own headline."""
    lines = str(error).splitlines()
    if len(lines) < 2:
        return str(error)
    return "\n  ".join([*error.args, *lines])


def _end(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
