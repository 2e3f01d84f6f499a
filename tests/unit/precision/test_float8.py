"""Float8 layers: which are chosen, what they compute by hand, what is refused, and what a live run shows of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from samestep import world
from samestep.cli import main
from samestep.engines import float8 as engine_float8
from samestep.errors import EngineError, PrecisionError
from samestep.precision import float8
from samestep.precision.facts import ComputeObserver, observe, violations
from samestep.precision.float8 import Float8Layers
from samestep.precision.plan import Plan, resolve
from samestep.recipe.schema import Float8, Precision
from tests.small_runs import assert_short_message, change, half_written, make_folder, make_model

BF16, FP32 = torch.bfloat16, torch.float32


class OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 16, 16))


def small() -> nn.ModuleDict:
    block = nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16), "odd": nn.Linear(16, 24)})
    adapter = nn.ModuleDict({"base_layer": nn.Linear(16, 16), "lora_A": nn.ModuleDict({"default": nn.Linear(16, 16)})})
    others = {"own": OwnForward(16, 16), "experts": Experts(), "norm": nn.LayerNorm(16), "ignored": nn.Linear(16, 16)}
    return nn.ModuleDict(
        {"embed": nn.Embedding(16, 16), "block": block, "adapter": adapter, **others, "lm_head": nn.Linear(16, 16)}
    )


def plan_of(model: nn.Module, **settings: object) -> Plan:
    precision = Precision.model_validate({"regime": "mixed-fp8", "fp8": settings})
    return resolve(precision, model, ignored_modules=["ign*"])


def test_what_is_in_float8_and_why_the_rest_is_not() -> None:
    found = plan_of(small()).float8
    assert found.names == ("block.up", "block.down", "adapter.base_layer")
    assert found.left_out == {
        "block.odd": "its sizes are no multiples of 16",
        "adapter.lora_A.default": "an adapter",
        "own": "OwnForward is not a torch.nn.Linear",
        "experts": "Experts is not a torch.nn.Linear",
        "ignored": "engine.ignored_modules",
        "lm_head": "precision.fp8.skip: *lm_head*",
    }


def test_the_recipe_says_what_to_skip() -> None:
    found = plan_of(small(), skip=["block.*", "*base*"]).float8
    assert found.names == ("lm_head",)
    assert found.left_out["block.odd"] == found.left_out["block.up"] == "precision.fp8.skip: block.*"


@pytest.mark.parametrize("regime", ["full", "mixed", "mixed-stochastic", "low", "low-stochastic", "low-kahan"])
def test_no_other_regime_has_float8_layers(regime: str) -> None:
    assert resolve(Precision.model_validate({"regime": regime}), small()).float8 == Float8Layers()


@pytest.mark.parametrize(("master", "dtype"), [("float32", FP32), ("bfloat16", BF16)])
def test_roles_follow_the_master(master: str, dtype: torch.dtype) -> None:
    plan = plan_of(small(), master=master, emulate=True)
    assert {plan.master, plan.gradient, plan.reduce, plan.moments} == {dtype}
    assert (plan.compute, plan.cast, plan.update) == (BF16, "nearest", "nearest")
    for text in (f"{master} masters", "float8 matmuls", "tensorwise", "emulated"):
        assert text in plan.roles["compute"].reason


def test_a_pattern_without_a_layer_is_refused() -> None:
    recipe = Float8(skip=["*lm_head*", "*typo*"])
    with pytest.raises(PrecisionError, match=r"precision.fp8.skip: no layer matches '\*typo\*'.*block.up"):
        float8.check(recipe, float8.choose(recipe, small()))
    float8.check(Float8(), float8.choose(Float8(), small()))  # of the default's patterns one is enough


def test_a_model_without_such_layers_is_refused() -> None:
    model = nn.ModuleDict({"odd": nn.Linear(16, 24), "lm_head": nn.Linear(16, 16)})
    with pytest.raises(PrecisionError, match=r"no multiples of 16 \(odd\).*lm_head\* \(lm_head\).*regime: mixed"):
        float8.check(Float8(), float8.choose(Float8(), model))


def test_a_device_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Float8Layers(names=("a",))
    with pytest.raises(EngineError, match=r"device \(cpu\) cannot multiply in float8.*precision.fp8.emulate: true"):
        engine_float8.refuse(Float8(), layers, torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    for capability, what in (((8, 6), "cannot multiply in float8"), ((8, 9), "samestep.fp8")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        with pytest.raises(EngineError, match=what):
            engine_float8.refuse(Float8(), layers, torch.device("cuda"))


def test_without_torchao_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(EngineError, match=r"needs torchao, which is not installed.*samestep\[fp8\]"):
        engine_float8.refuse(Float8(emulate=True), Float8Layers(names=("a",)), torch.device("cpu"))


def rounded(values: torch.Tensor, *, bits: int, lowest_exponent: int) -> torch.Tensor:
    """To the nearest float of `bits` significant bits, ties to even, by arithmetic in fp64."""
    exponent = torch.floor(torch.log2(values.abs().clamp(min=2.0**-60))).clamp(min=lowest_exponent)
    step = 2.0 ** (exponent - (bits - 1))
    return torch.round(values / step) * step


def e4m3(values: torch.Tensor) -> torch.Tensor:
    """What a tensorwise scale and float8 e4m3 (4 significant bits, up to 448, exponents from -6) leave of values."""
    wide = values.double()
    scale = (448 / wide.abs().max()).float()
    return rounded((values.float() * scale).double(), bits=4, lowest_exponent=-6) / scale.double()


def e5m2(values: torch.Tensor) -> torch.Tensor:
    """The same for e5m2: 3 significant bits, up to 57344, exponents from -14."""
    wide = values.double()
    scale = (57344 / wide.abs().max()).float()
    return rounded((values.float() * scale).double(), bits=3, lowest_exponent=-14) / scale.double()


def converted(*names: str, scaling: str = "tensorwise") -> nn.Sequential:
    pytest.importorskip("torchao", reason="mixed-fp8 needs torchao, the extra samestep[fp8]")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).to(BF16)
    recipe = Float8.model_validate({"emulate": True, "scaling": scaling})
    engine_float8.convert(model, Float8Layers(names=names), recipe)
    return model


def test_the_three_matmuls_by_hand() -> None:
    """Output, input gradient and weight gradient of a layer against products in fp64 of operands rounded by hand."""
    layer = converted("0")[0]
    assert isinstance(layer, nn.Linear)
    generator = torch.Generator().manual_seed(5)
    inputs = (torch.randn(2, 7, 32, generator=generator) ** 3).to(BF16).requires_grad_()
    upstream = (torch.randn(2, 7, 48, generator=generator) ** 3).to(BF16)
    output = layer(inputs)
    output.backward(upstream)
    assert inputs.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    x, w, g = e4m3(inputs.detach()).view(-1, 32), e4m3(layer.weight.detach()), e5m2(upstream).view(-1, 48)
    # The product is rounded to bf16 before the bias is added in bf16.
    assert_close((x @ w.T).to(BF16) + layer.bias.detach(), output.detach().view(-1, 48))
    assert_close(g @ w, inputs.grad.view(-1, 32))
    assert_close(g.T @ x, layer.weight.grad)
    assert_close(upstream.view(-1, 48).double().sum(0), layer.bias.grad)
    plain = nn.functional.linear(inputs, layer.weight, layer.bias)
    assert (plain - output).abs().max() > 20 * 2**-9 * output.abs().median()


def assert_close(expected: torch.Tensor, found: torch.Tensor) -> None:
    """Equal up to one rounding to bf16, and one ulp of it where the fp32 sum fell on the other side."""
    assert found.dtype == BF16
    torch.testing.assert_close(found.double(), expected.double(), rtol=2**-7, atol=1e-6)


def test_rowwise_scales_are_powers_of_two_for_each_row() -> None:
    """A row of large values does not coarsen the others, as it does under one scale for the whole tensor."""
    inputs = torch.ones(2, 32, dtype=BF16)
    inputs[0] *= 2.0**14
    inputs[1, ::2] = 0.9375  # four significant bits: exact in e4m3 by itself
    outputs = {}
    for scaling in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        layer = converted("0", scaling=scaling)[0]
        assert isinstance(layer, nn.Linear)
        layer.weight.data.fill_(1.0)
        layer.bias.data.zero_()
        outputs[scaling] = layer(inputs)[1, 0].item()
    assert outputs["rowwise"] == outputs["rowwise_with_gw_hp"] == 16 * 0.9375 + 16
    assert outputs["tensorwise"] != outputs["rowwise"]


def test_a_layer_that_breaks_the_plan_is_named() -> None:
    """Seen in a forward pass: the planned layer did not compute in float8, another one did."""
    model = converted("1")
    plan = resolve(Precision.model_validate({"regime": "mixed-fp8"}), nn.Sequential(nn.Linear(32, 48)).to(BF16))
    assert plan.float8.names == ("0",)
    observer = ComputeObserver(model)
    with torch.no_grad():
        model(torch.ones(1, 32, dtype=BF16))
    observer.close()
    assert observer.float8 == {"1"}
    seen = observe(
        model, masters=[], gradients=[], moments=[], reduced=[], computed=[], logits=BF16, float8_layers=observer.float8
    )
    facts = replace(seen, roles={role: plan.roles[role].dtypes for role in seen.roles})
    texts = [str(violation) for violation in violations(plan, facts, several_ranks=False)]
    assert texts == [
        "layer 0: planned float8_e4m3fn, observed bfloat16",
        "layer 1: planned bfloat16, observed float8_e4m3fn",
    ]


def test_observation_ends_with_an_error_in_the_layer() -> None:
    model = converted("0")
    observer = ComputeObserver(model)
    with pytest.raises(AssertionError, match="Inner dims"):
        model(torch.ones(1, 31, dtype=BF16))
    observer.close()
    observer.float8.clear()
    torch.ones(1).to(torch.float8_e4m3fn)
    assert observer.float8 == set()


def test_names_and_parameters_stay() -> None:
    torch.manual_seed(3)
    fresh = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).to(BF16)
    model = converted("0", "1")
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in fresh.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


Run = Callable[[dict[str, Any]], tuple[int, str, Path]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Trains a small model in regime mixed-fp8 with changed fields; exit code, standard error, run folder."""
    folder = make_folder(tmp_path)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    make_model(hidden_size=16, intermediate_size=32, num_hidden_layers=1, **heads).save_pretrained(folder / "model")
    monkeypatch.chdir(folder)

    def go(changes: dict[str, Any]) -> tuple[int, str, Path]:
        change(folder, {"precision.regime": "mixed-fp8"} | changes)
        capfd.readouterr()
        code = main(["train", "r.yaml", "--out", "out"])
        return code, capfd.readouterr().err, folder / "out"

    threads = torch.get_num_threads()
    yield go
    world.stop()
    torch.set_num_threads(threads)


