"""The guard: a run whose updates rounding would mostly lose does not start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from samestep import models
from samestep.data import prepare
from samestep.dtypes import dtype_name
from samestep.engines.build import resolve_plan
from samestep.engines.protocol import Shard
from samestep.errors import PrecisionError
from samestep.precision import lost_updates
from samestep.precision.plan import Plan
from samestep.recipe.schema import Recipe
from samestep.training import setup
from samestep.training.outlook import learning_rates
from samestep.world import World, gather_numbers

_ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def refuse_run(
    recipe: Recipe, plan: Plan, masters: Callable[[], Sequence[Shard]], rates: Sequence[float], world: World
) -> None:
    """Refuses a run whose updates would be lost, as far as the recipe limits that and it can be known beforehand.

    `masters` gives those of this rank, `rates` is the learning rate of every step. Raises PrecisionError.
    """
    # Roundings other than to nearest lose nothing.
    if _can_be_known(recipe) and plan.update == "nearest":
        refuse_lost_updates(
            masters(),
            peak_lr=max(rates),
            limit=recipe.precision.max_lost_update_share,
            world=world,
            regime=plan.regime,
        )


def refuse_recipe(recipe: Recipe) -> None:
    """Raises what the run of this recipe would raise at its start, without starting it: PrecisionError, or an error of
    its model or data. Holds the model on the CPU for a moment.

    Looks at low-precision masters only, since fp32 ones lose nothing at rates that train: what is left, the run sees.
    """
    if not recipe.precision.loses_updates or not _can_be_known(recipe):
        return
    steps = recipe.train.steps
    if steps is None:
        tokenizer = models.load_tokenizer(recipe.model)
        data = prepare(recipe.data, tokenizer, seed=recipe.train.seed)
        steps = setup.total_steps(recipe, setup.training_loader(data, recipe, tokenizer))
    model = models.load_model(recipe.model, seed=recipe.train.seed)
    plan = resolve_plan(recipe, model)
    refuse_run(recipe, plan, lambda: _masters(model, plan), learning_rates(recipe, steps), _ALONE)


def _can_be_known(recipe: Recipe) -> bool:
    """Whether there is a limit, and a size of updates to hold against it: that of SGD's is not known beforehand."""
    return recipe.precision.max_lost_update_share is not None and recipe.train.optimizer.name == "adamw"


def _masters(model: nn.Module, plan: Plan) -> list[Shard]:
    """The masters that the plan gives a whole model, as samples would find them."""
    return [
        Shard(name=name, shape=tuple(p.shape), start=0, values=p.detach().reshape(-1).to(plan.master))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]


def refuse_lost_updates(
    masters: Sequence[Shard], *, peak_lr: float, limit: float | None, world: World, regime: str = "low"
) -> None:
    """Raises PrecisionError when AdamW steps of `peak_lr` would lose more than the share `limit` of their updates.

    Looks at samples of the real weights in the dtype of the masters. A `limit` of None asks for no guard.
    """
    if limit is None:
        return
    lost = total = 0
    for shard in masters:
        numel = torch.Size(shard.shape).numel()
        sampled = lost_updates.sample(shard.values, start=shard.start, numel=numel)
        counts = lost_updates.forecast_lost(sampled, peak_lr)
        lost, total = lost + counts[0], total + counts[1]
    rows = gather_numbers([lost, total], world)
    share = sum(row[0] for row in rows) / max(1.0, sum(row[1] for row in rows))
    if share > limit:
        master = "Set precision.fp8.master: float32. " if regime == "mixed-fp8" else ""
        raise PrecisionError(
            f"at the highest learning rate, {peak_lr:g}, {share:.0%} of the updates would be lost: "
            f"{dtype_name(masters[0].values.dtype)} weights cannot move by so little (the limit is {limit:.0%})",
            where="precision.regime",
            remedy=f"{master}Use precision.regime: mixed, mixed-stochastic, low-stochastic or low-kahan, "
            "or set precision.max_lost_update_share: null to run all the same.",
        )
