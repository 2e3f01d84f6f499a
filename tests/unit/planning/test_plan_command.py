"""`samestep plan` as people use it: no training, no data, no weights for the tables."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from samestep import cli
from tests.small_runs import change, make_folder, make_model

RECIPE = """\
name: tiny
model: {path: model}
data: {path: nowhere.jsonl, format: text, max_tokens: 32}
engine: {name: fsdp, ranks: 2}
train: {steps: 30, micro_batch: 2, optimizer: {lr: 1e-5}, schedule: {name: constant}}
"""
LARGE = """\
name: large
model:
  load_dtype: bfloat16
  tokenizer: none
  config: {model_type: llama, vocab_size: 128256, hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80,
    num_attention_heads: 64, num_key_value_heads: 8, tie_word_embeddings: false}
data: {path: nowhere.jsonl, max_tokens: 2048}
engine: {name: fsdp, ranks: 64}
train: {steps: 1000, micro_batch: 1, activation_checkpointing: true, optimizer: {lr: 1e-6}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_folder(tmp_path, dtype=torch.bfloat16, recipe=RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = cli.main(["plan", "r.yaml", "--json", *arguments])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", "r.yaml", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err and err.count("\n") < 4
    return err


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys)
    assert found["roles"]["load"]["dtype"] == "bfloat16"
    assert found["roles"]["master"]["dtype"] == "float32"
    assert found["roles"]["compute"]["dtype"] == "bfloat16"
    assert found["roles"]["frozen"]["dtype"] is None
    assert all(role["reason"] for role in found["roles"].values())
    # Embedding (tied), three blocks of attention (12 x 12, twice 4 x 12, 12 x 12), MLP and two norms, the last norm.
    block = 12 * 12 + 2 * 4 * 12 + 12 * 12 + 3 * 12 * 19 + 2 * 12
    assert found["parameters"]["total"] == found["parameters"]["trainable"] == 17 * 12 + 3 * block + 12
    assert len(found["parameters"]["upcast"]) == 1 + 3 * 9 + 1
    assert found["parameters"]["upcast_bytes"] == 2 * found["parameters"]["total"]
    assert len(found["memory"]) == 7 * 7
    for row in found["memory"]:
        assert sum(row["items"].values()) == row["bytes_per_rank"]
        assert row["ranks"] == 2
        assert row["fits"] is None and not row["cheapest_that_fits"]
    forecast = found["forecast"]
    assert [row["steps"] for row in forecast["after"]] == [1, 10, 30]
    assert forecast["lost_share"] == 0.0
    assert 0.5 < forecast["unseen_share"] < 1.0
    assert set(forecast["by_class"]) == {"embedding", "attention", "mlp", "norm"}
    # 30 steps of 1e-5 are less than the 2**-9 that a one needs.
    assert len(forecast["never_move"]) == 7 and all("norm" in name for name in forecast["never_move"])


def test_options_reach_the_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--engine", "zero2", "--precision", "low", "--ranks", "3", "--set", "train.optimizer.lr=1e-3")
    found = plan(capsys, *arguments)
    assert (found["engine"], found["regime"], found["ranks"]) == ("zero2", "low", 3)
    assert found["roles"]["master"]["dtype"] == "bfloat16"
    assert found["forecast"]["by_class"]["norm"]["lost_share"] == 1.0
    assert found["forecast"]["unseen_share"] == 0.0


def test_what_the_guard_will_refuse_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for limit, said in (("0.5", True), ("1.0", False), ("null", False)):
        assert (
            cli.main(["plan", "r.yaml", "--precision", "low", "--set", f"precision.max_lost_update_share={limit}"]) == 0
        )
        assert ("precision.max_lost_update_share (0.5) allows" in capsys.readouterr().out) is said
    assert plan(capsys, "--precision", "low")["forecast"]["max_lost_share"] == 0.5


def test_what_fits_is_marked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = sorted({row["bytes_per_rank"] for row in plan(capsys)["memory"]})
    found = plan(capsys, "--device-memory", f"{sizes[1]}B")
    assert {row["bytes_per_rank"] for row in found["memory"] if row["fits"]} == set(sizes[:2])
    assert [row["bytes_per_rank"] for row in found["memory"] if row["cheapest_that_fits"]] == [sizes[0]]
    none = plan(capsys, "--device-memory", "1KB")
    assert not any(row["fits"] or row["cheapest_that_fits"] for row in none["memory"])


def test_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "r.yaml", "--device-memory", "80GB"]) == 0
    out = capsys.readouterr().out
    for part in (
        "fsdp on 2 ranks, regime mixed",
        "fp32 masters, bfloat16 compute",
        "Upcast: model.embed_tokens.weight",
        "Peak memory per rank",
        "* fits with the least memory",
        "Will never move: model.layers.0.input_layernorm.weight",
    ):
        assert part in out
    assert max(map(len, out.splitlines()[:20])) <= 80


