"""Real rows with a real tokenizer; skipped where the shared material is absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.data import Loader, prepare
from samestep.recipe.schema import Data

SHARED = Path(__file__).parents[3].parent / "shared"
MODEL = SHARED / "models" / "stories260K"
INSTRUCTIONS = SHARED / "data" / "llmfs_instruct_1100.jsonl"
QUESTIONS = SHARED / "data" / "gsm8k_train_first2000.jsonl"

pytestmark = pytest.mark.skipif(not MODEL.is_dir() or not INSTRUCTIONS.is_file(), reason="no shared material")


@pytest.fixture(scope="module")
def stories():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def test_instructions(stories):
    prepared = prepare(Data(path=str(INSTRUCTIONS), rows=200), stories, seed=0)
    rows = [json.loads(line) for line in INSTRUCTIONS.read_text().splitlines()[:200]]
    assert (prepared.train_report.rows_read, prepared.train_report.kept) == (200, 200)
    for index, row in enumerate(rows):
        given = f"### Input:\n{row['input']}\n\n" if row["input"] else ""
        prompt = f"### Instruction:\n{row['instruction']}\n\n{given}### Response:\n"
        ids, counts = prepared.train.row(index)
        assert ids.tolist() == [*stories(prompt + row["output"])["input_ids"], stories.eos_token_id]
        # This vocabulary has no token across a line's end: the prompt's own tokens are a prefix, and do not count.
        prompt_length = len(stories(prompt)["input_ids"])
        assert counts.tolist() == [place >= prompt_length for place in range(len(ids))]


def test_questions_with_a_template(stories):
    template = "### Question: {question}\n ### Answer: {answer}"
    data = Data(path=str(QUESTIONS), rows=100, template=template, response_marker=" ### Answer:", max_tokens=2048)
    prepared = prepare(data, stories, seed=0)
    for index, line in enumerate(QUESTIONS.read_text().splitlines()[:100]):
        row = json.loads(line)
        ids, counts = prepared.train.row(index)
        assert ids.tolist()[:-1] == stories(template.format(**row))["input_ids"]
        counted = [token for token, flag in zip(ids.tolist(), counts.tolist(), strict=True) if flag]
        assert stories.decode(counted[:-1]).strip() == row["answer"].strip()
        assert counted[-1] == stories.eos_token_id


def test_packed_rows_are_full_and_lose_nothing(stories):
    settings = {
        "path": str(QUESTIONS),
        "rows": 300,
        "format": "text",
        "columns": {"text": "answer"},
        "max_tokens": 1024,
    }
    plain = prepare(Data.model_validate(settings), stories, seed=0)
    packed = prepare(Data.model_validate(settings | {"packing": True}), stories, seed=0)
    assert packed.train_report == plain.train_report
    assert packed.train.row_tokens.max() <= 1024
    assert packed.train.row_tokens[:-1].min() > 1024 - plain.train.row_tokens.max()
    loader = Loader(
        packed.train, ranks=2, micro_batch=2, accumulation=2, seed=1, shuffle=True, drop_last=False, pad_id=0
    )
    steps = [loader.step(index) for index in range(loader.steps_per_epoch)]
    assert sum(step.tokens for step in steps) == plain.train_report.tokens
    assert sum(step.label_tokens for step in steps) == plain.train_report.label_tokens
