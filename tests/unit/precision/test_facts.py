"""Observed dtypes against planned ones: every difference is named, nothing passes because it was not seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from samestep import world
from samestep.cli import main
from samestep.engines import torch_native
from samestep.precision.facts import ComputeObserver, Facts, observe, violations
from samestep.precision.float8 import Float8Layers
from samestep.precision.plan import Plan, resolve
from samestep.recipe.schema import Precision
from tests.small_runs import assert_short_message, half_written, make_folder

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3, dtype=BF16)
        self.frozen.requires_grad_(False)
        self.register_buffer("frequencies", torch.ones(3), persistent=False)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))


def plan_of(regime: str = "mixed") -> Plan:
    return resolve(Precision.model_validate({"regime": regime}), Small())


def facts_of(plan: Plan, *, has_moments: bool = True, **changes: Any) -> Facts:
    """Facts as they should be, with changes."""
    seen = observe(
        Small(),
        masters=[torch.zeros(2, dtype=plan.master)],
        gradients=[plan.gradient],
        moments=[torch.zeros(2, dtype=plan.moments)] if has_moments else [],
        reduced={plan.reduce},
        computed={plan.compute},
        logits=plan.compute,
    )
    return replace(seen, roles=seen.roles | changes)


@pytest.mark.parametrize(
    "regime", ["full", "mixed", "mixed-stochastic", "low", "low-stochastic", "low-kahan", "mixed-fp8"]
)
def test_nothing_to_say(regime: str) -> None:
    plan = plan_of(regime)
    assert violations(plan, facts_of(plan), several_ranks=True) == []
    assert violations(plan, facts_of(plan, has_moments=False), several_ranks=True) == []  # an optimizer without moments


@pytest.mark.parametrize("role", ["master", "compute", "gradient", "reduce", "moments", "frozen", "output"])
@pytest.mark.parametrize("seen", [(FP16,), (BF16, FP32)], ids=str)
def test_every_role_is_named(role: str, seen: tuple[torch.dtype, ...]) -> None:
    plan = plan_of()
    changes: dict[str, Any] = {role: seen}
    (found,) = violations(plan, facts_of(plan, **changes), several_ranks=True)
    assert found.role == found.what == role
    assert (found.planned, found.observed) == (plan.roles[role].dtypes, seen)
    assert str(found).startswith(f"{role}: planned ")


@pytest.mark.parametrize("role", ["master", "compute", "gradient", "reduce", "frozen"])
def test_what_was_not_seen_is_no_agreement(role: str) -> None:
    plan = plan_of()
    changes: dict[str, Any] = {role: ()}
    (found,) = violations(plan, facts_of(plan, **changes), several_ranks=True)
    assert str(found).endswith("observed none")


def test_one_process_sends_nothing() -> None:
    plan = plan_of()
    assert violations(plan, facts_of(plan, reduce=()), several_ranks=False) == []


@pytest.mark.parametrize("seen", [{"frequencies": BF16}, {"counter": torch.int32}], ids=str)
def test_buffers_are_held_to_their_own_dtype(seen: dict[str, torch.dtype]) -> None:
    plan = plan_of()
    facts = facts_of(plan)
    (found,) = violations(plan, replace(facts, buffers=facts.buffers | seen), several_ranks=True)
    (name,) = seen
    assert found.role == "buffer"
    assert name in str(found)


def test_a_buffer_that_is_gone_is_named() -> None:
    """Also when it only has another name: a comparison by names must not pass for want of one."""
    plan = plan_of()
    facts = facts_of(plan)
    renamed = {f"module.{name}": dtype for name, dtype in facts.buffers.items()}
    found = violations(plan, replace(facts, buffers=renamed), several_ranks=True)
    assert sorted(violation.what for violation in found) == ["buffer counter", "buffer frequencies"]


def test_a_float8_layer_that_did_not_run_breaks_nothing() -> None:
    """An expert that no token reached in the first step has shown nothing."""
    plan = replace(plan_of(), float8=Float8Layers(names=("ran", "idle")))
    facts = replace(facts_of(plan), float8=frozenset({"ran"}))
    (found,) = violations(plan, facts, several_ranks=True)
    assert found.what == "layer idle"
    assert violations(plan, replace(facts, idle=frozenset({"idle"})), several_ranks=True) == []


def test_the_observer_knows_what_did_not_run() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
    observer = ComputeObserver(model)
    model["used"](torch.zeros(1, 3))
    assert observer.idle == {"unused"}


def test_the_observer_sees_parameters_inside_the_forward_pass() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=FP32))
    observer = ComputeObserver(model)
    model(torch.zeros(1, 3))
    assert observer.dtypes == {FP32}
    model.to(BF16)
    model(torch.zeros(1, 3, dtype=BF16))
    assert observer.dtypes == {FP32, BF16}
    observer.close()
    observer.dtypes.clear()
    model(torch.zeros(1, 3, dtype=BF16))
    assert observer.dtypes == set()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    yield make_folder(tmp_path)
    world.stop()
    torch.set_num_threads(threads)


def test_a_violation_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """An engine that computes in fp32 under `mixed`, through the real command."""

    def wrong(**settings: Any) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(**settings | {"param_dtype": FP32})

    monkeypatch.setattr(torch_native, "MixedPrecisionPolicy", partial(wrong))
    capfd.readouterr()
    assert main(["train", "r.yaml", "--out", "out"]) == 1
    assert_short_message(capfd.readouterr().err, "compute: planned bfloat16, observed float32")
    assert half_written(folder / "out") == []
    recorded = json.loads((folder / "out" / "precision.json").read_text())
    assert "compute" in json.dumps(recorded["violations"])
