"""The held-out loss during a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.data import Loader
from samestep.training import folder
from samestep.training.display import Display
from samestep.training.steps import Stepper
from samestep.training.trackers import Tracker
from samestep.world import World


class Evaluations:
    """Evaluates the held-out rows, if there are any; the results are in `made`, evaluations.jsonl and the trackers.

    Every rank must make the same calls. Display and trackers are silent, and none, but on the main one.
    """

    def __init__(
        self,
        held_out: Loader | None,
        stepper: Stepper,
        out: Path,
        world: World,
        display: Display,
        trackers: Sequence[Tracker],
    ) -> None:
        self.made: list[dict[str, Any]] = []
        self._held_out, self._stepper, self._display, self._trackers = held_out, stepper, display, trackers
        self._world = world
        self._path = out / "evaluations.jsonl"

    def add(self, step: int) -> None:
        """Evaluates after `step` steps."""
        if self._held_out is None:
            return
        loss = self.measure()
        record = {"step": step, "loss": folder.finite(loss), "rows": len(self._held_out.examples)}
        self.made.append(record)
        if self._world.is_main:
            lines = folder.JsonLines(self._path)
            lines.write(record)
            lines.close()
            self._display.say(f"held-out loss after {step} steps: {loss:.4f}")
            for tracker in self._trackers:
                tracker.log(step, {"held_out_loss": loss})

    def measure(self) -> float:
        """The held-out loss now; there must be held-out rows."""
        assert self._held_out is not None
        return self._stepper.evaluate(self._held_out)

    def restore(self, step: int) -> None:
        """Goes on with a run that has made `step` steps."""
        if self._world.is_main:
            self.made = folder.keep_lines(self._path, step)
