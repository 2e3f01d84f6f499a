"""Jobs of test_checkpoint_rows.py: engines that are trained a little and saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.checkpoint_cost import forget_peak, resident
from samestep import models, world
from samestep.checkpoint.tensors import read_tensors, write_tensors
from samestep.engines import build
from samestep.engines.protocol import Engine, Shard
from samestep.recipe import Recipe
from samestep.training.checkpoints import Checkpoints, Course
from samestep.world import World

LR = 1e-2
UPDATES = 3


class Tied(nn.Module):
    """Two linear layers that share one weight, of an odd size."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).square().sum()


def inputs(update: int) -> torch.Tensor:
    return torch.randn(2, 7, generator=torch.Generator().manual_seed(update))


def tied(recipe: dict[str, Any], out: str) -> None:
    """Updates of `Tied`, the same rows on every rank, and a checkpoint."""
    here = world.start(timeout_seconds=60)
    checked = Recipe.model_validate(recipe)
    model = Tied()
    plan = build.resolve_plan(checked, model)
    engine = build.build(checked, model, plan, here)
    for update in range(UPDATES):
        for turn in engine.turns(1):
            engine.backward(engine.model(inputs(update)), turn, 1)
        engine.apply(LR)
    _save(checked, plan, engine, Path(out), here)
    engine.close()


def live(recipe: dict[str, Any], out: str) -> dict[str, torch.Tensor]:
    """Updates of the recipe's model and a checkpoint; the weights that the next forward pass would use."""
    here = world.start(timeout_seconds=60)
    checked = Recipe.model_validate(recipe)
    model = models.load_model(checked.model, seed=0)
    plan = build.resolve_plan(checked, model)
    engine = build.build(checked, model, plan, here)
    ids = torch.tensor([[3, 9, 4, 15, 1]]) + here.rank
    batch = models.Inputs(input_ids=ids, labels=ids, position_ids=None, document_ids=None)
    for _ in range(UPDATES):
        for turn in engine.turns(1):
            engine.backward(models.loss_sum(engine.model, batch, attention="sdpa")[0], turn, 1)
        engine.apply(LR)
    _save(checked, plan, engine, Path(out), here)
    found = {n: p.detach().clone() for n, p in engine.module.named_parameters(remove_duplicate=False)}
    engine.close()
    return found


def _save(recipe: Recipe, plan: Any, engine: Engine, out: Path, here: World) -> None:
    loader: Any = SimpleNamespace(rows_per_step=4, examples=SimpleNamespace(sha256="0" * 64))
    stepper: Any = SimpleNamespace(engine=engine, scale=None, monitor=SimpleNamespace(moved=[]))
    Checkpoints(Course(recipe=recipe, plan=plan, loader=loader), stepper, out, here).save(UPDATES)


def memory_of_a_state(folder: str, tensors: int, elements: int) -> dict[str, int]:
    """Growth of this rank's resident memory while it saves its part of a state of flat slices and while it reads it."""
    here = world.start(timeout_seconds=60)
    part = elements // here.size
    flat = torch.ones(tensors * part)
    shards = [
        Shard(name=f"w{n}", shape=(elements // 64, 64), start=here.rank * part, values=flat[n * part : (n + 1) * part])
        for n in range(tensors)
    ]
    if here.is_main:
        Path(folder).mkdir()
    grown = {}
    for name, work in (("save", write_tensors), ("load", read_tensors)):
        world.gather_numbers([0.0], here)
        forget_peak()
        before = resident()
        work(Path(folder), shards)
        grown[name] = resident("VmHWM") - before
    return grown
