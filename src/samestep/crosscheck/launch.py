"""Starts the ranks of one side, by torchrun or by `accelerate launch`, and reads what they saw."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from samestep.crosscheck.configs import kind_of
from samestep.crosscheck.side import Observed, Order
from samestep.errors import RunError
from samestep.recipe.schema import Recipe

_SECONDS = 300.0
"""A side takes about 20 s; one that hangs is ended."""
_RANK = "samestep.crosscheck.rank"


def run_side(tool: Any, recipe: Recipe, config: dict[str, Any], rates: list[float] | None = None) -> Observed:
    """Runs one side on its ranks. RunError, with the tool's own last word, when it fails.

    `rates`: what its script sets, instead of the recipe's.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-") as scratch:
        folder = Path(scratch)
        report, order = folder / "report.json", folder / "order.json"
        wanted = Order(tool=tool, recipe=recipe.model_dump(mode="json"), config=config, report=str(report), rates=rates)
        order.write_text(json.dumps(dataclasses.asdict(wanted)), encoding="utf-8")
        ranks = recipe.engine.ranks
        if tool == "accelerate":
            command = _accelerate(config, folder, ranks)
        else:
            command = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        log = _ended([sys.executable, "-m", *command, "-m", _RANK, str(order)], _environment(tool, config, scratch))
        if not report.is_file():
            raise RunError(f"{tool} did not run: {_reason(log)}", remedy="Leave out --check.")
        return Observed(**json.loads(report.read_text(encoding="utf-8")))


def _accelerate(config: dict[str, Any], folder: Path, ranks: int) -> list[str]:
    """The launcher's command line; a DeepSpeed JSON that the file names lies beside it."""
    launcher = dict(config)
    if (inside := launcher.pop("deepspeed_json", None)) is not None:
        named = folder / "deepspeed.json"
        named.write_text(json.dumps(inside), encoding="utf-8")
        launcher["deepspeed_config"] = {**(config.get("deepspeed_config") or {}), "deepspeed_config_file": str(named)}
    file = folder / "accelerate.json"
    file.write_text(json.dumps(launcher), encoding="utf-8")
    return ["accelerate.commands.launch", "--config_file", str(file), f"--num_processes={ranks}",
            "--main_process_port=0"]  # fmt: skip


def _environment(tool: str, config: dict[str, Any], scratch: str) -> dict[str, str]:
    # What the user's own launcher left in the environment is none of this side's.
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    mine |= {"TORCH_EXTENSIONS_DIR": scratch, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
             "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    if tool == "accelerate" and kind_of(config) not in ("DEEPSPEED", "FSDP"):
        mine["ACCELERATE_USE_CPU"] = "true"
    return mine


def _ended(command: list[str], environment: dict[str, str]) -> str:
    """Runs `command` to its end and returns what it wrote to stderr; leaves no process behind."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=_SECONDS)[1]
    except subprocess.TimeoutExpired:
        raise RunError(f"a side of the check did not end within {_SECONDS:g} seconds.") from None
    finally:
        if process.poll() is None:
            # The launcher ends its ranks when it is asked to; they are in sessions of their own.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(45)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(log: str) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = [line.split("]:")[-1].strip() for line in log.splitlines()]
    noise = ("ChildFailedError", "CalledProcessError")
    errors = [line for line in lines if "Error" in line.split(":")[0] and not any(word in line for word in noise)]
    last = [line for line in lines if line][-1:]
    return (errors or last or ["it left no message."])[-1]
