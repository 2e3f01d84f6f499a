"""Training runs as data: what every step did on every rank, down to the bits of every master parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from samestep import world
from samestep.checkpoint.gather import gather_masters
from samestep.checkpoint.state import state_of
from samestep.data import Examples, Loader
from samestep.engines import build, loading
from samestep.engines.protocol import Engine, Shard, Turn
from samestep.optim import lr_at
from samestep.precision.facts import violations
from samestep.precision.plan import Plan
from samestep.recipe.schema import Recipe
from samestep.training.checkpoints import Checkpoints, Course
from samestep.training.steps import Stepper
from samestep.world import World


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step as one rank saw it. `digests` are sums over the rank's own shares: add them up over the ranks that share
    one copy to get the digest of the whole parameter."""

    loss: float
    grad_norm: float
    grad_norm_clipped: float
    skipped: bool
    lr: float
    loss_scale: float | None
    lost_update_share: float | None
    unseen_update_share: float | None
    never_moved: tuple[str, ...]
    digests: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """What one rank brings back. `replica` numbers the copy of the parameters that it holds a share of; `masters` are
    the whole final parameters on rank 0, nothing on the others. `states` has, by step, digests of masters and of the
    optimizer's state where a checkpoint was saved or taken up."""

    replica: int
    start: dict[str, int]
    steps: list[Step]
    masters: dict[str, torch.Tensor]
    evaluations: list[float]
    violations: list[str]
    dtypes: dict[str, str]
    states: dict[int, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A run as one story: what all ranks agree on."""

    name: str
    start: dict[str, int]
    steps: list[Step]
    masters: dict[str, torch.Tensor]
    evaluations: list[float]
    dtypes: dict[str, str] = field(default_factory=dict)
    states: dict[int, dict[str, int]] = field(default_factory=dict)


def train(
    recipe: dict[str, Any],
    examples: Examples,
    held_out: Examples | None = None,
    measure: bool = False,
    poison: tuple[int, int, int] | None = None,
    save: str | None = None,
    resume: str | None = None,
) -> RankRun:
    """A job for ranks: `recipe.train.steps` steps of the product's own step code on these examples. With `save`, writes
    the recipe's checkpoints into that run folder; with `resume`, goes on from that checkpoint.

    Evaluates before and after when there is held-out data. `poison` is (step, micro-batch, rank) of a backward pass
    whose gradient becomes infinite, while its loss stays what it is.
    """
    checked = Recipe.model_validate(recipe)
    here = world.start(timeout_seconds=60)
    model = loading.load_model(checked, here)
    plan = build.resolve_plan(checked, model)
    engine = build.build(checked, model, plan, here)
    try:
        stepper = Stepper(_poisoned(engine, *poison) if poison else engine, checked, here, plan)
        loader = loader_of(checked, examples)
        evaluations = [stepper.evaluate(evaluation_loader_of(checked, held_out))] if held_out is not None else []
        checkpoints = _checkpoints(checked, plan, stepper, loader, Path(save or "unused"), here)
        done, states = 0, {}
        if resume:
            done = checkpoints.resume(Path(resume), allow_changes=False).step
            states[done] = _state_digests(engine)
        start = _digests(engine)
        assert checked.train.steps is not None
        steps, broken = [], []
        for index in range(done, checked.train.steps):
            step, found = _step(stepper, loader, checked, index, measure=measure, observe=index == done)
            steps.append(step)
            if save and checkpoints.due(index + 1):
                states[index + 1] = _state_digests(engine)
                checkpoints.save(index + 1)
            if found is not None:
                broken += [str(v) for v in violations(plan, found, several_ranks=here.size > 1)]
        checkpoints.finish()
        if held_out is not None:
            evaluations.append(stepper.evaluate(evaluation_loader_of(checked, held_out)))
        whole = {name: tensor for name, tensor in gather_masters(engine, here) if tensor is not None}
        return RankRun(
            replica=engine.replica.index,
            start=start,
            steps=steps,
            masters=whole,
            evaluations=evaluations,
            violations=broken,
            dtypes={name: str(p.dtype) for name, p in engine.model.named_parameters()},
            states=states,
        )
    finally:
        engine.close()


class _Poisoned:
    """An engine with one backward pass that goes wrong."""

    def __init__(self, engine: Engine, passes: int, at: Turn) -> None:
        self._engine, self._passes, self._at = engine, passes, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def backward(self, loss: torch.Tensor, turn: Turn, micro_steps: int) -> None:
        if turn == self._at:
            self._passes -= 1
        wrong = turn == self._at and self._passes == 0
        self._engine.backward(loss * math.inf if wrong else loss, turn, micro_steps)


def _poisoned(engine: Engine, step: int, micro: int, rank: int) -> Engine:
    return _Poisoned(engine, step, Turn(micro=micro, rank=rank))  # type: ignore[return-value]


def _step(
    stepper: Stepper, loader: Loader, recipe: Recipe, index: int, *, measure: bool, observe: bool
) -> tuple[Step, Any]:
    total = recipe.train.steps or 0
    lr = lr_at(index + 1, lr=recipe.train.optimizer.lr, schedule=recipe.train.schedule, total_steps=total)
    scale = stepper.scale.value if stepper.scale else None
    data = loader.step(index)
    outcome = stepper.step(data, index=index, lr=lr, measure=measure, facts=observe)
    tolerated = stepper.settle(outcome)
    assert tolerated or recipe.train.on_non_finite == "skip", f"step {index} is not finite"
    step = Step(
        loss=outcome.loss,
        grad_norm=outcome.grad_norm,
        grad_norm_clipped=outcome.grad_norm_clipped,
        skipped=outcome.skipped,
        lr=lr,
        loss_scale=scale,
        lost_update_share=outcome.shares.lost if outcome.shares else None,
        unseen_update_share=outcome.shares.unseen if outcome.shares else None,
        never_moved=outcome.shares.never_moved if outcome.shares else (),
        digests=_digests(stepper.engine),
    )
    return step, outcome.facts


def loader_of(recipe: Recipe, examples: Examples) -> Loader:
    """The recipe's training batches."""
    train = recipe.train
    return Loader(
        examples,
        ranks=recipe.engine.ranks,
        micro_batch=train.micro_batch,
        accumulation=train.accumulation,
        seed=train.seed,
        shuffle=recipe.data.shuffle,
        drop_last=recipe.data.drop_last,
        pad_id=0,
    )


def evaluation_loader_of(recipe: Recipe, examples: Examples) -> Loader:
    """The recipe's evaluation batches, which hold every example once."""
    return Loader(
        examples,
        ranks=recipe.engine.ranks,
        micro_batch=recipe.train.micro_batch,
        accumulation=1,
        seed=0,
        shuffle=False,
        drop_last=False,
        pad_id=0,
        idle_ranks=True,
    )


def _checkpoints(recipe: Recipe, plan: Plan, stepper: Stepper, loader: Loader, out: Path, here: World) -> Checkpoints:
    course = Course(recipe=recipe, plan=plan, loader=loader)
    return Checkpoints(course, stepper, out, here)


def _state_digests(engine: Engine) -> dict[str, int]:
    return {shard.name: digest(shard) for shard in state_of(engine)}


def _digests(engine: Engine) -> dict[str, int]:
    return {shard.name: digest(shard) for shard in engine.masters()}


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_WEIGHTS: dict[tuple[int, int], torch.Tensor] = {}


def digest(shard: Shard) -> int:
    """A number for the bits of a share of a parameter: sum of bits times an odd random weight of the element's index,
    modulo 2**64. One changed element always changes it, and shares add up to the digest of the whole."""
    values = shard.values.contiguous()
    key = (shard.start, values.numel())
    if key not in _WEIGHTS:
        index = torch.arange(shard.start + 1, shard.start + values.numel() + 1)
        mixed = index * _GOLDEN
        mixed = (mixed ^ (mixed >> 29)) * _GOLDEN
        _WEIGHTS[key] = (mixed ^ (mixed >> 32)) | 1
    bits = values.view({2: torch.int16, 4: torch.int32}[values.itemsize]).long()
    return int((bits * _WEIGHTS[key]).sum()) % 2**64


def digest_of(tensor: torch.Tensor) -> int:
    """The digest of a whole parameter."""
    return digest(Shard(name="", shape=tuple(tensor.shape), start=0, values=tensor.detach().reshape(-1)))


def joined(name: str, runs: Sequence[RankRun]) -> Trajectory:
    """One story out of what the ranks saw. Fails when they, or the copies of a parameter, do not agree."""
    assert not any(run.violations for run in runs), f"{name}: {runs[0].violations}"
    assert all(run.evaluations == runs[0].evaluations for run in runs), f"{name}: ranks disagree about the evaluation"
    masters = runs[0].masters
    start = _added(name, [run.replica for run in runs], [run.start for run in runs])
    states = {
        step: _added(name, [run.replica for run in runs], [run.states[step] for run in runs]) for step in runs[0].states
    }
    steps = []
    for index, of_ranks in enumerate(zip(*(run.steps for run in runs), strict=True)):
        first = of_ranks[0]
        for quantity in _QUANTITIES:
            seen = [getattr(step, quantity) for step in of_ranks]
            assert len(set(map(repr, seen))) == 1, f"{name}, step {index + 1}: ranks saw {quantity} {seen}"
        digests = _added(name, [run.replica for run in runs], [step.digests for step in of_ranks])
        steps.append(Step(**{q: getattr(first, q) for q in _QUANTITIES}, digests=digests))
    gathered = {parameter: digest_of(tensor) for parameter, tensor in masters.items()}
    assert gathered == steps[-1].digests, f"{name}: gathered parameters are not the shares put together"
    return Trajectory(
        name=name,
        start=start,
        steps=steps,
        masters=masters,
        evaluations=runs[0].evaluations,
        dtypes=runs[0].dtypes,
        states=states,
    )


def _added(name: str, replicas: Sequence[int], shares: Sequence[dict[str, int]]) -> dict[str, int]:
    """The digests of whole parameters from those of the ranks' shares."""
    copies: dict[int, dict[str, int]] = {}
    for replica, digests in zip(replicas, shares, strict=True):
        copy = copies.setdefault(replica, {})
        for parameter, value in digests.items():
            copy[parameter] = (copy.get(parameter, 0) + value) % 2**64
    first = next(iter(copies.values()))
    for parameter, value in first.items():
        assert all(copy[parameter] == value for copy in copies.values()), f"{name}: copies of {parameter} differ"
    return first


def rest_of(whole: Trajectory, done: int) -> Trajectory:
    """What a run that goes on after `done` steps of `whole` has to be."""
    return Trajectory(
        name=whole.name,
        start=whole.steps[done - 1].digests,
        steps=whole.steps[done:],
        masters=whole.masters,
        evaluations=whole.evaluations,
    )


_QUANTITIES = (
    "loss",
    "grad_norm",
    "grad_norm_clipped",
    "skipped",
    "lr",
    "loss_scale",
    "lost_update_share",
    "unseen_update_share",
    "never_moved",
)


def first_difference(one: Trajectory, other: Trajectory) -> str | None:
    """Where two runs part: the step, the quantity or parameter, and both values; None when every bit is equal."""
    who = f"{one.name} and {other.name} differ"
    differing = [name for name in sorted(one.start | other.start) if one.start.get(name) != other.start.get(name)]
    if differing:
        return f"{who} before step 1 in {', '.join(differing)}"
    for index, (a, b) in enumerate(zip(one.steps, other.steps, strict=True)):
        for quantity in _QUANTITIES:
            x, y = getattr(a, quantity), getattr(b, quantity)
            if repr(x) != repr(y):
                return f"{who} at step {index + 1} in {quantity}: {x!r} and {y!r}"
        differing = [name for name in a.digests if a.digests[name] != b.digests[name]]
        if differing:
            return f"{who} at step {index + 1} in {', '.join(differing)}"
    if one.evaluations != other.evaluations:
        return f"{who} in evaluations: {one.evaluations} and {other.evaluations}"
    return None
