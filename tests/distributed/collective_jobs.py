"""A job that counts what the ranks send each other in one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samestep import world
from samestep.crosscheck.rank import batches
from samestep.engines import build, loading
from samestep.recipe.schema import Recipe
from samestep.training.steps import Stepper

Call = tuple[str, int]


class _Watch(TorchDispatchMode):
    """Notes torch's own collectives, whoever calls them: (name, elements of its largest floating-point tensor)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [tensor.numel() for tensor in _tensors(args) if tensor.is_floating_point()]
            self.calls.append((func._schema.name.removeprefix("c10d::"), max(sizes, default=0)))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def collectives_of_a_step(recipe: dict[str, Any]) -> list[Call]:
    """The collectives of this rank in the second step: the first one may do what is done once."""
    checked, here = Recipe.model_validate(recipe), world.start(timeout_seconds=60)
    model = loading.load_model(checked, here)
    plan = build.resolve_plan(checked, model)
    engine = build.build(checked, model, plan, here)
    try:
        stepper, loader, watch = Stepper(engine, checked, here, plan), batches(checked), _Watch()
        for index in range(2):
            watch.calls.clear()
            with watch:
                outcome = stepper.step(loader.step(index), index=index, lr=1e-3, measure=False, facts=False)
                stepper.settle(outcome)
        return watch.calls
    finally:
        engine.close()
