"""Every fault of a recipe is told in the recipe's words, on its own line, and all of them at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import RecipeError
from samestep.recipe import parse, template_text

# A deadline would be a test of the machine's speed.
quick = settings(deadline=None)

GOOD = """\
model:
  path: some/model
data:
  path: rows.jsonl
train:
  steps: 3
"""


def with_lines(text: str) -> str:
    """GOOD with more lines, which begin on line 7."""
    return GOOD + text


def rows_of(error: RecipeError) -> list[tuple[int | None, str, str]]:
    return [(problem.line, problem.field, problem.what) for problem in error.problems]


def problems(text: str, *overrides: str) -> list[tuple[int | None, str, str]]:
    with pytest.raises(RecipeError) as caught:
        parse(text, source="r.yaml", overrides=overrides)
    assert caught.value.exit_code == 2
    return rows_of(caught.value)


def test_the_good_recipe_is_good() -> None:
    assert parse(GOOD).train.steps == 3


# text, line, field, a part of the message
BAD_TEXTS = [
    pytest.param("", None, "", "is empty", id="empty"),
    pytest.param("# nothing\n\n", None, "", "is empty", id="comments-only"),
    pytest.param("- a\n- b\n", 1, "", "holds a list", id="list"),
    pytest.param("\n42\n", 2, "", "holds a single value", id="scalar"),
    pytest.param("model: [a\ntrain: 3\n", 2, "", "not valid YAML", id="open-bracket"),
    pytest.param("model:\n\tpath: a\n", 2, "", "indent with spaces", id="tab"),
    pytest.param("model: 'a\n", 2, "", "not valid YAML", id="open-quote"),
    pytest.param("a: 1\n---\nb: 2\n", 2, "", "more than one YAML document", id="two-documents"),
    pytest.param("a: 1\nb: \x00\n", 2, "", "'\\x00' is not allowed", id="control-character"),
    pytest.param("a: *b\n", 1, "", "undefined alias", id="unknown-alias"),
    pytest.param("[" * 1000, None, "", "nested too deeply", id="deep"),
    pytest.param(with_lines("train: {steps: 4}\n"), 7, "train", "given twice, first on line 5", id="section-twice"),
    pytest.param(GOOD + "  steps: 4\n", 7, "train.steps", "given twice, first on line 6", id="key-twice"),
    pytest.param(with_lines("8: a\n"), 7, "", "a key must be a text, got 8", id="number-as-key"),
    pytest.param(with_lines("[a]: b\n"), 7, "", "a key must be a text", id="list-as-key"),
    pytest.param(with_lines("name: 2024-01-31\n"), 7, "name", "read as a date", id="date"),
    pytest.param(with_lines("name: !!python/name:os.system\n"), 7, "name", "!!python/name:os.system", id="python-tag"),
    pytest.param(with_lines("log: !mine {}\n"), 7, "log", "tag !mine is not allowed", id="own-tag"),
    pytest.param(with_lines("log: &a\n  every: *a\n"), 8, "log.every", "contains itself", id="cycle"),
    pytest.param(with_lines("engin: {}\n"), 7, "engin", "did you mean engine?", id="unknown-section"),
    pytest.param(with_lines("lr: 3\n"), 7, "lr", "did you mean train.optimizer.lr?", id="key-of-another-section"),
    pytest.param(GOOD + "  lr: 3\n", 7, "train.lr", "did you mean train.optimizer.lr?", id="key-one-level-up"),
    pytest.param(
        with_lines("max_grad_norm: 1.0\n"), 7, "max_grad_norm", "did you mean train.max_grad_norm?", id="key-outside"
    ),
    pytest.param(
        GOOD + "  learning_rate: 1e-5\n", 7, "train.learning_rate", "did you mean train.optimizer.lr?", id="other-tool"
    ),
    pytest.param(with_lines("engine:\n  rank: 2\n"), 8, "engine.rank", "did you mean engine.ranks?", id="misspelt-key"),
    pytest.param(
        with_lines("engine: {qqqqq: 2}\n"), 7, "engine.qqqqq", "known here: name, ranks", id="key-like-no-other"
    ),
    pytest.param(
        with_lines("engine:\n  ranks: '8'\n"),
        8,
        "engine.ranks",
        "expected a whole number above 0, got '8': write 8 without quotes",
        id="quoted-number",
    ),
    pytest.param(with_lines("engine: {ranks: abc}\n"), 7, "engine.ranks", "got 'abc'", id="text-for-number"),
    pytest.param(with_lines("engine: {ranks: 2.0}\n"), 7, "engine.ranks", "got 2.0: write 2", id="float-for-int"),
    pytest.param(with_lines("engine: {ranks: true}\n"), 7, "engine.ranks", "got true", id="bool-for-int"),
    pytest.param(with_lines("engine: {ranks: 0}\n"), 7, "engine.ranks", "above 0, got 0", id="zero"),
    pytest.param(with_lines("engine: {ranks: [2]}\n"), 7, "engine.ranks", "got a list of 1", id="list-for-int"),
    pytest.param(
        with_lines("engine: {ranks: " + "9" * 5000 + "}\n"), 7, "engine.ranks", "cannot be read", id="huge-number"
    ),
    pytest.param(
        with_lines("engine: {reshard_after_forward: no}\n"),
        7,
        "engine.reshard_after_forward",
        "write false, without quotes",
        id="no-is-not-false",
    ),
    pytest.param(with_lines("engine: {name: fdsp}\n"), 7, "engine.name", "did you mean fsdp?", id="unknown-engine"),
    pytest.param(
        with_lines("precision: {regime: Mixed}\n"), 7, "precision.regime", "did you mean mixed?", id="wrong-case"
    ),
    pytest.param(
        with_lines("precision: {low_dtype: fp16}\n"), 7, "precision.low_dtype", "did you mean float16?", id="dtype-name"
    ),
    pytest.param(
        with_lines("precision: {max_lost_update_share: 2}\n"),
        7,
        "precision.max_lost_update_share",
        "expected a number of at least 0 and up to 1 or null, got 2",
        id="share-above-one",
    ),
    pytest.param(GOOD + "  max_grad_norm: none\n", 7, "train.max_grad_norm", "write null", id="none-for-null"),
    pytest.param(GOOD + "  max_grad_norm: .nan\n", 7, "train.max_grad_norm", "got nan", id="nan"),
    pytest.param(GOOD + "  optimizer:\n    lr: .inf\n", 8, "train.optimizer.lr", "got inf", id="infinity"),
    pytest.param(
        GOOD + "  optimizer:\n    betas:\n      - 0.9\n      - 1.0\n",
        10,
        "train.optimizer.betas[1]",
        "below 1, got 1.0",
        id="beta-of-one",
    ),
    pytest.param(
        GOOD + "  optimizer: {betas: [0.9]}\n", 7, "train.optimizer.betas", "a list of 2 items", id="one-beta"
    ),
    pytest.param(with_lines("log:\n"), 7, "log", "got nothing (null)", id="section-without-keys"),
    pytest.param(with_lines("log: 3\n"), 7, "log", "expected keys under it (every, trackers), got 3", id="no-section"),
    pytest.param(
        with_lines("log: {trackers: [tensorbord]}\n"), 7, "log.trackers[0]", "did you mean tensorboard?", id="tracker"
    ),
    pytest.param(with_lines("name: a b\n"), 7, "name", "letters, digits", id="name-with-space"),
    pytest.param(with_lines("name: ../a\n"), 7, "name", "letters, digits", id="name-that-climbs"),
    pytest.param(
        with_lines("engine:\n  offload: {optimiser: cpu}\n"),
        8,
        "engine.offload.optimiser",
        "did you mean engine.offload.optimizer?",
        id="key-in-a-union",
    ),
    pytest.param(
        with_lines("engine:\n  offload: gpu\n"), 8, "engine.offload", "must be one of none, cpu, got 'gpu'", id="union"
    ),
    pytest.param("data: {path: x}\ntrain: {steps: 1}\n", 1, "model", "is missing", id="no-model"),
    pytest.param(
        "data: {path: {split: train}}\nmodel: {path: a}\ntrain: {steps: 1}\n",
        1,
        "data.path.hub",
        "is missing: a text",
        id="hub-without-name",
    ),
    pytest.param(
        "model: {path: a}\ndata:\n  format: text\ntrain: {steps: 1}\n", 2, "data.path", "is missing", id="no-data-path"
    ),
    pytest.param(
        "model: {path: a}\ndata: {path: [a, b]}\ntrain: {steps: 1}\n", 2, "data.path", "got a list of 2", id="two-paths"
    ),
]


@pytest.mark.parametrize(("text", "line", "field", "what"), BAD_TEXTS)
def test_bad_text(text: str, line: int | None, field: str, what: str) -> None:
    (problem,) = problems(text)
    assert (problem[0], problem[1]) == (line, field)
    assert what in problem[2]
    assert "\n" not in problem[2]
    assert len(problem[2]) < 300


def test_all_problems_come_at_once_in_the_order_of_the_file() -> None:
    text = """\
