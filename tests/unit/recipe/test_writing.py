"""What is written reads back as the same, also with another YAML reader."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.recipe import Recipe, json_schema, parse, resolved_text, template_text
from samestep.recipe.document import parse_value
from samestep.recipe.fields import documentation, field_paths
from samestep.recipe.schema import EngineName, RegimeName, Section
from samestep.recipe.writing import flow

# A deadline would be a test of the machine's speed.
quick = settings(deadline=None, max_examples=50)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(lambda text: text.strip())
positive = st.integers(1, 10**6)
positive_floats = st.floats(min_value=0, max_value=1e6, exclude_min=True)
fractions = st.floats(0, 1, exclude_max=True)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
models = st.one_of(
    st.fixed_dictionaries({"path": texts}, optional={"tokenizer": st.none() | texts, "freeze": st.lists(texts)}),
    st.fixed_dictionaries(
        {
            "config": st.dictionaries(texts, values, max_size=3).map(lambda config: {**config, "model_type": "llama"}),
            "tokenizer": texts,
        }
    ),
)
data_sections = st.fixed_dictionaries(
    {"path": texts | st.fixed_dictionaries({"hub": texts}, optional={"name": texts})},
    optional={
        "columns": st.dictionaries(st.sampled_from(["instruction", "input", "output"]), texts),
        "held_out": fractions | st.integers(0, 5) | texts,
        "max_tokens": st.integers(2, 9000),
        "shuffle": st.booleans(),
    },
)
engines = st.one_of(
    st.fixed_dictionaries(
        {"name": st.just("fsdp"), "ranks": positive},
        optional={
            "offload": st.sampled_from(["none", "cpu"]),
            "ignored_modules": st.lists(texts),
            "unit_classes": st.none() | st.lists(texts, min_size=1),
            "reshard_after_forward": st.booleans(),
            "forward_prefetch": st.integers(0, 4),
        },
    ),
    st.fixed_dictionaries(
        {"name": st.just("zero3")},
        optional={
            "offload": st.just({"parameters": "nvme", "optimizer": "cpu", "nvme_path": "/tmp/x y"}),
            "bucket_elements": positive,
        },
    ),
)
trains = st.fixed_dictionaries(
    {},
    optional={
        "micro_batch": positive,
        "max_grad_norm": st.none() | positive_floats | positive,
        "optimizer": st.fixed_dictionaries(
            {},
            optional={"lr": positive_floats | st.integers(0, 3), "betas": st.lists(fractions, min_size=2, max_size=2)},
        ),
        "seed": st.integers(0, 2**53),
    },
)
lengths = st.one_of(
    st.fixed_dictionaries({"steps": positive}), st.fixed_dictionaries({"epochs": positive_floats | positive})
)
recipes = st.builds(
    lambda name, model, data, engine, train, length: Recipe.model_validate(
        {"name": name, "model": model, "data": data, "engine": engine, "train": {**train, **length}}
    ),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
    models,
    data_sections,
    engines,
    trains,
    lengths,
)


def leaves(section: Section, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, Section) else {prefix + name: value}
    return found


@quick
@given(recipes)
def test_the_resolved_text_reads_back_equal_and_is_stable(recipe: Recipe) -> None:
    text = resolved_text(recipe)
    again = parse(text)
    assert again == recipe
    assert again.model_dump_json() == recipe.model_dump_json()
    assert resolved_text(again) == text


@quick
@given(recipes)
def test_another_reader_sees_the_same_values(recipe: Recipe) -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(resolved_text(recipe)) == recipe.model_dump()


@quick
@given(recipes)
def test_every_field_can_be_set_by_an_override(recipe: Recipe) -> None:
    overrides = [f"{name}={flow(value)}" for name, value in leaves(recipe).items()]
    assert parse("model: {}\ndata: {}\ntrain: {}\n", overrides=overrides) == recipe


@quick
@given(values)
def test_flow_reads_back_with_the_same_types(value: Any) -> None:
    again = parse_value(flow(value))
    assert repr(again) == repr(value)


def test_every_default_is_written_out() -> None:
    recipe = parse("model: {path: m}\ndata: {path: d}\ntrain: {steps: 1}\n")
    text = resolved_text(recipe)
    for path, info in field_paths():
        # The keys inside a section that is not there have no place to stand.
        if path[:2] in (("model", "lora"), ("data", "path"), ("engine", "offload")) and len(path) > 2:
            continue
        assert f"\n{'  ' * (len(path) - 1)}{path[-1]}:" in text, path
        assert info.description, path
        assert documentation(path).splitlines()[0] in text


@pytest.mark.parametrize("engine", get_args(EngineName))
@pytest.mark.parametrize("precision", get_args(RegimeName))
def test_a_new_recipe_is_a_good_one(engine: str, precision: str) -> None:
    recipe = parse(
        template_text(
            name="new",
            model="a b",
            data="c: d",
            format="text",
            engine=engine,
            precision=precision,
            ranks=4,
            steps=7,
            lr=0.5,
        )
    )
    assert (recipe.name, recipe.model.path, recipe.data.path) == ("new", "a b", "c: d")
    assert (recipe.data.format, recipe.engine.name, recipe.engine.ranks) == ("text", engine, 4)
    assert (recipe.precision.regime, recipe.train.steps, recipe.train.optimizer.lr) == (precision, 7, 0.5)


def test_what_a_new_recipe_has_commented_out_is_good_too() -> None:
    lines = template_text(format="prompt_completion").splitlines()
    settings = [line.replace("# ", "", 1) if line.startswith("  # ") and ": " in line else line for line in lines]
    kept = [line for line in settings if line.split("#")[0].strip() and ":" in line.split("#")[0]]
    recipe = parse("\n".join(kept))
    assert recipe.model.lora is not None
    assert recipe.data.columns == {"prompt": "question", "completion": "answer"}
    assert recipe.engine.offload == "cpu"
    assert recipe.train.activation_checkpointing


def test_a_new_recipe_is_short_and_narrow() -> None:
    lines = template_text().splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 120


def test_the_schema_refuses_unknown_keys_and_documents_every_field() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"model", "data", "train"}
    for name, section in {"": schema, **schema["$defs"]}.items():
        assert section["additionalProperties"] is False, name
        for field, entry in section["properties"].items():
            assert entry.get("description"), (name, field)
