"""Medians with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median with the quartiles around it, and the number of values. With one value all three are that value."""

    median: float
    lower_quartile: float
    upper_quartile: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Quartiles are interpolated linearly between the values, of which there must be one at least."""
        if len(values) == 1:
            lower = middle = upper = values[0]
        else:
            lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=middle, lower_quartile=lower, upper_quartile=upper, count=len(values))

    def described(self) -> dict[str, Any]:
        """The object in bench.json."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How much longer one takes than another: the median over the rounds of the quotient of both medians of a round,
    and the smallest and largest of these quotients."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Self:
        """`ours` and `theirs` are the values of each round. What slows both in one round cancels."""
        quotients = [statistics.median(a) / statistics.median(b) for a, b in zip(ours, theirs, strict=True)]
        return cls(median=statistics.median(quotients), smallest=min(quotients), largest=max(quotients))
