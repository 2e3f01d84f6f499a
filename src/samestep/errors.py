"""Errors that a user can act on.

Every error says what is wrong, where, and what to do. The command line prints `str(error)` and exits
with `exit_code`: 2 when the request is wrong, 1 when a job ran and its verdict is bad, 130 when it was interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass


class SamestepError(Exception):
    """Base of every error that is reported as one short message and never as a traceback."""

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(what)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        stop = "" if self.what.endswith((".", "!", "?")) else "."
        remedy = f"{stop} {self.remedy}" if self.remedy else ""
        return f"{place}{self.what}{remedy}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong in a recipe. `line` counts from 1; None when the value came from an override."""

    field: str
    what: str
    line: int | None = None


class RecipeError(SamestepError):
    """All problems of one recipe at once."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        super().__init__(f"{len(problems)} problem{'s' if len(problems) != 1 else ''} in {source}")

    def __str__(self) -> str:
        rows = []
        for problem in self.problems:
            place = f"{self.source}:{problem.line}" if problem.line else self.source
            field = f"{problem.field}: " if problem.field else ""
            rows.append(f"{place}: {field}{problem.what}")
        return "\n".join(rows)


class DataError(SamestepError):
    """Data that cannot be read, or that leaves nothing to train on."""


class ModelError(SamestepError):
    """A model or tokenizer that cannot be loaded, or does not fit the recipe."""


class EngineError(SamestepError):
    """An engine that cannot do what the recipe asks; raised before any training."""


class PrecisionError(SamestepError):
    """A run that its dtypes would make pointless; raised before its first step."""


class OutputError(SamestepError):
    """A place that cannot be written."""


class CheckpointError(SamestepError):
    """A checkpoint that is damaged, or that does not belong to the run."""


class RunError(SamestepError):
    """A run that started and could not go on (a dead rank, a non-finite loss)."""

    exit_code = 1


class Interrupted(SamestepError):
    """A run that was asked to end (Ctrl-C, SIGTERM)."""

    exit_code = 130


class VerificationError(SamestepError):
    """The live run broke its precision plan."""

    exit_code = 1