model:
  path: a
  freze: []
data:
  max_tokens: "8"
train:
  micro_batch: 0
  schedule: {warmup_steps: 4}
engine:
  name: single
  offload: cpu
log: {trackers: [wandb]}
"""
    assert [problem[:2] for problem in problems(text)] == [
        (3, "model.freze"),
        (4, "data.path"),
        (5, "data.max_tokens"),
        (6, "train.steps"),
        (7, "train.micro_batch"),
        (11, "engine.offload"),
        (12, "log.trackers[0]"),
    ]


def test_a_faulty_field_is_not_reported_a_second_time_by_a_check_that_reads_it() -> None:
    assert [field for _, field, _ in problems(GOOD.replace("steps: 3", "steps: three"))] == ["train.steps"]
    assert [field for _, field, _ in problems(GOOD.replace("path: some/model", "path: 3"))] == ["model.path"]


def test_message_of_the_error_gives_file_line_and_field() -> None:
    with pytest.raises(RecipeError) as caught:
        parse(with_lines("engine: {name: fdsp}\nlog: {evry: 2}\n"), source="r.yaml")
    first, second = str(caught.value).splitlines()
    assert first.startswith("r.yaml:7: engine.name: must be one of single, ddp")
    assert second == "r.yaml:8: log.evry: unknown key - did you mean log.every?"


def test_many_aliases_are_refused_before_they_fill_the_memory() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 12):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    assert any("more values than a recipe can have" in what for _, _, what in problems("\n".join(lines)))


def test_aliases_repeat_a_value() -> None:
    recipe = parse(with_lines("log: {every: &n 7}\ncheckpoint: {keep: *n}\n"))
    assert (recipe.log.every, recipe.checkpoint.keep) == (7, 7)


@quick
@given(st.text(max_size=200))
def test_no_text_gives_anything_but_a_recipe_error(text: str) -> None:
    with pytest.raises(RecipeError):
        parse(text)


@quick
@given(st.data())
def test_a_damaged_recipe_gives_a_recipe_or_a_recipe_error(data: st.DataObject) -> None:
    text = template_text()
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 30))
        text = text[:start] + data.draw(st.text(":{}[]'\"#&*!-, \n\tabc019.", max_size=6)) + text[start + length :]
    try:
        parse(text)
    except RecipeError as error:
        assert error.problems
        assert str(error)
