"""One round of one contender as an order to its ranks, and what they measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from samestep.recipe.schema import Recipe

PARTS = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Order:
    """`warmup` steps are taken first, then `steps` are timed, then `split` are taken apart. `result` is the file for
    what the main rank measured, `log` the one for what the ranks print."""

    recipe: Recipe
    peer: str | None
    warmup: int
    steps: int
    split: int
    result: str
    log: str

    def content(self) -> dict[str, Any]:
        """The order as JSON can hold it; `of` reads it."""
        return vars(self) | {"recipe": self.recipe.model_dump(mode="json")}

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        fields = {name: content[name] for name in cls.__dataclass_fields__}
        return cls(**fields | {"recipe": Recipe.model_validate(content["recipe"])})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One round of one contender.

    `step_seconds` of the timed steps, from before their data until the device is idle, on the main rank; `losses` of
    all steps, the warm-up's first; `rows` the lengths of all rows of each timed step, without padding. `parts`: seconds
    of each part of a split step, on average, and of the whole "step"; "communication" is the time in which a collective
    was under way, within or beside the other parts, None where it was not seen. `peak_memory_bytes` by rank, over the
    timed steps.
    """

    step_seconds: list[float]
    losses: list[float]
    label_tokens: list[int]
    rows: list[list[int]]
    parts: dict[str, float | None]
    peak_memory_bytes: list[int]
    device: str

    def content(self) -> dict[str, Any]:
        return asdict(self)
