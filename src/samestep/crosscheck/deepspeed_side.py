"""A DeepSpeed configuration in DeepSpeed itself, under a plain training script."""

from __future__ import annotations

import os
from typing import Any

import torch

from samestep import models
from samestep.crosscheck import script
from samestep.crosscheck.configs import sets_rates
from samestep.crosscheck.side import STEPS, Observed, Order
from samestep.crosscheck.watching import hyperparameters, masters, moments, only, watched_reductions
from samestep.data import Loader
from samestep.dtypes import dtype_name
from samestep.recipe.schema import Recipe
from samestep.training.steps import on_device
from samestep.world import World


def run_deepspeed(order: Order, recipe: Recipe, here: World, loader: Loader, rates: list[float]) -> Observed:
    """Takes the steps as a plain script would: loss, backward, step, and nothing of samestep in between.

    `rates`: what the script sets where the configuration leaves them to it.
    """
    start_deepspeed()
    engine = _engine(order, recipe, models.load_model(recipe.model, seed=recipe.train.seed))
    own_rates = None if sets_rates(order.config) else rates
    taken: list[float] = []
    with watched_reductions(backend()) as reduced:
        losses = [_step(engine, index, loader, here, own_rates, taken) for index in range(STEPS)]
    return observed(engine, taken, losses, reduced)


def _step(
    engine: Any, index: int, loader: Loader, here: World, own_rates: list[float] | None, taken: list[float]
) -> float:
    """One step of the batches; notes its rate in `taken` and returns its loss."""
    data = loader.step(index)
    sums = []
    if own_rates is not None:
        script.set_rate(engine.optimizer, own_rates[index])
    for micro in range(data.micro_steps):
        inputs = on_device(data.batch(micro, here.rank), here.device)
        loss = script.loss(engine, inputs)
        sums.append(float(loss.detach()))
        engine.backward(loss)
        if micro == data.micro_steps - 1:
            taken.append(script.rate_of(engine.optimizer))
        engine.step()
    return script.mean_over_ranks(sums, here)


def start_deepspeed() -> None:
    """DeepSpeed on CPU ranks, on the group that exists."""
    import deepspeed

    # Compiled at start otherwise, which takes minutes and leaves a lock behind when it is ended.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # type: ignore[attr-defined]
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def backend() -> Any:
    """What DeepSpeed's collectives go through, once it is started."""
    import deepspeed.comm.comm as comm

    return comm.cdb


def _engine(order: Order, recipe: Recipe, model: torch.nn.Module) -> Any:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=None if "optimizer" in order.config else script.optimizer(recipe, model),
        model_parameters=[p for p in model.parameters() if p.requires_grad],  # type: ignore[arg-type]
        config=order.config,
    )
    return engine


def observed(engine: Any, rates: list[float], losses: list[float], reduced: set[torch.dtype]) -> Observed:
    """What DeepSpeed's engine holds after the steps."""
    zero = engine.optimizer
    inner = getattr(zero, "optimizer", zero)
    # Stage 3 gives its optimizer the masters only while it steps.
    sharded = getattr(zero, "fp32_partitioned_groups_flat", ())
    clip = float(engine.gradient_clipping())
    return Observed(
        master=only(master.dtype for master in sharded) if sharded else masters(inner),
        moments=moments(inner),
        optimizer=hyperparameters(inner),
        compute=only(p.dtype for p in engine.module.parameters()),
        reduce=only(reduced),
        gradient=dtype_name(engine.get_data_types()[1]),
        clip=clip or None,
        accumulation=int(engine.gradient_accumulation_steps()),
        rates=rates,
        losses=losses,
        updates=STEPS - int(getattr(engine, "skipped_steps", 0)),
    )
