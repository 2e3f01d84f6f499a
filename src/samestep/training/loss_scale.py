"""Dynamic loss scaling for fp16: one rule on every engine."""

from __future__ import annotations

from collections.abc import Mapping

from samestep.recipe.schema import LossScale


class DynamicScale:
    """The factor on the loss. It halves when a gradient overflows, and doubles after a quiet spell."""

    def __init__(self, recipe: LossScale) -> None:
        self.value = recipe.initial
        self._recipe = recipe
        self._good_steps = 0

    @property
    def can_shrink(self) -> bool:
        return self.value > self._recipe.minimum

    def overflowed(self) -> None:
        self.value = max(self._recipe.minimum, self.value / 2)
        self._good_steps = 0

    def went_well(self) -> None:
        self._good_steps += 1
        if self._good_steps == self._recipe.growth_interval:
            self.value *= 2
            self._good_steps = 0

    def state(self) -> dict[str, float]:
        """What a checkpoint has of it."""
        return {"value": self.value, "good_steps": self._good_steps}

    def restore(self, state: Mapping[str, float]) -> None:
        self.value, self._good_steps = state["value"], int(state["good_steps"])
