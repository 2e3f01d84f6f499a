"""Jobs that look at the dtypes of live runs, some of which something spoils on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from samestep import models, world
from samestep.data import Examples
from samestep.engines import build
from samestep.engines.protocol import Engine
from samestep.precision.facts import Facts, violations
from samestep.precision.float8 import Float8Layers
from samestep.precision.plan import Plan
from samestep.recipe.schema import Recipe
from samestep.training.steps import Stepper
from tests.equivalence.trajectories import loader_of

BF16, FP32 = torch.bfloat16, torch.float32


def observed(recipe: dict[str, Any], regimes: list[str], examples: Examples) -> list[tuple[Facts, list[str]]]:
    """A job: for each regime the facts of a first step, and the violations in them."""
    found = []
    for regime in regimes:
        changed = recipe | {"precision": recipe["precision"] | {"regime": regime}}
        facts, broken = _first_step(changed, examples)
        found.append((facts, [str(violation) for violation in broken]))
    return found


def spoiled(recipe: dict[str, Any], fault: str, examples: Examples) -> list[tuple[str, str]]:
    """A job: role and message of every violation that a first step with a fault shows."""
    _, broken = _first_step(recipe, examples, (FAULTS | FLOAT8_FAULTS)[fault])
    return [(violation.role, str(violation)) for violation in broken]


class Fault:
    """What goes wrong: nothing here. Engines are built by another plan than the one they are held to, or something
    reaches into them."""

    def plan(self, plan: Plan) -> Plan:
        return plan

    def before(self, model: nn.Module) -> None:
        """Once the plan is made, before the engine is built."""

    def wrap(self, engine: Engine) -> Engine:
        return engine


class ReducesInBf16(Fault):
    def plan(self, plan: Plan) -> Plan:
        return replace(plan, reduce=BF16)


class ComputesInFp32(Fault):
    def plan(self, plan: Plan) -> Plan:
        return replace(plan, compute=FP32)


class HoldsMastersInBf16(Fault):
    def plan(self, plan: Plan) -> Plan:
        held = tuple(replace(p, held=BF16) for p in plan.parameters)
        return replace(plan, master=BF16, gradient=BF16, moments=BF16, parameters=held)


class CastsBuffers(Fault):
    def before(self, model: nn.Module) -> None:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(BF16))


class CastsTheOutput(Fault):
    def wrap(self, engine: Engine) -> Engine:
        def cast(_module: nn.Module, _inputs: object, output: Any) -> Any:
            output.logits = output.logits.to(FP32 if output.logits.dtype == BF16 else BF16)
            return output

        engine.model.register_forward_hook(cast)
        return engine


class _Around:
    """An engine with something done to it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _Bf16Gradients(_Around):
    def gradients(self) -> list[torch.Tensor]:
        return [gradient.to(BF16) for gradient in self._engine.gradients()]


class GivesBf16Gradients(Fault):
    def wrap(self, engine: Engine) -> Engine:
        return _Bf16Gradients(engine)  # type: ignore[return-value]


class _AfterUpdate(_Around):
    def __init__(self, engine: Engine, action: Callable[[Engine], None]) -> None:
        super().__init__(engine)
        self._action = action

    def apply(self, lr: float) -> None:
        self._engine.apply(lr)
        self._action(self._engine)


class RoundsAMoment(Fault):
    """In the optimizer's own state, as an optimizer that keeps it in bf16 would."""

    def wrap(self, engine: Engine) -> Engine:
        def round_it(engine: Engine) -> None:
            for state in optimizer_of(engine).state.values():
                state["exp_avg_sq"] = state["exp_avg_sq"].to(BF16)

        return _AfterUpdate(engine, round_it)  # type: ignore[return-value]


class CastsFrozenParameters(Fault):
    def wrap(self, engine: Engine) -> Engine:
        def cast(engine: Engine) -> None:
            for parameter in engine.model.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(FP32)

        return _AfterUpdate(engine, cast)  # type: ignore[return-value]


FAULTS: dict[str, Fault] = {
    "reduces in bf16": ReducesInBf16(),
    "computes in fp32": ComputesInFp32(),
    "masters in bf16": HoldsMastersInBf16(),
    "a bf16 moment": RoundsAMoment(),
    "bf16 gradients": GivesBf16Gradients(),
    "buffers cast": CastsBuffers(),
    "output cast": CastsTheOutput(),
    "frozen parameters cast": CastsFrozenParameters(),
}


class LeavesALayerOut(Fault):
    def plan(self, plan: Plan) -> Plan:
        return replace(plan, float8=Float8Layers(names=plan.float8.names[1:]))


class ConvertsALayerTooMany(Fault):
    def plan(self, plan: Plan) -> Plan:
        return replace(plan, float8=Float8Layers(names=(*plan.float8.names, "lm_head")))


FLOAT8_FAULTS: dict[str, Fault] = {"a layer left out": LeavesALayerOut(), "a layer too many": ConvertsALayerTooMany()}


def _first_step(recipe: dict[str, Any], examples: Examples, fault: Fault | None = None) -> tuple[Facts, list[Any]]:
    fault = fault or Fault()
    checked = Recipe.model_validate(recipe)
    here = world.start(timeout_seconds=60)
    model = models.load_model(checked.model, seed=0)
    plan = build.resolve_plan(checked, model)
    fault.before(model)
    engine = build.build(checked, model, fault.plan(plan), here)
    try:
        stepper = Stepper(fault.wrap(engine), checked, here, plan)
        data = loader_of(checked, examples).step(0)
        outcome = stepper.step(data, index=0, lr=1e-3, measure=False, stop=False, facts=True)
        assert outcome.facts is not None
        return outcome.facts, violations(plan, outcome.facts, several_ranks=here.size > 1)
    finally:
        engine.close()


def optimizer_of(engine: Any) -> torch.optim.Optimizer:
    """The optimizer that an engine really uses."""
    return engine._zero.optimizer if hasattr(engine, "_zero") else engine._optimizer
