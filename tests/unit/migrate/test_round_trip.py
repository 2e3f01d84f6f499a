"""What a target can express comes back as it was, over the whole space of fields."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samestep.migrate import TARGETS, Migration, MigrationError, migrate, read, read_as, recognise
from samestep.migrate.accelerate_table import ACCELERATE
from samestep.migrate.deepspeed_table import DEEPSPEED
from samestep.migrate.output import json_text, yaml_text
from samestep.migrate.rows import Row, Table
from samestep.migrate.source import nest
from samestep.migrate.torchtitan_table import TORCHTITAN
from samestep.migrate.transformers_table import TRANSFORMERS
from samestep.recipe import Recipe, parse

QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SCRIPT = {"model.path": "m", "data.path": "d.jsonl"}


def convert(text: str, suffix: str, target: str, extra: dict[str, Any], kind: str | None = None) -> Migration:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"config{suffix}"
        file.write_text(text)
        source = read(file)
        known = recognise(source, kind, lambda question, kinds: None)
        return migrate(source, read_as(known, source, extra), target, extra)


def recipe_text(fields: dict[str, Any]) -> str:
    return yaml_text(nest({**SCRIPT, **fields}), {}, [])


def at(recipe: Recipe, path: str) -> Any:
    place: Any = recipe.model_dump()
    for key in path.split("."):
        place = place[key]
    return place


@st.composite
def zero_recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Recipes of which a DeepSpeed configuration can say everything below."""
    stage = draw(st.integers(1, 3))
    low = draw(st.sampled_from(["full", "mixed", "low", "float16"]))
    fields: dict[str, Any] = {
        "engine.name": f"zero{stage}",
        "engine.ranks": draw(st.integers(1, 64)),
        "precision.regime": "mixed" if low == "float16" else low,
        "train.micro_batch": draw(st.integers(1, 64)),
        "train.accumulation": draw(st.integers(1, 32)),
        "train.max_grad_norm": draw(st.none() | st.floats(1e-3, 1e3)),
        "train.optimizer.lr": draw(st.floats(1e-8, 1.0)),
        "train.optimizer.weight_decay": draw(st.floats(0, 1)),
        "train.optimizer.no_decay": [],
        "engine.bucket_elements": draw(st.integers(1, 10**9)),
    }
    if low == "float16":
        fields["precision.low_dtype"] = "float16"
        fields["precision.loss_scale.initial"] = 2.0 ** draw(st.integers(1, 20))
        fields["precision.loss_scale.growth_interval"] = draw(st.integers(1, 5000))
        fields["train.on_non_finite"] = "skip"
    elif low != "full":
        fields["train.on_non_finite"] = draw(st.sampled_from(["stop", "skip"]))
    own = "bfloat16" if low == "low" else "float32"
    if low in ("mixed", "low"):
        reduce = draw(st.sampled_from([None, "bfloat16", "float32"]))
        fields["precision.overrides.reduce"] = None if reduce == own else reduce
    if draw(st.booleans()):
        fields |= {"train.optimizer.name": "sgd", "train.optimizer.momentum": draw(st.floats(0, 0.99))}
    else:
        betas = st.floats(0, 0.999)
        fields |= {"train.optimizer.name": "adamw", "train.optimizer.betas": [draw(betas), draw(betas)]}
        fields |= {"train.optimizer.eps": draw(st.floats(1e-12, 1e-3))}
    fields["train.schedule.name"] = draw(st.sampled_from(["constant", "linear", "cosine"]))
    fields["train.schedule.warmup_steps"] = draw(st.integers(2, 100))
    fields["train.steps"] = draw(st.integers(100, 10_000))
    if fields["train.schedule.name"] == "cosine":
        fields["train.schedule.final_factor"] = draw(st.floats(0, 1))
    if stage == 3:
        fields["engine.prefetch_elements"] = draw(st.integers(0, 10**9))
        fields["engine.live_elements"] = draw(st.integers(0, 10**10))
        fields["engine.persistent_elements"] = draw(st.integers(0, 10**7))
        fields["engine.offload"] = draw(
            st.sampled_from(["none", "cpu", {"parameters": "none", "optimizer": "nvme", "nvme_path": "/local"},
                             {"parameters": "nvme", "optimizer": "cpu", "nvme_path": "/local"},
                             {"parameters": "none", "optimizer": "cpu"}])
        )  # fmt: skip
        if draw(st.booleans()) and low in ("mixed", "low"):
            fields["precision.export_dtype"] = "bfloat16"
    else:
        fields["engine.offload"] = draw(st.sampled_from(["none", "cpu"]))
    return fields


