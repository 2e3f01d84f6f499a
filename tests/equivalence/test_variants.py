"""What recipes can ask for, a few steps each: the engines still agree with `single` in every bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from samestep.data import Examples
from samestep.recipe.checks import findings
from samestep.recipe.schema import Recipe
from tests.equivalence.cases import SHARDED, make_examples, make_recipe
from tests.equivalence.trajectories import first_difference

TORCH = ("ddp", "fsdp", "hsdp")
ZERO = ("zero1", "zero2", "zero3")
ALL = ("full", "mixed", "low")
BF16 = torch.bfloat16
ROWS = make_examples(30)  # in windows of 3 micro-batches of 2 rows on 2 ranks: full, full, short with an idle rank
PACKED = make_examples(30, packed=True)
HELD_OUT = make_examples(7, seed=5)  # the last batch leaves a rank idle

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A recipe for `single` and the engines to compare with it. `settings` are for these engines only: they are for
    speed and must not change a number."""

    name: str
    regimes: tuple[str, ...] = ("mixed",)
    engines: tuple[str, ...] = SHARDED
    model: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    examples: Examples = ROWS
    arguments: dict[str, Any] = field(default_factory=dict)


SHORT = {"train__accumulation": 3, "steps": 4}
LORA = {"rank": 3, "alpha": 5.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}
FROZEN = ["model.embed_tokens.*", "*.q_proj.*", "*norm*"]
PARAMETERS_ONLY = {"parameters": "cpu", "optimizer": "none"}
OPTIMIZER_ONLY = {"parameters": "none", "optimizer": "cpu"}

