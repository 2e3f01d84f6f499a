"""One rank of one side: `python -m samestep.crosscheck.rank ORDER`, under torchrun."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

from samestep import world
from samestep.crosscheck import script
from samestep.crosscheck.side import MODEL, ROW_TOKENS, STEPS, Observed, Order
from samestep.crosscheck.watching import hyperparameters, only
from samestep.data import Examples, Loader
from samestep.engines import build, loading
from samestep.recipe.schema import Recipe
from samestep.training.outlook import learning_rates
from samestep.training.steps import Stepper
from samestep.world import World


def run(order: Order) -> Observed:
    """Runs the side on the ranks that exist, and returns what this one saw."""
    recipe = Recipe.model_validate(order.recipe)
    torch.set_num_threads(recipe.engine.threads)
    here = world.start(timeout_seconds=120)
    rates = order.rates or learning_rates(recipe, recipe.train.steps or STEPS)[:STEPS]
    if order.tool == "samestep":
        return _samestep(recipe, here, rates)
    if order.tool == "deepspeed":
        from samestep.crosscheck.deepspeed_side import run_deepspeed

        return run_deepspeed(order, recipe, here, batches(recipe), rates)
    from samestep.crosscheck.accelerate_side import run_accelerate

    return run_accelerate(order, recipe, here, batches(recipe), rates)


def main(order: Order) -> None:
    """Runs the side; the main rank leaves what it saw."""
    observed = run(order)
    if world.launched_rank() == 0:
        Path(order.report).write_text(json.dumps(dataclasses.asdict(observed)), encoding="utf-8")


def batches(recipe: Recipe) -> Loader:
    """Random rows of one length that all count, so that a mean over micro-batches is a mean over tokens."""
    rows = STEPS * recipe.engine.ranks * recipe.train.micro_batch * recipe.train.accumulation
    ids = np.random.default_rng(0).integers(0, int(MODEL["vocab_size"]), size=rows * ROW_TOKENS).astype(np.int32)
    starts = np.arange(rows + 1, dtype=np.int64) * ROW_TOKENS
    # Nothing predicts the first token of a row.
    counts = np.arange(len(ids)) % ROW_TOKENS != 0
    examples = Examples(tokens=ids, counts=counts, row_starts=starts)
    return Loader(
        examples,
        ranks=recipe.engine.ranks,
        micro_batch=recipe.train.micro_batch,
        accumulation=recipe.train.accumulation,
        seed=0,
        shuffle=False,
        drop_last=False,
        pad_id=0,
    )


def _samestep(recipe: Recipe, here: World, rates: list[float]) -> Observed:
    model = loading.load_model(recipe, here)
    built = script.optimizer(recipe, model)
    plan = build.resolve_plan(recipe, model)
    engine = build.build(recipe, model, plan, here)
    stepper = Stepper(engine, recipe, here, plan)
    loader = batches(recipe)
    outcomes = []
    for index, rate in enumerate(rates):
        outcome = stepper.step(loader.step(index), index=index, lr=rate, measure=False, facts=index == 0)
        stepper.settle(outcome)
        outcomes.append(outcome)
    roles = outcomes[0].facts.roles if outcomes[0].facts else {}
    engine.close()
    return Observed(
        master=only(roles.get("master", ())),
        moments=only(roles.get("moments", ())),
        optimizer=hyperparameters(built),
        compute=only(roles.get("compute", ())),
        reduce=only(roles.get("reduce", ())),
        gradient=only(roles.get("gradient", ())),
        clip=recipe.train.max_grad_norm,
        accumulation=loader.step(0).micro_steps,
        rates=rates,
        losses=[outcome.loss for outcome in outcomes],
        updates=sum(not outcome.skipped for outcome in outcomes),
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    try:
        main(Order(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    finally:
        world.stop()
