"""Starts a run: here, as the rank torchrun made of this process, or on ranks of its own through torchrun's API."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from samestep import world
from samestep.errors import OutputError, RunError, SamestepError
from samestep.recipe.schema import Recipe
from samestep.training import folder


def train(
    recipe: Recipe,
    out: Path,
    *,
    port: int | None = None,
    json_output: bool = False,
    overwrite: bool = False,
    keep_masters: bool = False,
) -> dict[str, Any] | None:
    """Runs a recipe into the folder `out` and returns its summary (under torchrun on the main rank only).

    `port` is where the ranks meet, by default a free one. Raises SamestepError.
    """
    from samestep.training.rank import Request, run

    request = Request(recipe=recipe, out=out, keep_masters=keep_masters)
    if world.launched():
        if world.launched_rank() == 0:
            folder.prepare(out, overwrite=overwrite)
        return run(request)
    folder.prepare(out, overwrite=overwrite)
    if recipe.engine.name == "single":
        return run(request)
    _launch(request, port)
    return _read_summary(out)


def _launch(request: Any, port: int | None) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    endpoint = f"localhost:{port or 0}"
    if port is not None:
        _require_free(port)
    # The launcher's own reports of a dead rank are long; ours is one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="samestep-") as scratch:
        order = Path(scratch) / "request.json"
        order.write_text(
            json.dumps(
                {
                    "recipe": request.recipe.model_dump(mode="json"),
                    "out": str(request.out),
                    "keep_masters": request.keep_masters,
                }
            ),
            encoding="utf-8",
        )
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=request.recipe.engine.ranks,
            rdzv_backend="c10d",
            rdzv_endpoint=endpoint,
            run_id="samestep",
            max_restarts=0,
            monitor_interval=0.1,
        )
        os.environ.setdefault("OMP_NUM_THREADS", str(request.recipe.engine.threads))
        try:
            elastic_launch(config, entrypoint=sys.executable)("-m", "samestep.training.worker", str(order))
        except ChildFailedError as error:
            raise _reported(Path(scratch), error) from error
        except SignalException as error:
            if (request.out / "summary.json").exists():
                return
            raise RunError("the run was interrupted before its first step was done", where=str(request.out)) from error


def _reported(scratch: Path, error: Any) -> SamestepError:
    """The first message that a rank left, or what the launcher saw of a rank that left none."""
    reports = sorted(scratch.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    if reports:
        report = json.loads(reports[0].read_text(encoding="utf-8"))
        reported = SamestepError(report["message"])
        reported.exit_code = report["exit_code"]
        return reported
    rank, failure = error.get_first_failure()
    how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return RunError(
        f"rank {rank} died ({how}) without a message; the other ranks were ended",
        remedy="Look for a lack of memory, or run the recipe with engine.ranks: 1.",
    )


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