VARIANTS = [
    Variant(name="untied", regimes=ALL, model={"tie_word_embeddings": False}),
    Variant(name="biases", regimes=ALL, model={"attention_bias": True, "mlp_bias": True}),
    Variant(name="eager attention", changes={"model__attention": "eager"}),
    Variant(
        name="three micro-batches and a short window", regimes=ALL, changes=SHORT, arguments={"held_out": HELD_OUT}
    ),
    Variant(
        name="reduced once per step",
        regimes=ALL,
        engines=("ddp", "fsdp", "hsdp", "zero1"),
        changes=SHORT | {"engine__reduce_every": "step"},
    ),
    Variant(name="no clipping", regimes=("mixed", "low"), changes={"train__max_grad_norm": None}),
    Variant(name="very tight clipping", regimes=ALL, changes={"train__max_grad_norm": 1e-4}),
    Variant(name="loaded in bf16", regimes=("full", "mixed", "low"), model={"dtype": BF16}),
    Variant(name="lost updates", regimes=("mixed", "low"), model={"dtype": BF16}, arguments={"measure": True}),
    Variant(name="adapters", regimes=ALL, changes={"model__lora": LORA}),
    Variant(name="adapters on bf16", regimes=("full", "mixed"), model={"dtype": BF16}, changes={"model__lora": LORA}),
    Variant(name="frozen layers", regimes=ALL, changes={"model__freeze": FROZEN}),
    Variant(
        name="frozen layers in bf16",
        regimes=("full", "mixed"),
        model={"dtype": BF16},
        changes={"model__freeze": FROZEN},
    ),
    Variant(
        name="activation checkpointing",
        regimes=("full", "mixed"),
        changes=SHORT,
        settings={"train__activation_checkpointing": True},
    ),
    Variant(
        name="offload", regimes=("full", "mixed"), changes=SHORT, settings={"engine__offload": "cpu"}, examples=ROWS
    ),
    Variant(name="offload in low", regimes=("low",), engines=TORCH, changes=SHORT, settings={"engine__offload": "cpu"}),
    Variant(
        name="offload of parameters",
        regimes=("mixed", "low"),
        engines=("zero3",),
        changes=SHORT,
        settings={"engine__offload": PARAMETERS_ONLY},
    ),
    Variant(
        name="offload of the optimizer",
        engines=("zero3",),
        changes=SHORT,
        settings={"engine__offload": OPTIMIZER_ONLY},
    ),
    Variant(name="attention dropout", regimes=("full", "mixed"), model={"attention_dropout": 0.2}, changes=SHORT),
    Variant(
        name="adapter dropout with checkpointing",
        changes={"model__lora": LORA | {"dropout": 0.3}, "train__activation_checkpointing": True},
    ),
    Variant(
        name="new roundings",
        regimes=("mixed-stochastic", "low-stochastic", "low-kahan"),
        changes=SHORT | {"steps": 12},
        arguments={"held_out": HELD_OUT, "measure": True},
    ),
    Variant(
        name="new roundings from bf16 with adapters",
        regimes=("mixed-stochastic", "low-stochastic", "low-kahan"),
        model={"dtype": BF16},
        changes={"model__lora": LORA},
    ),
    Variant(
        name="reduced in fp32",
        regimes=("low", "low-kahan"),
        changes=SHORT | {"precision__overrides": {"reduce": "float32"}},
    ),
    Variant(
        name="reduced in bf16",
        regimes=("full", "mixed"),
        changes=SHORT | {"precision__overrides": {"reduce": "bfloat16"}},
    ),
    Variant(
        name="frozen layers cast to bf16",
        changes={"model__freeze": FROZEN, "precision__overrides": {"frozen": "bfloat16", "master": "float32"}},
    ),
    Variant(
        name="sgd",
        regimes=ALL,
        changes={"train__optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "weight_decay": 0.01}},
    ),
    Variant(name="cosine", changes={"train__schedule": {"name": "cosine", "final_factor": 0.1}}),
    Variant(name="tiny buckets", regimes=ALL, engines=ZERO, changes=SHORT, settings={"engine__bucket_elements": 500}),
    Variant(
        name="nothing gathered ahead",
        engines=("zero3",),
        changes=SHORT,
        settings={"engine__prefetch_elements": 0, "engine__live_elements": 0, "engine__bucket_elements": 4000},
    ),
    Variant(
        name="small parameters stay gathered",
        regimes=ALL,
        engines=("zero3",),
        changes=SHORT,
        settings={"engine__persistent_elements": 1000},
    ),
    Variant(
        name="prefetch",
        engines=("fsdp", "hsdp"),
        changes=SHORT,
        settings={"engine__forward_prefetch": 2, "engine__backward_prefetch": 2},
    ),
    Variant(
        name="no resharding after forward",
        regimes=("mixed", "low"),
        engines=("fsdp", "hsdp"),
        changes=SHORT,
        settings={"engine__reshard_after_forward": False},
    ),
    Variant(name="other shard units", engines=TORCH, settings={"engine__unit_classes": ["LlamaMLP"]}),
    Variant(name="packing", regimes=ALL, changes=SHORT, examples=PACKED, arguments={"held_out": PACKED}),
    Variant(name="packing with eager attention", changes=SHORT | {"model__attention": "eager"}, examples=PACKED),
    Variant(
        name="ignored modules",
        regimes=("full", "mixed"),
        engines=TORCH,
        model={"tie_word_embeddings": False, "dtype": BF16},
        changes={"model__freeze": ["model.embed_tokens.*"], "engine__ignored_modules": ["model.embed_tokens"]},
    ),
    Variant(name="one rank", regimes=ALL, engines=("ddp", "fsdp", *ZERO), changes=SHORT | {"engine__ranks": 1}),
    Variant(
        name="gpt2",
        regimes=("full", "mixed"),
        model={"model_type": "gpt2", "n_embd": 45, "n_head": 3, "n_layer": 2, "n_positions": 33, "n_inner": 71},
    ),
    Variant(name="qwen3", regimes=("full", "mixed"), model={"model_type": "qwen3"}),
]


# torch's SGD adds `alpha * x` to bf16 numbers, and on CPUs rounds the last elements of a tensor in another way than
# the others: the result depends on where a parameter is cut.
CUT_DEPENDENT = {("sgd", "low", engine) for engine in SHARDED if engine not in ("ddp", "hsdp")}


def every() -> Iterator[Any]:
    """All engines under one regime; under the others two, in turn, because each costs time."""
    for number, variant in enumerate(VARIANTS):
        whole = "mixed" if "mixed" in variant.regimes else variant.regimes[0]
        for place, regime in enumerate(variant.regimes):
            few = len(variant.engines) < 4 or regime == whole
            shift = number + place
            taken = variant.engines if few else (variant.engines[shift % 2], variant.engines[-1 - shift % 2])
            for engine in taken:
                marks = [pytest.mark.xfail] if (variant.name, regime, engine) in CUT_DEPENDENT else []
                name = f"{variant.name.replace(' ', '-')}-{regime}-{engine}"
                yield pytest.param(variant, regime, engine, id=name, marks=marks)


@pytest.mark.parametrize(("variant", "regime", "engine"), list(every()))
def test_engines_agree(run, model_folder, variant, regime, engine):
    model = model_folder(**variant.model)
    single = run(make_recipe("single", model, regime=regime, **variant.changes), variant.examples, **variant.arguments)
    recipe = make_recipe(engine, model, regime=regime, **variant.changes, **variant.settings)
    other = run(recipe, variant.examples, **variant.arguments)
    assert first_difference(single, other) is None
    assert single.steps[0].digests != single.steps[-1].digests


@pytest.mark.parametrize("engine", ["single", *TORCH])
def test_ignored_modules_are_left_alone(run, model_folder, engine):
    """Loaded in bf16 under regime full: the ignored module keeps bf16, and what trains is fp32."""
    variant = next(variant for variant in VARIANTS if variant.name == "ignored modules")
    result = run(make_recipe(engine, model_folder(**variant.model), regime="full", **variant.changes), ROWS)
    assert result.dtypes.pop("model.embed_tokens.weight") == "torch.bfloat16"
    assert set(result.dtypes.values()) == {"torch.float32"}


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_what_an_engine_cannot_do_is_refused(engine):
    """zero2 and zero3 cannot wait with the reduction; without accumulation there is nothing to wait for."""
    for accumulation, refused in ((3, True), (1, False)):
        changes = {"train__accumulation": accumulation, "engine__reduce_every": "step"}
        recipe = Recipe.model_validate(make_recipe(engine, "model", **changes))
        assert [field for field, _ in findings(recipe)] == ["engine.reduce_every"] * refused
