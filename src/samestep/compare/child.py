"""The process of one variant: started quiet, watched, and ended together with its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from samestep.errors import OutputError, RunError, SamestepError
from samestep.recipe import Recipe

# Longer than the 30 seconds that the launcher gives its ranks to end.
_GRACE_SECONDS = 45.0
# Read by CUDA, and by ROCm's build of torch as well.
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Child:
    """A variant's process. As a context, it leaves no process behind. What it prints goes to the file `log`; with
    `resume` it goes on from the newest checkpoint in `out`, and the log too goes on. It sees the accelerators `devices`
    ("0,1") alone; None is for all."""

    def __init__(
        self, recipe: Recipe, out: Path, log: Path, *, resume: bool = False, devices: str | None = None
    ) -> None:
        self._log = log
        self._scratch = tempfile.TemporaryDirectory(prefix="samestep-")
        order = Path(self._scratch.name) / "request.json"
        self._report = order.with_name("error.json")
        request = {"recipe": recipe.model_dump(mode="json"), "out": str(out), "resume": resume}
        order.write_text(json.dumps(request), encoding="utf-8")
        try:
            with open(log, "ab" if resume else "wb") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "samestep.compare.worker", str(order)],
                    # The child sees this pipe close when we die; see worker.
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ if devices is None else {**os.environ, _VISIBLE: _named(devices)},
                    # Ctrl-C reaches us alone; we end the child in order.
                    start_new_session=True,
                )
        except OSError as error:
            self._scratch.cleanup()
            raise OutputError(f"cannot be written: {error.strerror or error}.", where=str(log)) from error

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._process.poll() is None:
                self._end()
        finally:
            if self._process.stdin:
                self._process.stdin.close()
            self._scratch.cleanup()

    def ended(self, seconds: float) -> bool:
        """Whether the process ends within `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def failure(self) -> SamestepError | None:
        """Why the ended process failed; None when it did not."""
        code = self._process.returncode
        if code == 0:
            return None
        if self._report.exists():
            report = json.loads(self._report.read_text(encoding="utf-8"))
            error = SamestepError(report["message"])
            error.exit_code = report["exit_code"]
            return error
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return RunError(f"the run died ({how}) without a message.", remedy=f"See {self._log}.")

    def _end(self) -> None:
        """Asks the process to end, its ranks included; after some seconds, or a second interrupt, kills all of them."""
        try:
            self._process.terminate()
            self._process.wait(_GRACE_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            # Ranks are in sessions of their own, so there is no group to kill.
            for pid in [*_descendants(self._process.pid), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()


def _named(devices: str) -> str:
    """These devices, counted as this process sees them, by the names that a new process knows them by."""
    ours = os.environ.get(_VISIBLE)
    return ",".join(ours.split(",")[int(device)] if ours else device for device in devices.split(","))


def _descendants(pid: int) -> Iterator[int]:
    """Processes below `pid`, deepest first; none where the system does not tell."""
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(text) for text in listing.read_text().split()]
        except OSError:
            continue
        for child in children:
            yield from _descendants(child)
            yield child
