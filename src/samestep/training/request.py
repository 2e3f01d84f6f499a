"""What a rank is asked to do. Apart from the rank, so that the launcher need not load a model library to start it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from samestep.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run: the recipe and its folder.

    `keep_masters` also leaves the masters themselves in the run folder. `resume` is the checkpoint to go on from,
    `allow_changes` whether the recipe may be another than its own, `stop_after` the step to end after, with a
    checkpoint.
    """

    recipe: Recipe
    out: Path
    keep_masters: bool = False
    resume: Path | None = None
    allow_changes: bool = False
    stop_after: int | None = None

    def content(self) -> dict[str, Any]:
        """The request as JSON can hold it; `of` reads it."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "out": str(self.out),
            "keep_masters": self.keep_masters,
            "resume": str(self.resume) if self.resume else None,
            "allow_changes": self.allow_changes,
            "stop_after": self.stop_after,
        }

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        resume = content["resume"]
        return cls(
            recipe=Recipe.model_validate(content["recipe"]),
            out=Path(content["out"]),
            keep_masters=content["keep_masters"],
            resume=Path(resume) if resume else None,
            allow_changes=content["allow_changes"],
            stop_after=content["stop_after"],
        )
