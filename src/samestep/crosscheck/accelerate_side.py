"""A configuration of Accelerate under `accelerate launch`, with the training script that its documentation teaches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from samestep import models
from samestep.crosscheck import script as scripts
from samestep.crosscheck.configs import kind_of, sets_rates
from samestep.crosscheck.deepspeed_side import backend, observed, start_deepspeed
from samestep.crosscheck.side import STEPS, Observed, Order
from samestep.crosscheck.watching import hyperparameters, masters, moments, only, watch_compute, watched_reductions
from samestep.data import Loader
from samestep.errors import RunError
from samestep.recipe.schema import Recipe
from samestep.training.steps import on_device
from samestep.world import World


def run_accelerate(order: Order, recipe: Recipe, here: World, loader: Loader, rates: list[float]) -> Observed:
    """Takes the steps with Accelerate's own accumulate, backward and clip_grad_norm_.

    The launcher has left the configuration in the environment. `rates`: what the script sets where it has none.
    """
    # Before the Accelerator: transformers would build the model under zero.Init after it.
    model = models.load_model(recipe.model, seed=recipe.train.seed)
    accelerator = _accelerator(order, recipe)
    deepspeed = accelerator.state.deepspeed_plugin
    inside = deepspeed.deepspeed_config if deepspeed else {}
    computed = watch_compute(model)
    model, optimizer = _prepared(accelerator, recipe, model, inside)
    script = _Script(accelerator, recipe, model, optimizer, None if sets_rates(inside) else rates)
    with watched_reductions(backend() if deepspeed else dist) as reduced:
        losses = [script.step(index, loader, here) for index in range(STEPS)]
    if deepspeed:
        return observed(model, script.rates, losses, reduced)
    if accelerator.distributed_type == "MULTI_CPU":
        # DDP reduces out of sight of Python, in buckets of its own.
        reduced = script.gradients
    inner = optimizer.optimizer
    return Observed(
        master=masters(inner),
        moments=moments(inner),
        optimizer=hyperparameters(inner),
        compute=only(computed),
        reduce=only(reduced) if here.size > 1 else None,
        gradient=only(script.gradients),
        clip=recipe.train.max_grad_norm,
        accumulation=accelerator.gradient_accumulation_steps,
        rates=script.rates,
        losses=losses,
        updates=script.updates,
    )


def _accelerator(order: Order, recipe: Recipe) -> Any:
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, InitProcessGroupKwargs

    kind = kind_of(order.config)
    if kind == "DEEPSPEED":
        start_deepspeed()
    if kind == "FSDP":
        PartialState(backend="gloo")
        # Accelerate gives FSDP to accelerators only and turns to DDP on CPU ranks without a word; nothing after this
        # choice asks what the devices are.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    inside = order.config.get("deepspeed_json", {})
    left_open = any(inside.get(name, {}).get("enabled") == "auto" for name in ("bf16", "fp16"))
    accelerator = Accelerator(
        # Beside a DeepSpeed file the launcher's own may not say it: an `auto` there is the script's to fill.
        mixed_precision=_mixed_precision(recipe) if left_open else None,
        gradient_accumulation_steps=recipe.train.accumulation,
        # Accelerate counts one process where nothing names a backend.
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if kind == "DEEPSPEED" else [],
    )
    wanted = "MULTI_CPU" if kind.startswith("MULTI") else kind
    if accelerator.distributed_type != wanted:
        raise RunError(f"Accelerate runs {accelerator.distributed_type} for {kind} on CPU ranks.")
    return accelerator


def _mixed_precision(recipe: Recipe) -> str:
    short = {"bfloat16": "bf16", "float16": "fp16"}[recipe.precision.low_dtype]
    return "no" if recipe.precision.regime == "full" else short


def _prepared(accelerator: Any, recipe: Recipe, model: torch.nn.Module, inside: dict[str, Any]) -> tuple[Any, Any]:
    from accelerate.utils import DummyOptim, DummyScheduler

    if inside:
        # Accelerate takes it from a loader that it prepares; the check has batches of its own.
        inside["train_micro_batch_size_per_gpu"] = recipe.train.micro_batch
    own = recipe.train.optimizer
    optimizer: Any = (
        DummyOptim(list(model.parameters()), lr=own.lr, weight_decay=own.weight_decay)
        if "optimizer" in inside
        else scripts.optimizer(recipe, model)
    )
    objects = [model, optimizer]
    if "scheduler" in inside:
        total = recipe.train.steps * accelerator.num_processes if recipe.train.steps else None
        warmup = recipe.train.schedule.warmup_steps
        objects.append(DummyScheduler(optimizer, total_num_steps=total, warmup_num_steps=warmup))
    prepared = accelerator.prepare(*objects)
    return prepared[0], prepared[1]


class _Script:
    """The loop of a script, and what it sees."""

    def __init__(
        self, accelerator: Any, recipe: Recipe, model: Any, optimizer: Any, own_rates: list[float] | None
    ) -> None:
        self._accelerator, self._recipe = accelerator, recipe
        self._model, self._optimizer = model, optimizer
        self._own_rates = own_rates
        self._deepspeed = accelerator.state.deepspeed_plugin is not None
        self.rates: list[float] = []
        self.gradients: set[torch.dtype] = set()
        self.updates = 0

    def step(self, index: int, loader: Loader, here: World) -> float:
        """One step of the batches, of as many updates as Accelerate makes of it; returns the loss."""
        data = loader.step(index)
        sums = []
        if self._own_rates is not None:
            scripts.set_rate(self._optimizer, self._own_rates[index])
        for micro in range(data.micro_steps):
            inputs = on_device(data.batch(micro, here.rank), here.device)
            with self._accelerator.accumulate(self._model):
                loss = scripts.loss(self._model, inputs)
                sums.append(float(loss.detach()))
                if self._accelerator.sync_gradients:
                    self.rates.append(scripts.rate_of(self._optimizer))
                self._accelerator.backward(loss)
                if not self._deepspeed:
                    self._clip()
                self._optimizer.step()
                self._optimizer.zero_grad()
                if self._accelerator.sync_gradients:
                    self.updates += not self._accelerator.optimizer_step_was_skipped
        return scripts.mean_over_ranks(sums, here)

    def _clip(self) -> None:
        norm = self._recipe.train.max_grad_norm
        if self._accelerator.sync_gradients and norm is not None:
            self._accelerator.clip_grad_norm_(self._model.parameters(), norm)
        self.gradients |= {p.grad.dtype for p in self._model.parameters() if p.grad is not None}
