"""`samestep plan --cluster` as people use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep import cli

RECIPE = """\
name: tiny
model:
  tokenizer: none
  config: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 4, tie_word_embeddings: false}
data: {path: nowhere.jsonl, max_tokens: 128}
engine: {name: fsdp, ranks: 2}
train: {steps: 100, micro_batch: 4}
"""
CLUSTER = """\
device: A100-80GB
nodes: 4
devices_per_node: 8
inter_node: 1600Gb/s
price_per_device_hour: 2
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.main(["plan", "r.yaml", *arguments]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err and err.count("\n") < 8
    return err if code == 2 else out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--cluster", "cluster.yaml", "--json"))
    assert (found["ranks"], found["nodes"], found["engine"]) == (32, 4, "fsdp")
    assert found["tokens_per_step"] == 4 * 128 * 32
    low, high = found["tokens_per_second_per_device_range"]
    assert low < found["tokens_per_second_per_device"] < high
    assert found["cost"]["run"] > 0
    assert len(found["assumptions"]) > 8


def test_later_fields_win_over_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--cluster", "cluster.yaml", "--cluster", "nodes=2", "--cluster", "device=h100-sxm", "--json")
    found = json.loads(run(capsys, *given))
    assert (found["ranks"], found["device"]) == (16, "h100-sxm")
    found = json.loads(run(capsys, "--cluster", "nodes=2", "--cluster", "cluster.yaml", "--json"))
    assert found["ranks"] == 32


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--cluster", "cluster.yaml")
    for part in (
        "fsdp on 4 x 8 A100-80GB",
        "Step: ",
        "Limited by ",
        "MFU: ",
        "(6N)",
        "Cost: 100 steps take",
        "Assumed:",
    ):
        assert part in out
    assert "calibrated on published results" in out and "engine.ranks is 32" in out


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--cluster", "cluster.yaml", "--cluster", "memory=1MB", code=1)
    assert "DOES NOT FIT" in out and "Step:" not in out and "Cost:" not in out
    found = json.loads(run(capsys, "--cluster", "cluster.yaml", "--cluster", "memory=1MB", "--json", code=1))
    assert found["memory"]["fits"] is False and found["step_seconds"] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nodes=0", "nodes"),
        ("nodes=-3", "nodes"),
        ("nodes=2.5", "nodes"),
        ("nodes=true", "nodes"),
        ("nodes=1e9", "nodes"),
        ("devices_per_node=0", "devices_per_node"),
        ("inter_node=-1", "no speed"),
        ("inter_node=0GB/s", "no speed"),
        ("inter_node=fast", "no speed such as"),
        ("inter_node=400Gb", "no speed such as"),
        ("inter_node=null", "inter_node: is missing"),
        ("link_efficiency=1.5", "link_efficiency"),
        ("matmul_efficiency=0", "matmul_efficiency"),
        ("inter_node_latency=-1.0", "inter_node_latency"),
        ("memory=80GX", "memory"),
        ("price_per_device_hour=-2", "price_per_device_hour"),
        ("peak_flops=.inf", "peak_flops"),
        ("device=A99", "not in the table of devices"),
        ("device=B200", "matmul_efficiency"),
        ("node=4", "did you mean nodes"),
        ("nodes=", "no value"),
        ("gone.yaml", "no such file"),
        (".", "is a folder"),
        ("r.yaml", "unknown key"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], given: str, message: str) -> None:
    assert message in run(capsys, "--cluster", "cluster.yaml", "--cluster", given, code=2)


def test_options_that_contradict(capsys: pytest.CaptureFixture[str]) -> None:
    assert "leave --ranks out" in run(capsys, "--cluster", "cluster.yaml", "--ranks", "8", code=2)
    assert "--device-memory" in run(capsys, "--cluster", "cluster.yaml", "--device-memory", "80GB", code=2)
    missing = run(capsys, "--cluster", "nodes=2", code=2)
    assert "device: is missing: name of the device, such as A100-80GB\n" in missing
    assert "devices_per_node: is missing: devices of each node\n" in missing
    assert "single is one process" in run(capsys, "--cluster", "cluster.yaml", "--engine", "single", code=2)
    uneven = ("--engine", "hsdp", "--set", "engine.shard_ranks=12", "--cluster", "nodes=3")
    assert "do not fill nodes" in run(capsys, "--cluster", "cluster.yaml", *uneven, code=2)


def test_a_batch_that_is_far_too_large_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert "DOES NOT FIT" in run(capsys, "--cluster", "cluster.yaml", "--set", f"train.micro_batch={2**53}", code=1)
