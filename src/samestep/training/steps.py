"""One optimizer step, and one evaluation, on any engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from samestep import models
from samestep.data import Batch, GlobalStep, Loader
from samestep.engines import gradients
from samestep.engines.protocol import Engine, Turn
from samestep.precision.facts import ComputeObserver, Facts, observe
from samestep.precision.plan import Plan
from samestep.recipe.schema import Recipe
from samestep.training.loss_scale import DynamicScale
from samestep.training.monitor import Monitor, Shares
from samestep.world import World, gather_numbers

Span = Callable[[str], AbstractContextManager[None]]
"""Surrounds a part of a step: data, forward, backward or optimizer. A benchmark measures with it."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step did, the same on every rank. Losses and norms may be non-finite; `skipped` says no weight moved.

    `should_stop` is True when any rank was asked to stop, `should_save` when the main rank's clock asks for a
    checkpoint.
    """

    loss: float
    grad_norm: float
    grad_norm_clipped: float
    skipped: bool
    should_stop: bool
    should_save: bool
    shares: Shares | None
    facts: Facts | None


@dataclass(frozen=True, kw_only=True)
class _Update:
    """What became of a step's gradient."""

    grad_norm: float
    grad_norm_clipped: float
    skipped: bool
    shares: Shares | None
    gradient_dtypes: set[torch.dtype]