@QUICK
@given(fields=zero_recipes(), target=st.sampled_from(["deepspeed", "accelerate-deepspeed"]))
def test_a_recipe_comes_back_from_deepspeed(fields: dict[str, Any], target: str) -> None:
    there = convert(recipe_text(fields), ".yaml", target, {})
    assert there.impossible == []
    assert there.missing == ()
    # A constant schedule has no number of steps in DeepSpeed.
    extra = SCRIPT | ({"train.steps": fields["train.steps"]} if fields["train.schedule.name"] == "constant" else {})
    suffix = ".json" if target == "deepspeed" else ".yaml"
    back = parse(convert(there.text, suffix, "samestep", extra).text)
    for path, value in fields.items():
        found = at(back, path)
        if isinstance(value, dict):
            found = {key: found[key] for key in value}
        assert found == value, path


@st.composite
def fsdp_recipes(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(["fsdp", "hsdp", "ddp", "single"]))
    regime = draw(st.sampled_from(["full", "mixed"]))
    fields: dict[str, Any] = {"engine.name": name, "precision.regime": regime}
    fields["engine.ranks"] = 1 if name == "single" else draw(st.sampled_from([2, 4, 8, 16]))
    if regime == "mixed" and name in ("fsdp", "hsdp"):
        fields["precision.overrides.reduce"] = "bfloat16"
    if name == "hsdp":
        fields["engine.shard_ranks"] = fields["engine.ranks"] // 2
        # Groups of one rank are what Accelerate calls replicas.
        fields["engine.ranks"] *= 2
        fields["engine.shard_ranks"] *= 2
    if name in ("fsdp", "hsdp"):
        fields["engine.reshard_after_forward"] = draw(st.booleans())
        fields["engine.offload"] = draw(st.sampled_from(["none", "cpu"]))
        fields["engine.unit_classes"] = draw(
            st.none() | st.lists(st.sampled_from(["A", "B", "C"]), min_size=1, unique=True)
        )
        fields["train.activation_checkpointing"] = draw(st.booleans())
    return fields


@QUICK
@given(fields=fsdp_recipes())
def test_a_recipe_comes_back_from_fsdp(fields: dict[str, Any]) -> None:
    there = convert(recipe_text(fields | {"train.steps": 10}), ".yaml", "accelerate-fsdp", {})
    assert there.impossible == []
    script = {"train.steps": 10, "train.micro_batch": 1, "train.optimizer.lr": 1e-4}
    back = parse(convert(there.text, ".yaml", "samestep", SCRIPT | script).text)
    for path, value in fields.items():
        assert at(back, path) == value, path


def values_of(row: Row) -> st.SearchStrategy[Any]:
    """Values that the row accepts."""
    if row.choices:
        return st.sampled_from(row.choices)
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "int": st.integers(1, 10**6),
        "float": st.floats(1e-6, 10.0),
        "bool": st.booleans(),
        "text": st.sampled_from(["AdamW", "none", "linear", "x"]),
        "list": st.just(["a"]),
        "texts": st.just(["a"]),
        "any": st.sampled_from([True, 3, "x", ["a"]]),
    }
    usual = kinds[row.kind]
    return usual if row.default is None else st.just(row.default) | usual


def configurations(table: Table) -> st.SearchStrategy[dict[str, Any]]:
    """Any fields of `table` with any value that they accept by themselves."""
    rows = [row for row in table if "*" not in row.path]
    sections = {row.path.rpartition(".")[0] for row in rows}

    def some(chosen: list[Row]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({row.path: values_of(row) for row in chosen if row.path not in sections})

    return st.lists(st.sampled_from(rows), max_size=12, unique_by=lambda row: row.path).flatmap(some)


@QUICK
@given(fields=configurations(DEEPSPEED))
def test_a_deepspeed_configuration_comes_back_from_accelerate(fields: dict[str, Any]) -> None:
    text = json_text(nest({"train_micro_batch_size_per_gpu": 1, **fields}))
    try:
        there = convert(text, ".json", "accelerate-deepspeed", {}, "deepspeed")
    except MigrationError:
        return
    back = json.loads(convert(there.text, ".yaml", "deepspeed", {}).text)
    want = {"gradient_clipping": 1.0, **json.loads(convert(text, ".json", "deepspeed", {}, "deepspeed").text)}
    assert back == want
    assert all(entry.status in ("kept", "not-needed") for entry in there.fields)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("table", "kind", "suffix"),
    [(DEEPSPEED, "deepspeed", ".json"), (ACCELERATE, "accelerate", ".yaml"), (TRANSFORMERS, "transformers", ".json"),
     (TORCHTITAN, "torchtitan", ".json")],
)  # fmt: skip
def test_any_configuration_is_reported_whole_or_refused(table: Table, kind: str, suffix: str, target: str) -> None:
    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(fields=configurations(table))
    def check(fields: dict[str, Any]) -> None:
        fields = {path: value for path, value in fields.items() if path not in ("deepspeed", "fsdp_config")}
        text = yaml_text(nest(fields), {}, ["x: 1"]) if suffix == ".yaml" else json_text(nest(fields))
        try:
            result = convert(text, suffix, target, {}, kind)
        except MigrationError as refusal:
            assert str(refusal)
            return
        assert len({entry.path for entry in result.fields}) == len(result.fields)
        assert {entry.path for entry in result.fields} >= set(fields)
        assert all(entry.rule for entry in result.fields)

    check()
