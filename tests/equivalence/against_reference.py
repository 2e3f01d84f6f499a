"""What the plain loop makes of a recipe, and how a run is compared with it."""

from __future__ import annotations

from typing import Any

import torch

from samestep.data import Examples
from samestep.recipe.schema import Recipe
from tests.distributed.ranks import RankPools
from tests.equivalence import reference
from tests.equivalence.trajectories import Trajectory, digest_of, loader_of

Batches = list[list[list[tuple[torch.Tensor, torch.Tensor]]]]
Expected = list[tuple[float, float, float, dict[str, torch.Tensor]]]

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES: dict[str, dict[str, Any]] = {
    "full": {"master": FP32, "compute": FP32, "reduce": FP32},
    "mixed": {"master": FP32, "compute": BF16, "reduce": FP32},
    "low": {"master": BF16, "compute": BF16, "reduce": BF16},
}


def batches_of(recipe: dict[str, Any], examples: Examples) -> Batches:
    """What every rank gets in every micro-batch of every step."""
    checked = Recipe.model_validate(recipe)
    loader = loader_of(checked, examples)
    assert checked.train.steps is not None
    steps = [loader.step(index) for index in range(checked.train.steps)]
    batches = [
        [[step.batch(micro, rank) for rank in range(checked.engine.ranks)] for micro in range(step.micro_steps)]
        for step in steps
    ]
    return [[[(b.input_ids, b.labels) for b in micro] for micro in step] for step in batches]


def reference_run(ranks: RankPools, recipe: dict[str, Any], examples: Examples) -> Expected:
    """Loss, norm, norm after clipping and masters of each step, by the plain loop in a process of its own."""
    checked = Recipe.model_validate(recipe)
    batches = batches_of(recipe, examples)
    (expected,) = ranks.run(
        1,
        reference.train,
        path=checked.model.path,
        batches=batches,
        lrs=linear_by_hand(checked.train.optimizer.lr, checked.train.schedule.warmup_steps, len(batches)),
        decay=checked.train.optimizer.weight_decay,
        max_norm=checked.train.max_grad_norm,
        every=checked.engine.reduce_every,
        **DTYPES[checked.precision.regime],
    )
    return expected


def linear_by_hand(lr: float, warmup: int, steps: int) -> list[float]:
    """The learning rates of a linear schedule: up to lr in `warmup` steps, then down so that a step more would be 0."""
    up = [lr * step / warmup for step in range(1, warmup + 1)]
    return up + [lr * (1 - step / (steps - warmup)) for step in range(steps - warmup)]


def check_equal(run: Trajectory, expected: Expected) -> None:
    """Fails with the first step and quantity in which a run is not what the plain loop made."""
    for index, (step, (loss, norm, clipped, masters)) in enumerate(zip(run.steps, expected, strict=True)):
        seen = (step.loss, step.grad_norm, step.grad_norm_clipped)
        assert seen == (loss, norm, clipped), f"{run.name}, step {index + 1}: loss, norm and clipped norm"
        assert not step.skipped
        assert step.digests.keys() == masters.keys()
        differing = [name for name, tensor in masters.items() if step.digests[name] != digest_of(tensor)]
        assert differing == [], f"{run.name}, step {index + 1}"
    for name, tensor in expected[-1][3].items():
        assert torch.equal(run.masters[name], tensor), f"{run.name}, {name}"
