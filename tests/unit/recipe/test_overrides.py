from __future__ import annotations

import pytest

from samestep.errors import RecipeError
from samestep.recipe import OffloadParts, Recipe, override, parse

GOOD = """\
model: {path: m}
data: {path: d}
train:
  steps: 3
  optimizer: {lr: 1e-3, eps: 1e-6}
"""


def test_values_are_read_as_yaml() -> None:
    recipe = parse(
        GOOD,
        overrides=[
            "train.optimizer.lr=1e-5",
            "model.freeze=[a, 'b.*']",
            "train.max_grad_norm=null",
            "train.micro_batch = 4",
            "data.template='# {q} = {a}'",
            "data.response_marker=' = '",
            "data.shuffle=false",
            "name=a=b".replace("a=b", "ab"),
        ],
    )
    assert recipe.train.optimizer.lr == 1e-5
    assert recipe.train.optimizer.eps == 1e-6
    assert recipe.model.freeze == ["a", "b.*"]
    assert recipe.train.max_grad_norm is None
    assert recipe.train.micro_batch == 4
    assert recipe.data.template == "# {q} = {a}"
    assert recipe.data.shuffle is False


def test_only_the_first_equals_sign_splits() -> None:
    assert parse(GOOD, overrides=["model.path=a=b"]).model.path == "a=b"


def test_a_later_override_wins() -> None:
    assert parse(GOOD, overrides=["train.steps=5", "train.steps=7"]).train.steps == 7


def test_sections_that_are_not_in_the_file_come_into_being() -> None:
    recipe = parse(GOOD, overrides=["model.lora.rank=4", "engine.name=zero3", "engine.offload.optimizer=cpu"])
    assert recipe.model.lora is not None
    assert recipe.model.lora.rank == 4
    assert recipe.engine.offload == OffloadParts(optimizer="cpu")


def test_a_section_is_replaced_whole() -> None:
    recipe = parse(GOOD, overrides=["train.optimizer={lr: 2}"])
    assert (recipe.train.optimizer.lr, recipe.train.optimizer.eps) == (2.0, 1e-8)


def test_an_override_mends_a_faulty_value() -> None:
    text = GOOD.replace("steps: 3", "steps: three")
    with pytest.raises(RecipeError):
        parse(text)
    assert parse(text, overrides=["train.steps=4"]).train.steps == 4


BAD = [
    ("train.lr=1e-5", "--set train.lr", "did you mean train.optimizer.lr?"),
    ("train.steps=abc", "--set train.steps", "got 'abc'"),
    ("train.steps='8'", "--set train.steps", "write 8 without quotes"),
    ("train.steps", "--set train.steps", "expected FIELD=VALUE"),
    ("=3", "--set", "expected FIELD=VALUE"),
    ("train..steps=3", "--set train..steps", "expected FIELD=VALUE"),
    ("train.steps=", "--set train.steps", "no value; write null"),
    ("data.template=### {a}", "--set data.template", "YAML comment"),
    ("model.path=a # b", "--set model.path", "YAML comment"),
    ("model.path=a: b", "--set model.path", "keys and values"),
    ("model.freeze=- a", "--set model.freeze", "keys and values"),
    ("model.freeze=[a", "--set model.freeze", "not valid YAML"),
    ("model.path='a", "--set model.path", "not valid YAML"),
    ("model.path=!!python/name:os.system", "--set model.path", "not allowed"),
    ("model.path=2024-01-31", "--set model.path", "read as a date"),
    ("model.path.x=3", "--set model.path.x", "is a value here, not a section"),
    ("train.optimizer={lrr: 1}", "--set train.optimizer: train.optimizer.lrr", "did you mean train.optimizer.lr?"),
    ("data.path={split: x}", "--set data.path: data.path.hub", "is missing"),
    ("train.epochs=2", "--set train.epochs", "steps and epochs are both given"),
    ("engine.ranks=\x00", "--set engine.ranks", "not valid YAML"),
    ("model.path=\udc80", "--set model.path", "the character '\\udc80' is not allowed"),
    ('model.path="\\ud800"', "--set model.path", "lone surrogate"),
]


@pytest.mark.parametrize(("text", "field", "what"), BAD)
def test_bad_override(text: str, field: str, what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(GOOD, overrides=[text])
    (problem,) = caught.value.problems
    assert (problem.field, problem.line) == (field, None)
    assert what in problem.what


def test_override_of_a_recipe_checks_it_again() -> None:
    recipe = parse(GOOD)
    changed = override(recipe, ["engine.name=zero2", "train.accumulation=2"])
    assert (changed.engine.name, changed.train.accumulation) == ("zero2", 2)
    assert override(recipe, []) == recipe
    assert recipe.engine.name == "fsdp"
    with pytest.raises(RecipeError, match=r"--set engine.reduce_every: zero2 reduces"):
        override(changed, ["engine.reduce_every=step"])


def test_a_recipe_cannot_be_changed_in_place() -> None:
    recipe: Recipe = parse(GOOD)
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.__setattr__("steps", 5)
