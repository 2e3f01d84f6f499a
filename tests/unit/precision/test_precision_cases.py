"""Rows of a collection of issue threads. P22: what is upcast is said, in numbers worked out by hand. P18: a model whose
files mix dtypes, through the real command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from samestep import world
from samestep.cli import main
from samestep.engines.build import resolve_plan
from samestep.precision.plan import Plan, described
from samestep.recipe import override, parse
from samestep.training.report import upcast_sentence
from tests.small_runs import change, make_folder, make_model

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
    """P22: Users could not tell whether they or the tool must upcast: rules differed between engines."""
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
    """P22: Silence would leave the same doubt."""
    told = upcast_sentence(plan_of(half_loaded(), "precision.regime=low"), shared_by=2)
    assert told == "No parameter is upcast (2,000,116 parameters). 1 tensors are rounded to bfloat16."
    assert upcast_sentence(plan_of(half_loaded().float()), shared_by=1) == (
        "No parameter is upcast (2,000,116 parameters)."
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A bf16 model with fp32 norms that bf16 cannot hold."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    made = make_folder(tmp_path)
    model = make_model(dtype=BF16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float() + 2**-12
    model.save_pretrained(made / "model")
    yield made
    world.stop()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("frozen", [False, True])
def test_p18_fp32_norms_of_a_bf16_model_stay_fp32(folder: Path, frozen: bool, capfd: Any) -> None:
    """P18: crashed on FSDP, and is one dtype to transformers. The plan, the run and the export keep what was stored."""
    change(folder, {"model.freeze": ["*norm*"] if frozen else []})
    capfd.readouterr()
    assert main(["plan", "r.yaml", "--json"]) == 0
    planned = json.loads(capfd.readouterr().out)
    assert planned["roles"]["load"]["dtype"] == "bfloat16, float32"
    assert planned["roles"]["frozen"]["dtype"] == ("float32" if frozen else None)
    assert not any("norm" in name for name in planned["parameters"]["upcast"])
    assert main(["train", "r.yaml", "--out", "out"]) == 0, capfd.readouterr().err
    found = json.loads((folder / "out" / "precision.json").read_text())
    assert found["plan"]["parameters"]["upcast"] == planned["parameters"]["upcast"]
    assert found["violations"] == []
    stored, exported = (load_file(folder / where / "model.safetensors") for where in ("model", "out/export"))
    assert {name: t.dtype for name, t in exported.items()} == {name: t.dtype for name, t in stored.items()}
    norms = [name for name in stored if "norm" in name]
    assert len(norms) == 7
    assert all(torch.equal(exported[name], stored[name]) is frozen for name in norms)
