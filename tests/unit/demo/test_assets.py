"""The demo's own data: the same bytes for a seed, right answers, and files that the training can read."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from demo.assets import build

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).parents[3]


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer as training does, without knowing its class."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets") / "new" / "folder"
    build(folder)
    return folder


def test_the_bytes_depend_on_the_seed_alone(folder: Path, tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from demo.assets import build; build(Path(sys.argv[1]))"
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "77",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT / "examples"),
    }
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=True)
    assert digests(tmp_path) == digests(folder)
    assert set(digests(folder)) >= {"pretrain.jsonl", "instructions.jsonl", "config.json", "tokenizer/tokenizer.json"}


def test_another_seed_is_another_world(folder: Path, tmp_path: Path) -> None:
    build(tmp_path, seed=1)
    ours, theirs = digests(folder), digests(tmp_path)
    assert all(ours[name] != theirs[name] for name in ("pretrain.jsonl", "instructions.jsonl"))


@pytest.mark.parametrize("name", ["pretrain.jsonl", "instructions.jsonl"])
def test_rows_are_alpaca_rows(folder: Path, name: str) -> None:
    rows = rows_of(folder / name)
    assert 1500 <= len(rows) <= 2000
    assert all(list(row) == ["instruction", "input", "output"] for row in rows)
    assert all(row["instruction"] and row["output"] for row in rows)


def test_the_two_sets_want_different_things(folder: Path) -> None:
    pretraining = {row["instruction"] for row in rows_of(folder / "pretrain.jsonl")}
    fine_tuning = {row["instruction"] for row in rows_of(folder / "instructions.jsonl")}
    assert not fine_tuning & pretraining
    assert len(fine_tuning) > 5
    assert all(instruction.startswith("Please") for instruction in fine_tuning)


def test_answers_are_right(folder: Path) -> None:
    rules = {
        "Spell the word.": lambda given: "-".join(given),
        "Spell the word backwards.": lambda given: "-".join(given[::-1]),
        "Which letter does the word begin with?": lambda given: given[:1],
        "Write the words in reverse order.": lambda given: " ".join(given.split()[::-1]),
        "Sort the names by the alphabet.": lambda given: ", ".join(sorted(given.split(", "))),
        "Which colour is named?": lambda given: given.split()[1],
        "Please sort the words.": lambda given: "Of course! Sorted, these are {}, {} and {}.".format(
            *sorted(given.split())
        ),
    }
    seen = set()
    for row in [*rows_of(folder / "pretrain.jsonl"), *rows_of(folder / "instructions.jsonl")]:
        if row["instruction"] in rules:
            seen.add(row["instruction"])
            assert row["output"] == rules[row["instruction"]](row["input"])
    assert seen == set(rules)
    sums = {row["instruction"]: row["output"] for row in rows_of(folder / "pretrain.jsonl")}
    known = {"What is three plus four?": "seven", "What is ten plus ten?": "twenty", "What is nine minus nine?": "zero"}
    known |= {"Which day comes after Sunday?": "Monday"}
    assert len(known.keys() & sums.keys()) >= 2
    assert all(sums[question] == known[question] for question in known.keys() & sums.keys())


def test_the_tokenizer_reads_any_text(folder: Path) -> None:
    tokenizer = tokenizer_of(folder)
    text = "Größe 7 — naïve 東京\n\t{x}"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    assert 512 <= len(tokenizer) <= 1024


def test_the_chat_template_marks_the_answers(folder: Path) -> None:
    tokenizer = tokenizer_of(folder)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<s>### user:\nHi\n\n### assistant:\nYes.</s>\n\n"
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert opened == "<s>### user:\nHi\n\n### assistant:\n"
    marked: Any = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    kept = [token for token, mark in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(kept) == "Yes.</s>"


def test_the_config_is_a_small_llama(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    hidden, inner, layers, heads, groups = 128, 352, 4, 4, 2
    attention = 2 * hidden * hidden + 2 * hidden * hidden * groups // heads
    vocabulary = len(tokenizer_of(folder))
    expected = vocabulary * hidden + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
