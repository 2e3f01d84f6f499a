"""What one rank does in one round: builds its contender, warms it up, times it, and takes some steps apart."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Protocol

import torch

from samestep import models, world
from samestep.bench import peers
from samestep.bench.order import Measured, Order
from samestep.bench.timing import Collectives, Parts, synchronize
from samestep.data import GlobalStep, Loader, prepare
from samestep.engines import build, loading
from samestep.errors import RunError, VerificationError
from samestep.precision.facts import violations
from samestep.recipe.schema import Recipe
from samestep.training import folder, machine, setup
from samestep.training.outlook import learning_rates
from samestep.training.steps import Stepper
from samestep.world import World


class Trains(Protocol):
    """What can be timed: one of our engines, or a peer's loop."""

    def step(self, data: GlobalStep, index: int, lr: float) -> float:
        """One optimizer step; the loss of the whole global batch, per label token. `index` counts from 0."""
        ...

    def close(self) -> None: ...


def measure(order: Order) -> None:
    """Does this process's part of a round; the main rank leaves what it measured. Raises SamestepError."""
    recipe = order.recipe
    torch.set_num_threads(recipe.engine.threads)
    here = world.start(timeout_seconds=recipe.engine.timeout_seconds)
    tokenizer = models.load_tokenizer(recipe.model)
    loader = setup.training_loader(prepare(recipe.data, tokenizer, seed=recipe.train.seed), recipe, tokenizer)
    parts = Parts(here.device)
    steps = order.warmup + order.steps + order.split
    rates = learning_rates(recipe, max(steps, recipe.train.steps or 0))
    trains = _Ours(recipe, here, parts) if order.peer is None else peers.make(order.peer, recipe, here, parts)
    try:
        taken = _Taken(trains, loader, rates, parts, here)
        taken.steps(order.warmup)
        forget_peak(here.device)
        timed = taken.steps(order.steps)
        peak = peak_memory(here.device)
        split = _split(taken, order.split, parts, here)
        peaks = [int(row[0]) for row in world.gather_numbers([float(peak)], here)]
    finally:
        trains.close()
    if here.is_main:
        lengths = loader.examples.row_tokens
        measured = Measured(
            step_seconds=timed,
            losses=taken.losses,
            label_tokens=[loader.step(order.warmup + i).label_tokens for i in range(order.steps)],
            rows=[lengths[loader.step(order.warmup + i).rows].tolist() for i in range(order.steps)],
            parts=split,
            peak_memory_bytes=peaks,
            device=_device_name(here.device),
        )
        folder.write_json(Path(order.result), measured.content())
    # None leaves while another one still needs its connections.
    world.gather_numbers([0.0], here)


class _Taken:
    """The steps that were taken, one after the other, from the first of the run on."""

    def __init__(self, trains: Trains, loader: Loader, rates: list[float], parts: Parts, here: World) -> None:
        self.losses: list[float] = []
        self._trains, self._loader, self._rates, self._parts, self._here = trains, loader, rates, parts, here

    def steps(self, count: int) -> list[float]:
        """Takes so many more; seconds of each, its data included, on this rank."""
        seconds = []
        for _ in range(count):
            index = len(self.losses)
            began = time.perf_counter()
            with self._parts("data"):
                data = self._loader.step(index)
            loss = self._trains.step(data, index, self._rates[index])
            if not math.isfinite(loss):
                raise _not_finite(index)
            self.losses.append(loss)
            synchronize(self._here.device)
            seconds.append(time.perf_counter() - began)
        return seconds


def _split(taken: _Taken, count: int, parts: Parts, here: World) -> dict[str, float | None]:
    """Takes `count` steps apart: mean seconds of their parts. They are slower than the timed ones, by the measuring."""
    if not count:
        return {}
    parts.on = True
    with Collectives(here.device) as collectives:
        whole = sum(taken.steps(count))
    parts.on = False
    under_way = collectives.seconds()
    found: dict[str, float | None] = {name: seconds / count for name, seconds in parts.seconds.items()}
    found["communication"] = None if under_way is None else under_way / count
    return found | {"step": whole / count}


class _Ours:
    """An engine of ours, stepped as a run steps it; its dtypes are compared with the plan at the first step."""

    def __init__(self, recipe: Recipe, here: World, parts: Parts) -> None:
        model = loading.load_model(recipe, here)
        recipe = setup.resolved(recipe, model, recipe.train.steps or 1)
        self._recipe, self._here = recipe, here
        self._plan = build.resolve_plan(recipe, model)
        self._engine = build.build(recipe, model, self._plan, here)
        self._stepper = Stepper(self._engine, recipe, here, self._plan, span=parts)

    def step(self, data: GlobalStep, index: int, lr: float) -> float:
        measure = index % self._recipe.precision.measure_every == 0
        outcome = self._stepper.step(data, index=index, lr=lr, measure=measure, facts=index == 0)
        if not self._stepper.settle(outcome):
            raise _not_finite(index)
        if outcome.facts is not None:
            broken = violations(self._plan, outcome.facts, several_ranks=self._here.size > 1)
            if broken:
                raise VerificationError(
                    "the engine breaks its precision plan: " + "; ".join(map(str, broken)),
                    where="bench",
                    remedy="Report this as a bug.",
                )
        return outcome.loss

    def close(self) -> None:
        self._engine.close()


def _not_finite(index: int) -> RunError:
    return RunError(
        f"step {index + 1} is not finite; there is nothing to time", where="bench", remedy="Lower the learning rate."
    )


def forget_peak(device: torch.device) -> None:
    """Has `peak_memory` begin anew. On a CPU whose system cannot, it goes on from the start of the process."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        return
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def peak_memory(device: torch.device) -> int:
    """Largest memory since `forget_peak`: allocated on an accelerator, resident on the CPU. Bytes."""
    status = Path("/proc/self/status")
    if device.type == "cpu" and status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return machine.peak_memory(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
