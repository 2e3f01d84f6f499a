"""`samestep compare` as people run it: real processes, real ranks, a tiny model made on the spot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "</s>", "<unk>", *"abcdefghijklm"]
RECIPE = """\
name: tiny
model:
  config: {model_type: llama, vocab_size: 16, hidden_size: 8, intermediate_size: 12, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 1, tie_word_embeddings: true}
  tokenizer: tokenizer
  load_dtype: bfloat16
data: {path: rows.jsonl, format: text, held_out: 2}
precision: {max_lost_update_share: null}
engine: {ranks: 2}
train: {steps: 3, micro_batch: 2, optimizer: {lr: 1e-2}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe with all that it needs, and a folder for temporary files of its own."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )
    fast.save_pretrained(tmp_path / "tokenizer")
    rows = [{"text": " ".join(WORDS[3 + (n + i) % 13] for i in range(4 + n % 3))} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "scratch").mkdir()
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(folder / "scratch")}
    line = [sys.executable, "-m", "samestep", "compare", "r.yaml", "--out", "c", *arguments]
    return subprocess.Popen(
        line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def processes_of(folder: Path) -> list[str]:
    """Command lines of live processes that name a file in the folder's scratch space, as all workers and ranks do."""
    scratch = str(folder / "scratch").encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if scratch in line:
            found.append(line.replace(b"\0", b" ").decode())
    return found


def no_process_is_left(folder: Path) -> None:
    """Waits for the processes of a comparison that was killed; fails when some do not end."""
    deadline = time.monotonic() + 120
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(folder) == []


def test_two_engines_and_two_regimes(folder: Path) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("matplotlib")
    running = start(folder, "--variants", "fsdp+mixed,zero3+mixed,fsdp+low")
    out, err = running.communicate(timeout=500)
    assert running.returncode == 0, out + err
    report = json.loads((folder / "c" / "compare.json").read_text())
    assert report["ok"] is True
    by_pair = {(p["a"], p["b"]): p for p in report["pairs"]}
    same = by_pair["fsdp+mixed", "zero3+mixed"]
    assert same["bit_equal"] is True
    assert (same["max_abs_loss_gap"], same["max_abs_grad_norm_gap"], same["max_abs_weight_gap"]) == (0.0, 0.0, 0.0)
    other = by_pair["fsdp+mixed", "fsdp+low"]
    assert other["bit_equal"] is False
    assert other["max_abs_weight_gap"] > 0
    assert [len((folder / "c" / v["name"] / "steps.jsonl").read_text().splitlines()) for v in report["variants"]] == [
        3,
        3,
        3,
    ]
    assert report["verdict"] in out
    assert (folder / "c" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert list(folder.rglob("masters.safetensors")) == []
    assert processes_of(folder) == []
    assert list((folder / "scratch").glob("samestep-*")) == []


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc to find processes")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_survives_the_comparison(folder: Path, number: signal.Signals) -> None:
    arguments = ("--engines", "fsdp,ddp", "--set", "train.steps=100000", "--no-picture")
    running = start(folder, *arguments)
    steps = folder / "c" / "fsdp+mixed" / "steps.jsonl"
    try:
        while not (steps.exists() and steps.stat().st_size):
            assert running.poll() is None, running.communicate()
            time.sleep(0.1)
        assert processes_of(folder)
        running.send_signal(number)
        _, err = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == (130 if number == signal.SIGTERM else -signal.SIGKILL)
    assert "Traceback" not in err
    # After SIGKILL the worker ends on its own, once its last step is done.
    no_process_is_left(folder)
    assert not (folder / "c" / "compare.json").exists()
    assert steps.stat().st_size


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc to find processes")
def test_a_killed_comparison_goes_on_where_it_was(folder: Path) -> None:
    arguments = ("--engines", "single,ddp", "--no-picture")
    running = start(folder, *arguments)
    first, second = (folder / "c" / f"{engine}+mixed" for engine in ("single", "ddp"))
    try:
        while not second.exists():
            assert running.poll() is None, running.communicate()
            time.sleep(0.05)
    finally:
        running.kill()
    running.communicate(timeout=120)
    no_process_is_left(folder)
    kept = [first / name for name in ("steps.jsonl", "summary.json")]
    done = [(path.stat().st_mtime_ns, path.read_bytes()) for path in kept]
    assert not (folder / "c" / "compare.json").exists()

    resumed = start(folder, *arguments, "--resume")
    out, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, out + err
    assert done == [(path.stat().st_mtime_ns, path.read_bytes()) for path in kept]
    (pair,) = json.loads((folder / "c" / "compare.json").read_text())["pairs"]
    assert pair["bit_equal"] is True
    assert len((second / "steps.jsonl").read_text().splitlines()) == 3


def test_a_variant_that_cannot_run_says_why_once(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "a b"}\n{"text": \n')
    running = start(folder, "--engines", "single,ddp", "--no-picture")
    out, err = running.communicate(timeout=300)
    assert running.returncode == 2
    assert err.count("error:") == 1
    assert "variant single+mixed: " in err
    assert "rows.jsonl" in err
    assert "Traceback" not in out + err
    assert not (folder / "c" / "ddp+mixed").exists()
