"""P96: "8" is not 8, and the message says so before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.errors import RecipeError
from samestep.recipe import load, parse

TEXT = """\
model: {path: m}
data: {path: d.jsonl}
train:
  steps: 3
  accumulation: "8"
"""


def test_p96_a_number_in_quotes_is_refused_with_field_and_line() -> None:
    with pytest.raises(RecipeError) as caught:
        parse(TEXT, source="r.yaml")
    (problem,) = caught.value.problems
    assert (problem.field, problem.line) == ("train.accumulation", 5)
    assert "8" in problem.what
    assert "integer" in problem.what or "number" in problem.what


def test_p96_without_quotes_it_is_a_number(tmp_path: Path) -> None:
    assert parse(TEXT.replace('"8"', "8"), source="r.yaml").train.accumulation == 8
    (tmp_path / "r.yaml").write_text(TEXT.replace('"8"', "2"))
    accumulation = load(tmp_path / "r.yaml", ["train.accumulation=8"]).train.accumulation
    assert accumulation == 8
    assert type(accumulation) is int


def test_p96_quotes_on_the_command_line_are_refused_too(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(TEXT.replace('"8"', "2"))
    with pytest.raises(RecipeError, match=r"--set train\.accumulation"):
        load(tmp_path / "r.yaml", ["train.accumulation='8'"])


def test_adapters_on_a_fresh_base_would_be_of_no_use_once_exported() -> None:
    text = TEXT.replace('"8"', "8").replace("{path: m}", "{config: {model_type: llama}, tokenizer: t, lora: {rank: 2}}")
    with pytest.raises(RecipeError, match=r"model\.lora.*a fresh base is stored nowhere"):
        parse(text, source="r.yaml")
    assert parse(text, overrides=["train.export=false"], source="r.yaml").model.lora is not None