class Stepper:
    """Takes optimizer steps with one engine. Holds the loss scale and what the monitor remembers, nothing else."""

    def __init__(
        self, engine: Engine, recipe: Recipe, world: World, plan: Plan, *, span: Span = lambda _: nullcontext()
    ) -> None:
        self.engine = engine
        self._span = span
        self.scale = DynamicScale(recipe.precision.loss_scale) if plan.compute == torch.float16 else None
        self._recipe = recipe
        self._world = world
        self._plan = plan
        self.monitor = Monitor(engine, recipe, plan, world)

    def step(
        self,
        data: GlobalStep,
        *,
        index: int,
        lr: float,
        measure: bool,
        facts: bool,
        stop: bool = False,
        save: bool = False,
    ) -> StepOutcome:
        """One optimizer step on `data`. `index` counts from 0. Nothing is updated when the loss or the gradient is not
        finite; what that means is the caller's to say. `measure` counts lost updates, `facts` observes dtypes."""
        observer = ComputeObserver(self.engine.module) if facts else None
        loss, (should_stop, should_save), logits = self._forward_backward(data, index, (stop, save))
        if observer is not None:
            observer.close()
        with self._span("optimizer"):
            updated = self._update(loss, lr, measure)
        found = None
        if observer is not None and not updated.skipped:
            found = self._observe(observer, updated.gradient_dtypes, logits)
        return StepOutcome(
            loss=loss,
            grad_norm=updated.grad_norm,
            grad_norm_clipped=updated.grad_norm_clipped,
            skipped=updated.skipped,
            should_stop=should_stop,
            should_save=should_save,
            shares=updated.shares,
            facts=found,
        )

    def _update(self, loss: float, lr: float, measure: bool) -> _Update:
        """Norm, clipping and the update of the weights, or none where the loss or the gradient is not finite."""
        reduced = self.engine.gradients()
        scale = self.scale.value if self.scale else 1.0
        norm = gradients.global_norm(reduced, self.engine.replica, self._world) / scale
        shares = None
        clipped = norm
        # Some engines drop these tensors when they update.
        gradient_dtypes = {g.dtype for g in reduced}
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if skipped:
            self.engine.discard()
        else:
            factor = gradients.clip_factor(norm, self._recipe.train.max_grad_norm)
            gradients.scale_(reduced, factor / scale)
            if factor != 1.0:
                clipped = gradients.global_norm(reduced, self.engine.replica, self._world)
            before = self.monitor.before(reduced) if measure else None
            self.engine.apply(lr)
            if before is not None:
                shares = self.monitor.after(before, lr=lr)
        return _Update(
            grad_norm=norm, grad_norm_clipped=clipped, skipped=skipped, shares=shares, gradient_dtypes=gradient_dtypes
        )

    def _forward_backward(
        self, data: GlobalStep, index: int, wishes: tuple[bool, bool]
    ) -> tuple[float, tuple[bool, bool], torch.dtype]:
        scale = self.scale.value if self.scale else 1.0
        logits = torch.float32
        sums = []
        for turn in self.engine.turns(data.micro_steps):
            # Dropout is a function of where we are in the run, so that engines, ranks and resumed runs agree on it.
            torch.manual_seed(_dropout_seed(self._recipe.train.seed, index, turn.micro, turn.rank))
            with self._span("data"):
                inputs = self._inputs(data, turn)
            with self._span("forward"):
                loss, output = self._loss_sum(inputs)
            logits = output.dtype
            sums.append(loss.detach().double())
            # One division by the label tokens of the whole global batch: never a mean of means.
            with self._span("backward"):
                self.engine.backward(loss / data.label_tokens * scale, turn, data.micro_steps)
        rows = gather_numbers([*map(float, wishes), *torch.stack(sums).tolist()], self._world)
        total = _exact_sum(value for row in rows for value in row[2:])
        # Ranks hear of a signal at different times, and clocks differ: what one wishes, all do.
        stop, save = any(row[0] for row in rows), any(row[1] for row in rows)
        return total / data.label_tokens, (stop, save), logits

    def _inputs(self, data: GlobalStep, turn: Turn) -> models.Inputs:
        return on_device(data.batch(turn.micro, turn.rank), self._world.device)

    def _loss_sum(self, inputs: models.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return models.loss_sum(self.engine.model, inputs, attention=self._recipe.model.attention)

    def _observe(self, observer: ComputeObserver, gradient_dtypes: set[torch.dtype], logits: torch.dtype) -> Facts:
        masters = self.engine.masters()
        moments = [moment for s in masters for key, moment in self.engine.moments(s.name).items() if key != "step"]
        return observe(
            self.engine.module,
            masters=[s.values for s in masters],
            gradients=gradient_dtypes,
            moments=moments,
            reduced=self.engine.reduced_dtypes,
            computed=observer.dtypes,
            logits=logits,
            float8_layers=observer.float8,
            idle_layers=observer.idle,
        )

    def settle(self, outcome: StepOutcome) -> bool:
        """Adapts the loss scale to a step's outcome; False when the step was skipped and no smaller scale can help."""
        if not outcome.skipped:
            if self.scale:
                self.scale.went_well()
            return True
        if self.scale and self.scale.can_shrink and math.isfinite(outcome.loss):
            self.scale.overflowed()
            return True
        return False

    def evaluate(self, loader: Loader) -> float:
        """Mean loss per label token over all rows of a loader, each counted once."""
        model = self.engine.model
        model.eval()
        sums, label_tokens = [0.0], 0
        with torch.no_grad():
            for index in range(loader.steps_per_epoch):
                data = loader.step(index)
                label_tokens += data.label_tokens
                for turn in self.engine.turns(data.micro_steps):
                    sums.append(self._loss_sum(self._inputs(data, turn))[0].item())
        model.train()
        rows = gather_numbers(sums, self._world)
        return _exact_sum(value for row in rows for value in row) / label_tokens


def on_device(batch: Batch, device: torch.device) -> models.Inputs:
    """The batch's tensors on a device."""
    tensors = (batch.input_ids, batch.labels, batch.position_ids, batch.document_ids)
    input_ids, labels, positions, documents = (None if t is None else t.to(device, non_blocking=True) for t in tensors)
    assert input_ids is not None and labels is not None
    return models.Inputs(input_ids=input_ids, labels=labels, position_ids=positions, document_ids=documents)


def _exact_sum(values: Iterable[float]) -> float:
    """math.fsum, which rounds once whatever the order; not finite when a value is not."""
    listed = list(values)
    return math.fsum(listed) if all(map(math.isfinite, listed)) else sum(listed)


def _dropout_seed(seed: int, step: int, micro: int, rank: int) -> int:
    digest = hashlib.sha256(f"{seed}/{step}/{micro}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
