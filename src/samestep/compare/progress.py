"""What a person sees while variants run: one bar on a terminal, plain lines elsewhere. On stderr."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from samestep.console import say
from samestep.errors import RecipeError
from samestep.recipe import load


class VariantProgress:
    """Follows one variant through the files of its run; `bar` is for a terminal. Use as a context."""

    def __init__(self, console: Console, *, name: str, number: int, variants: int, run: Path, bar: bool) -> None:
        self._console = console
        self._title = f"variant {number} of {variants}  {name}"
        self._run = run
        self._step = 0
        self._total: int | None = None
        self._offset = 0
        self._bar: Progress | None = None
        if bar:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[state]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(self._title, total=None, state="starting")

    def __enter__(self) -> VariantProgress:
        if self._bar:
            self._bar.start()
        else:
            say(self._console, self._title)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def look(self) -> None:
        """Shows what the run has done since the last look."""
        self._total = self._total or _planned_steps(self._run / "recipe.yaml")
        before, self._step = self._step, self._step + self._new_steps()
        if not self._total:
            return
        if not self._bar:
            # A line for every quarter; the last one is left to `done`.
            if 4 * before // self._total < 4 * self._step // self._total < 4:
                say(self._console, f"{self._title}  step {self._step} of {self._total}")
            return
        state = f"step {self._step} of {self._total}"
        if self._step == self._total:
            state = "writing the weights"
        elif self._step == 0:
            state = f"before step 1 of {self._total}"
        self._bar.update(self._task, total=self._total, completed=self._step, state=state)

    def done(self, loss: float | None) -> None:
        """Leaves one line on a variant that ended well."""
        shown = "not finite" if loss is None else f"{loss:.4f}"
        say(self._console, f"{self._title}  {self._step} steps, last loss {shown}")

    def _new_steps(self) -> int:
        try:
            with open(self._run / "steps.jsonl", "rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return 0
        self._offset += len(new)
        return new.count(b"\n")


def _planned_steps(recipe: Path) -> int | None:
    """The steps of the resolved recipe; None until the run has written it."""
    if not recipe.exists():
        return None
    try:
        return load(recipe).train.steps
    except RecipeError:
        return None
