"""Starts a run: here, as the rank torchrun made of this process, or on ranks of its own through torchrun's API."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from samestep import world
from samestep.checkpoint import store
from samestep.errors import Interrupted, OutputError, RunError, SamestepError
from samestep.recipe.schema import Engine as EngineRecipe
from samestep.recipe.schema import Recipe
from samestep.training import folder
from samestep.training.request import Request
from samestep.training.signals import as_interrupt, handled

# SIGTERM, by which the launcher ends the ranks that are left.
_ENDED_BY_US = (-15, 143)


def train(
    recipe: Recipe,
    out: Path,
    *,
    port: int | None = None,
    json_output: bool = False,
    overwrite: bool = False,
    keep_masters: bool = False,
    resume: bool = False,
    resume_from: Path | None = None,
    allow_changes: bool = False,
    stop_after: int | None = None,
) -> dict[str, Any] | None:
    """Runs a recipe into the folder `out` and returns its summary (under torchrun on the main rank only).

    `port` is where the ranks meet, by default a free one. `resume` goes on in `out` from its newest complete
    checkpoint, `resume_from` from a checkpoint, or the newest one of a run, elsewhere; `allow_changes` lets the recipe
    be another than the checkpoint's. `stop_after` ends the run after that step, with a checkpoint. Raises
    SamestepError.
    """
    source = out if resume else resume_from
    request = Request(
        recipe=recipe,
        out=out,
        keep_masters=keep_masters,
        resume=store.newest(source) if source else None,
        allow_changes=allow_changes,
        stop_after=stop_after,
    )
    if world.launched() and world.launched_rank() > 0:
        return _run_and_leave(request)
    # Before the ranks have their own handlers; a run that was asked to end must let go of its folder.
    with as_interrupt(), folder.held(out, overwrite=overwrite, again=resume):
        if world.launched():
            return _run_and_leave(request)
        if recipe.engine.name == "single":
            from samestep.training.rank import run

            return run(request)
        _launch(request, port)
        return _read_summary(out)


def _run_and_leave(request: Request) -> dict[str, Any] | None:
    from samestep.training.rank import run

    try:
        return run(request)
    finally:
        # A rank that ends with its connections open can be aborted by those that ended before it.
        world.stop()


def _launch(request: Request, port: int | None) -> None:
    try:
        launch_ranks("samestep.training.worker", request.content(), request.recipe.engine, port=port)
    except Interrupted as error:
        if (request.out / "summary.json").exists():
            return
        raise Interrupted("the run was interrupted before its first step was done", where=str(request.out)) from error


def launch_ranks(
    module: str, content: dict[str, Any], engine: EngineRecipe, *, ranks: int | None = None, port: int | None = None
) -> None:
    """Runs `python -m module REQUEST` on ranks of its own, as many as the engine's or `ranks`, until all have ended.

    REQUEST is a file with `content` as JSON and the launcher's process id, for `worker.run_rank`. Raises SamestepError
    with the message of the rank that failed, Interrupted when it was asked to end.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    world.require_room(ranks or engine.ranks)
    endpoint = f"localhost:{port or 0}"
    if port is not None:
        _require_free(port)
    _silence_elastic()
    with tempfile.TemporaryDirectory(prefix="samestep-") as scratch:
        order = Path(scratch) / "request.json"
        order.write_text(json.dumps({**content, "launcher": os.getpid()}), encoding="utf-8")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks or engine.ranks,
            rdzv_backend="c10d",
            rdzv_endpoint=endpoint,
            run_id="samestep",
            max_restarts=0,
            monitor_interval=0.1,
            # A rank that was asked to end first ends its step and writes what was trained.
            shutdown_timeout=engine.timeout_seconds,
            # Ctrl-C is ours, see below; ranks whose launcher a closed terminal ended stop by themselves.
            signals_to_handle="SIGTERM",
            # Otherwise it makes a folder of its own for logs that nobody asked for, and leaves it.
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        os.environ.setdefault("OMP_NUM_THREADS", str(engine.threads))
        try:
            with _interrupt_as_sigterm():
                elastic_launch(config, entrypoint=sys.executable)("-m", module, str(order))
        except ChildFailedError as error:
            raise _reported(Path(scratch), error) from error
        except SignalException as error:
            raise Interrupted("the ranks were asked to end") from error


def _silence_elastic() -> None:
    """Keeps the launcher's own reports of a dead rank, which are long, off the screen; ours is one line."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _interrupt_as_sigterm() -> Generator[None]:
    """Ctrl-C and a closed terminal reach the ranks as SIGTERM: as SIGINT, it makes a rank that is still starting print
    a traceback."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def handle(_number: int, _frame: object) -> None:
        raise SignalException("interrupted", sigval=signal.SIGTERM)

    # The launcher replaces the handler of SIGTERM and leaves its own behind.
    with handled(handle, signal.SIGINT, signal.SIGHUP, also_restored=[signal.SIGTERM]):
        yield


def _reported(scratch: Path, error: Any) -> SamestepError:
    """The message of the rank that failed first, or what the launcher saw of it when it left none."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in scratch.glob("error-*.json")]
    # A message meant for people comes first: when a rank dies without a word, the others report a broken connection.
    first = min(reports, key=lambda report: (report["unexpected"], report["seconds"]), default=None)
    dead = None if first and not first["unexpected"] else _first_dead(scratch, error, first)
    if dead is None and first is not None:
        reported = SamestepError(first["message"])
        reported.exit_code = first["exit_code"]
        return reported
    rank, failure = dead or error.get_first_failure()
    how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return RunError(
        f"rank {rank} died ({how}) without a message; the other ranks were ended",
        remedy="Look for a lack of memory, or run the recipe with engine.ranks: 1.",
    )


def _first_dead(scratch: Path, error: Any, report: dict[str, Any] | None) -> tuple[int, Any] | None:
    """Rank and failure of a rank that left no report and did not outlive `report`; those that did, we ended."""
    silent = [item for item in error.failures.items() if not (scratch / f"error-{item[0]}.json").exists()]
    limit = report["seconds"] + 1 if report else float("inf")
    silent = [(rank, f) for rank, f in silent if f.exitcode not in _ENDED_BY_US and f.timestamp <= limit]
    return min(silent, key=lambda item: item[1].timestamp, default=None)


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except OSError as error:
            raise RunError(
                f"port {port} cannot be used: {error.strerror}",
                where="--port",
                remedy="Leave it out to take a free one.",
            ) from error


def _read_summary(out: Path) -> dict[str, Any]:
    try:
        return json.loads((out / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError("the run left no summary", where=str(out)) from error