def test_stochastic_rounding_has_no_share(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--precision", "mixed-stochastic")["forecast"]
    assert (found["lost_share"], found["unseen_share"], found["dropped_share"]) == (0.0, None, None)
    assert found["never_move"] == []


def test_no_forecast_for_sgd(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--set", "train.optimizer={name: sgd, lr: 1e-2}")["forecast"]
    assert found["lost_share"] is None and found["after"] == []
    assert found["source"].startswith("no forecast")


def test_weights_that_are_not_safetensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model" / "model.safetensors").unlink()
    found = plan(capsys)
    assert len(found["memory"]) == 49
    assert "no safetensors" in found["forecast"]["source"]
    assert cli.main(["plan", "r.yaml"]) == 0
    assert "No forecast: " in capsys.readouterr().out


def test_epochs_need_the_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, {"train.steps": None, "train.epochs": 2})
    assert "nowhere.jsonl" in refused(capsys)
    # 20 rows, 2 ranks of 2 rows: 5 steps an epoch.
    assert plan(capsys, "--set", "data.path=rows.jsonl")["steps"] == 10


def test_adapters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    found = plan(capsys, "--set", "model.lora={rank: 2, target_modules: [q_proj]}")
    # A [2, 12] and B [12, 2] in each of three blocks.
    assert found["parameters"]["trainable"] == 3 * 2 * 24
    assert len(found["parameters"]["without_master"]) == 1 + 3 * 9 + 1
    assert found["forecast"]["by_class"]["attention"]["weights"] == 3 * 2 * 24
    assert found["forecast"]["source"] == "144 samples of numbers like the initial values of fresh adapters"


@pytest.mark.parametrize("size", ["80GX", "much", "0GB", "-1GB"])
def test_bad_sizes(folder: Path, capsys: pytest.CaptureFixture[str], size: str) -> None:
    assert "--device-memory" in refused(capsys, f"--device-memory={size}")


def test_bad_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no folder" in refused(capsys, "--set", "model.path=./gone")
    assert "no parameter matches" in refused(capsys, "--set", "model.freeze=[nothing]")
    assert "no module of class" in refused(capsys, "--set", "engine.unit_classes=[Nothing]")
    (folder / "model" / "model.safetensors").write_bytes(b"damaged")
    assert "model.safetensors" in refused(capsys)
    (folder / "model" / "config.json").write_text("{")
    assert "cannot be loaded" in refused(capsys)
    (folder / "model" / "config.json").unlink()
    assert "cannot be loaded" in refused(capsys)


def test_quantised_weights_are_not_planned_as_something_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = folder / "model" / "model.safetensors"
    stored = load_file(weights)
    name = "model.layers.0.mlp.up_proj.weight"
    stored[name] = torch.zeros(stored[name].shape, dtype=torch.uint8)
    save_file(stored, weights, metadata={"format": "pt"})
    assert f"{name} is stored as whole numbers" in refused(capsys)
    config = json.loads((folder / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    assert "its config quantises the weights (bitsandbytes)" in refused(capsys)


@pytest.mark.slow
def test_a_model_of_70_billion_parameters_takes_no_room(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(LARGE)
    command = [sys.executable, "-m", "samestep", "plan", "r.yaml", "--json", "--device-memory", "80GB"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"]["total"] == 70_553_706_496
    (chosen,) = [r for r in found["memory"] if (r["engine"], r["regime"]) == ("fsdp", "mixed")]
    assert chosen["after_step_bytes"] == pytest.approx(12 * 70_553_706_496 / 64, rel=1e-3)
    assert any(row["fits"] for row in found["memory"])
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # KiB, of the largest child so far
    assert peak == before or peak < 2 * 1024**2


def test_float8_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_model(**sizes, num_hidden_layers=1).save_pretrained(folder / "model")
    layers = [f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj")]
    layers += [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    found = plan(capsys, "--precision", "mixed-fp8")["float8"]
    assert found["layers"] == layers
    keys = {f"model.layers.0.self_attn.{name}_proj": "its sizes are no multiples of 16" for name in "kv"}
    assert found["left_out"] == {**keys, "lm_head": "precision.fp8.skip: *lm_head*"}
    assert plan(capsys)["float8"] == {"layers": [], "left_out": {}}
    assert cli.main(["plan", "r.yaml", "--precision", "mixed-fp8"]) == 0
    text = capsys.readouterr().out
    assert "5 layers multiply in float8: model.layers.0.self_attn.q_proj" in text
    assert "Not in float8, its sizes are no multiples of 16: model.layers.0.self_attn.k_proj" in text


def test_a_model_without_float8_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no layer of this model can compute in float8" in refused(capsys, "--precision", "mixed-fp8")
