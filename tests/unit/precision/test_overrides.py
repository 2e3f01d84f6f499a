"""Dtypes of single roles: what the recipe may choose is planned, what it may not is refused by name (P15)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samestep.errors import PrecisionError
from samestep.precision.plan import Plan, resolve
from samestep.recipe.schema import Precision


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.free = nn.Linear(2, 2), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.register_buffer("angles", torch.ones(3))


def plan_of(regime: str, overrides: dict[str, Any], **arguments: Any) -> Plan:
    return resolve(Precision.model_validate({"regime": regime, "overrides": overrides}), _Model(), **arguments)


@pytest.mark.parametrize(
    ("regime", "role", "wanted"),
    [
        ("low", "reduce", "float32"),
        ("mixed", "reduce", "bfloat16"),
        ("mixed", "frozen", "bfloat16"),
        ("mixed", "master", "float32"),
        ("mixed", "compute", "bfloat16"),
        ("low", "moments", "bfloat16"),
        ("full", "gradient", "float32"),
        ("full", "output", "float32"),
        ("low", "buffer", "float32"),
    ],
)
def test_p15_every_role_can_be_named(regime, role, wanted):
    """P15: There was no way to set the dtype of a single role."""
    plan = plan_of(regime, {role: wanted})
    assert plan.roles[role].dtypes == (getattr(torch, wanted),)
    others = plan_of(regime, {}).roles
    assert all(plan.roles[name].dtypes == others[name].dtypes for name in others if name != role)


@pytest.mark.parametrize(
    ("regime", "role", "wanted", "what"),
    [
        ("low", "master", "float32", "the master dtype is bfloat16 under low, not float32"),
        ("mixed", "compute", "float32", "the compute dtype is bfloat16 under mixed"),
        ("mixed", "gradient", "bfloat16", "the gradient dtype is float32 under mixed"),
        ("mixed", "moments", "bfloat16", "the moments dtype is float32 under mixed"),
        ("mixed", "output", "float32", "the output dtype is bfloat16 under mixed"),
        ("mixed", "buffer", "bfloat16", "buffer angles is float32, not bfloat16"),
    ],
)
def test_what_the_regime_fixes_is_refused(regime, role, wanted, what):
    with pytest.raises(PrecisionError, match=what) as caught:
        plan_of(regime, {role: wanted})
    assert caught.value.where == f"precision.overrides.{role}"
    assert caught.value.remedy


def test_zero_engines_refuse_what_they_cannot_hold():
    assert plan_of("mixed", {"frozen": "bfloat16"}, casts_frozen=True).roles["frozen"].dtypes == (torch.bfloat16,)
    with pytest.raises(PrecisionError, match=r"holds frozen parameters in the compute dtype \(bfloat16\), not float32"):
        plan_of("mixed", {"frozen": "float32"}, casts_frozen=True)


def test_ignored_modules_are_not_touched():
    plan = plan_of("mixed", {"frozen": "bfloat16"}, ignored_modules=["frozen"])
    assert plan.roles["frozen"].dtypes == (torch.float32,)
