"""Requests that `samestep bench` refuses before anything starts: one message, exit code 2, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.bench.contenders import PEERS
from samestep.cli import bench, main

RECIPE = """\
name: tiny
model:
  config: {model_type: llama, vocab_size: 16, hidden_size: 8, intermediate_size: 12, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 1}
  tokenizer: tokenizer
  load_dtype: float32
data: {path: rows.jsonl, format: text}
engine: {ranks: 2}
train: {steps: 3}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--variants", "fsdp+mixed,zero3+low"], ["precision.regime is mixed in one and low in the other"]),
        ([], ["--engines, --variants", "give one of them"]),
        (["--engines", "fsdp,zero4"], ["zero4", "zero3"]),
        (["--engines", "fsdp", "--against", "fsdp3"], ["fsdp3", "fsdp2"]),
        (["--engines", "fsdp,ddp", "--precision", "low", "--against", "fsdp2"], ["--against", "the regime low"]),
        (["--variants", "fsdp+mixed,ddp+mixed", "--precision", "low"], ["--precision"]),
        (["--engines", "fsdp,ddp", "--rounds", "0"], ["--rounds"]),
    ],
)
def test_refusals(folder: Path, arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "r.yaml", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert "Traceback" not in said
    assert all(part in said for part in parts), said
    assert [path.name for path in folder.iterdir()] == ["r.yaml"]


def test_the_command_knows_every_peer() -> None:
    assert tuple(PEERS) == bench._PEERS