def test_a_run_on_the_cpu_is_refused(run: Run) -> None:
    """P26: float8 is never replaced by something else in silence."""
    code, err, out = run({})
    assert code == 2
    assert_short_message(err, "precision.regime", "(cpu) cannot multiply in float8", "precision.fp8.emulate: true")
    assert half_written(out) == [] and not (out / "steps.jsonl").exists()


def test_a_run_in_emulation(run: Run) -> None:
    """What it leaves names the layers, as planned and as seen; the export needs no torchao."""
    pytest.importorskip("torchao", reason="mixed-fp8 needs torchao, the extra samestep[fp8]")
    code, err, out = run({"precision.fp8": {"emulate": True}})
    assert code == 0, err
    found = json.loads((out / "precision.json").read_text())
    layers = [
        f"model.layers.0.{name}_proj" for name in ("mlp.down", "mlp.gate", "mlp.up", "self_attn.o", "self_attn.q")
    ]
    assert found["facts"]["float8_layers"] == sorted(found["plan"]["float8"]["layers"]) == layers
    assert set(found["plan"]["float8"]["left_out"]) == {
        *(f"model.layers.0.self_attn.{n}_proj" for n in "kv"),
        "lm_head",
    }
    assert found["violations"] == []
    with safe_open(out / "export" / "model.safetensors", "pt") as stored:
        with safe_open(out.parent / "model" / "model.safetensors", "pt") as loaded:
            assert set(stored.keys()) == set(loaded.keys())
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {FP32}  # noqa: SIM118 - no mapping
    assert "torchao" not in (out / "export" / "config.json").read_text()
