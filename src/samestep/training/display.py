"""What a person sees while a run goes on: a line of progress on a terminal, plain lines elsewhere. On stderr."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from samestep.console import say
from samestep.dtypes import dtype_name
from samestep.precision.plan import ROLES, Plan
from samestep.training.folder import StepRecord


class Display:
    """Shows a run on the main rank; `quiet` shows nothing (the other ranks)."""

    def __init__(self, *, steps: int, every: int, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._every = every
        self._steps = steps
        self._taken = self._skipped = 0
        self._progress: Progress | None = None
        if self._console.is_terminal and not quiet:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task("", total=steps)
            self._progress.start()

    def plan(self, plan: Plan, *, engine: str, ranks: int) -> None:
        """Prints the precision table."""
        table = Table(
            title=f"{engine} on {ranks} rank{'s' if ranks > 1 else ''}, regime {plan.regime}", title_justify="left"
        )
        table.add_column("role")
        table.add_column("dtype")
        table.add_column("because")
        for role in ROLES:
            entry = plan.roles[role]
            table.add_row(role, ", ".join(map(dtype_name, entry.dtypes)) or "-", entry.reason)
        self._console.print(table)

    def say(self, text: str) -> None:
        say(self._console, text)

    def step(self, record: StepRecord) -> None:
        self._taken += 1
        self._skipped += record.skipped
        text = (
            f"loss {_shown(record.loss)}  grad norm {_shown(record.grad_norm)}  lr {record.lr:.3g}{_vanishing(record)}"
        )
        if self._progress:
            self._progress.update(self._task, completed=record.step, description=text)
        elif record.step % self._every == 0 or record.step == self._steps:
            self.say(f"step {record.step}/{self._steps}  {text}")

    def ended(self, status: str, *, steps: int, out: Path) -> None:
        """Says, after the last step, how many moved nothing, and where the results are."""
        if self._skipped:
            none = " No weight has moved." if self._skipped == self._taken else ""
            what = "were skipped, since their loss or gradient was not finite"
            self.say(f"{self._skipped} of {self._taken} steps {what}.{none}")
        self.say(f"{'done' if status == 'completed' else 'stopped as asked'} after {steps} steps: {out}")

    def close(self) -> None:
        if self._progress:
            self._progress.stop()


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _vanishing(record: StepRecord) -> str:
    """Updates that came to nothing, where they were measured."""
    text = "" if record.lost_update_share is None else f"  lost updates {record.lost_update_share:.0%}"
    if record.unseen_update_share:
        text += f"  unseen {record.unseen_update_share:.0%}"
    if record.tensors_never_moved:
        text += f"  tensors that never moved {record.tensors_never_moved}"
    return text
