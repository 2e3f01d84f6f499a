"""Row P22 of the collection of issue threads: what is upcast is said, in numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from samestep.engines.build import resolve_plan
from samestep.precision.plan import Plan, described
from samestep.recipe import override, parse
from samestep.training.report import upcast_sentence

BF16 = torch.bfloat16
TEXT = "{model: {path: m}, data: {path: d}, train: {steps: 1}}"


def plan_of(model: nn.Module, *changes: str) -> Plan:
    return resolve_plan(override(parse(TEXT), list(changes)), model)


def half_loaded() -> nn.Module:
    """A bf16 layer that trains (1000 x 2000, no bias), a frozen one of 10 x 10, and an fp32 norm of 16."""
    model = nn.ModuleDict(
        {
            "layer": nn.Linear(2000, 1000, bias=False, dtype=BF16),
            "frozen": nn.Linear(10, 10, bias=False, dtype=BF16),
            "norm": nn.LayerNorm(16, bias=False),
        }
    )
    model["frozen"].requires_grad_(False)
    return model


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"])
def test_p22_what_is_upcast_is_said_on_every_engine(engine: str) -> None:
    """Users could not tell whether they or the tool must upcast: rules differed between engines."""
    plan = plan_of(half_loaded(), f"engine={{name: {engine}, ranks: 2}}")
    assert [p.name for p in plan.upcast] == ["layer.weight"]
    told = upcast_sentence(plan, shared_by=2)
    # 2 bytes more for each of 2,000,000 weights, shared by two ranks.
    assert told == (
        "1 tensors, 2,000,000 of 2,000,116 parameters, get float32 masters over bfloat16 weights: 2.0 MB more per rank."
    )
    parameters = described(plan)["parameters"]
    assert parameters["upcast"] == ["layer.weight"]
    assert parameters["upcast_bytes"] == 4_000_000


def test_p22_where_nothing_is_upcast_that_is_said() -> None:
    told = upcast_sentence(plan_of(half_loaded(), "precision.regime=low"), shared_by=2)
    assert told == "No parameter is upcast (2,000,116 parameters). 1 tensors are rounded to bfloat16."
    assert upcast_sentence(plan_of(half_loaded().float()), shared_by=1) == (
        "No parameter is upcast (2,000,116 parameters)."
    )
