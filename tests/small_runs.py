"""Small runs of the real command: a tiny model, its tokenizer, some rows, and what is left behind afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Before the libraries read it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "</s>", "<unk>", *"abcdefghijklm"]
RECIPE = """\
name: tiny
model: {path: model}
data: {path: rows.jsonl, format: text, max_tokens: 32}
precision: {max_lost_update_share: null}
engine: {name: single, ranks: 2}
train: {steps: 2, micro_batch: 2, optimizer: {lr: 1e-2}}
"""
HALF_WRITTEN = ("export", "summary.json", ".*partial*", ".probe")
"""What a run that failed must not leave in its folder."""


def make_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """One token a word; `special` are its special tokens, by default all of them."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = special or {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **special)


def make_model(*, dtype: torch.dtype = torch.float32, **settings: Any) -> LlamaForCausalLM:
    """Tied, with grouped queries, and of sizes that two ranks cannot share evenly."""
    sizes = {"vocab_size": 17, "hidden_size": 12, "intermediate_size": 19, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}
    wanted: dict[str, Any] = sizes | heads | {"tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**(wanted | settings)))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def make_folder(folder: Path, *, dtype: torch.dtype = torch.float32, rows: int = 20, recipe: str = RECIPE) -> Path:
    """Writes model/, rows.jsonl and r.yaml into `folder`, and scratch/ for temporary files of its own."""
    make_model(dtype=dtype).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    write_rows(folder, rows)
    (folder / "r.yaml").write_text(recipe)
    (folder / "scratch").mkdir()
    return folder


def write_rows(folder: Path, rows: int) -> None:
    """`rows` texts of different lengths."""
    texts = [{"text": " ".join(WORDS[3 + (n + i) % 13] for i in range(4 + n % 3))} for n in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))


def change(folder: Path, changes: dict[str, Any]) -> None:
    """Changes fields of r.yaml, given as {"model.path": value}."""
    content = yaml.safe_load((folder / "r.yaml").read_text())
    for name, value in changes.items():
        *sections, key = name.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    (folder / "r.yaml").write_text(yaml.safe_dump(content))


def steps_of(out: Path) -> list[dict[str, Any]]:
    """The whole lines of steps.jsonl. Fails when the file ends within a line."""
    text = (out / "steps.jsonl").read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def half_written(out: Path) -> list[str]:
    """What a failed run should not have left in its folder."""
    return sorted(path.name for pattern in HALF_WRITTEN for path in out.glob(pattern))


def start(folder: Path, *arguments: str, launcher: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
    """`samestep train r.yaml --out out` in `folder`, as the leader of a process group, its output to files."""
    command = [sys.executable, *launcher, "-m", "samestep", "train", "r.yaml", "--out", "out", *arguments]
    variables = {**os.environ, "TMPDIR": str(folder / "scratch"), "HF_HUB_OFFLINE": "1", **environment}
    with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as err:
        return subprocess.Popen(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            text=True, start_new_session=True,
        )  # fmt: skip


def finish(process: subprocess.Popen[str], folder: Path, *, seconds: float = 240.0) -> tuple[int, str]:
    """Exit code and standard error of a run, once it has ended. Whatever happens, none of its processes is left."""
    try:
        code = process.wait(seconds)
        return code, (folder / "stderr").read_text()
    finally:
        if process.poll() is None:
            for pid in processes_of(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()


def ranks_of(folder: Path) -> list[int]:
    """Process ids of live ranks, by rank."""
    ranks = {}
    for pid in processes_of(folder):
        with contextlib.suppress(OSError, KeyError):
            pairs = (entry.partition("=") for entry in Path(f"/proc/{pid}/environ").read_text().split("\0"))
            rank = {name: value for name, _, value in pairs}.get("RANK")
            if rank is not None:
                ranks[int(rank)] = pid
    return [ranks[rank] for rank in sorted(ranks)]


def processes_of(folder: Path) -> list[int]:
    """Live processes that a run in `folder` started: all have its scratch folder in their environment."""
    return sorted(pid for pid in _pids() if _environment_names(pid, str(folder / "scratch").encode()))


def _pids() -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*"):
        yield int(path.name)


def _environment_names(pid: int, text: bytes) -> bool:
    try:
        # A zombie has no environment any more.
        return pid != os.getpid() and text in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str], *, seconds: float = 120.0) -> None:
    """Waits for a condition while the process lives. Fails when it does not come about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the run ended with {process.returncode}"
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.05)


def assert_short_message(err: str, *parts: str) -> None:
    """One error of few lines on standard error, without a traceback."""
    assert "Traceback" not in err
    assert err.startswith("error: ") or "\nerror: " in err, err
    message = err[err.index("error: ") :].strip()
    assert "\nerror: " not in message, err
    assert len(message) < 600, message
    assert message.count("\n") < 4, message
    for part in parts:
        assert part in message, message
