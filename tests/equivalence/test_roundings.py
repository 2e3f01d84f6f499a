"""The roundings that keep small updates, on every engine: equal bits, and random choices that know nothing of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samestep import models, world
from samestep.engines import build
from samestep.recipe.schema import Recipe
from samestep.rounding import stochastic_to_bfloat16, stream
from tests.equivalence.cases import ENGINES, SHARDED, make_examples, make_recipe
from tests.equivalence.trajectories import digest_of, first_difference

BF16 = torch.bfloat16
REGIMES = ("mixed-stochastic", "low-stochastic", "low-kahan")
EXAMPLES = make_examples(30)  # windows of 3 micro-batches of 2 rows on 2 ranks: full, full, short with an idle rank
HELD_OUT = make_examples(7, seed=5)
SETTINGS: dict[str, Any] = {"train__accumulation": 3, "train__max_grad_norm": 1.6}

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("engine", SHARDED)
@pytest.mark.parametrize("regime", REGIMES)
def test_equal_loaded_in_bf16_or_fp32(run, model_folder, regime, engine):
    """The same bf16 numbers loaded in either dtype train alike, and as on `single`."""
    folder = model_folder(dtype=BF16)
    single = run(make_recipe("single", folder, regime=regime, steps=7, **SETTINGS), EXAMPLES, measure=True)
    # `single` has loaded bf16.
    load_dtype = ("stored", "float32")[(SHARDED.index(engine) + REGIMES.index(regime)) % 2]
    recipe = make_recipe(engine, folder, regime=regime, steps=7, model__load_dtype=load_dtype, **SETTINGS)
    assert first_difference(single, run(recipe, EXAMPLES, measure=True)) is None
    assert len({step.loss for step in single.steps}) == 7


@pytest.mark.parametrize(
    ("regime", "engine"),
    [(("low-stochastic", "low-kahan")[i % 2], engine) for i, engine in enumerate(SHARDED)],
)
def test_equal_on_four_ranks(run, model_folder, regime, engine):
    changes = SETTINGS | {"engine__ranks": 4, "train__micro_batch": 1}
    single = run(make_recipe("single", model_folder(), regime=regime, **changes), EXAMPLES)
    other = run(make_recipe(engine, model_folder(), regime=regime, **changes), EXAMPLES)
    assert first_difference(single, other) is None


@pytest.mark.parametrize("engine", SHARDED)
@pytest.mark.parametrize("regime", ["mixed-stochastic", "low-stochastic"])
def test_a_skipped_step_draws_no_numbers(run, model_folder, regime, engine):
    """A gradient that is not finite is dropped on all engines, which then go on rounding alike."""
    changes: dict[str, Any] = {"train__on_non_finite": "skip", "train__accumulation": 2}
    arguments: dict[str, Any] = {"poison": (1, 0, 0), "held_out": HELD_OUT}
    single = run(make_recipe("single", model_folder(), regime=regime, **changes), EXAMPLES, **arguments)
    other = run(make_recipe(engine, model_folder(), regime=regime, **changes), EXAMPLES, **arguments)
    assert first_difference(single, other) is None
    assert sum(step.skipped for step in single.steps) == 1


def test_seeds_and_regimes_differ(run, model_folder):
    """Equal bits are not for want of randomness: another seed rounds in another way, from the same weights and data."""
    unshuffled = {"data__shuffle": False, "steps": 2}
    runs = [
        run(make_recipe("single", model_folder(), regime=regime, train__seed=seed, **unshuffled), EXAMPLES)
        for regime in ("mixed-stochastic", "low-stochastic")
        for seed in (0, 1)
    ]
    assert runs[0].start == runs[1].start
    for one, other in ((runs[0], runs[1]), (runs[2], runs[3])):
        assert one.steps[1].digests != other.steps[1].digests
    assert runs[0].steps[0].loss != runs[1].steps[0].loss  # the cast of the very first forward pass


def weights_seen(recipe: dict[str, Any], updates: int) -> dict[str, int]:
    """A job: digests of the parameters that modules have inside a forward pass, after updates that move nothing."""
    checked = Recipe.model_validate(recipe)
    model = models.load_model(checked.model, seed=0)
    plan = build.resolve_plan(checked, model)
    names = {id(module): name for name, module in model.named_modules()}
    engine = build.build(checked, model, plan, world.start(timeout_seconds=60))
    seen: dict[str, int] = {}

    def look(module: nn.Module, _inputs: object) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            assert parameter.dtype == BF16
            seen[f"{names[id(module)]}.{name}"] = digest_of(parameter.detach().clone())

    ids = torch.tensor([[1, 2, 3, 4]])
    try:
        for _ in range(updates):
            turns = engine.turns(1)
            for turn in turns:
                engine.backward(engine.model(input_ids=ids, use_cache=False).logits.float().sum(), turn, 1)
            engine.apply(0.0)
        hooks = [module.register_forward_pre_hook(look) for module in model.modules()]
        with torch.no_grad():
            engine.model(input_ids=ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        return seen
    finally:
        engine.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_cast_does_not_know_the_number_of_ranks(ranks, model_folder, engine):
    """On 1, 2 and 4 ranks, before and after an update, every module computes with the whole masters rounded by the
    stream of their own name. `updates` counts, though the learning rate is 0: each one draws new numbers."""
    folder = model_folder()
    model = models.load_model(Recipe.model_validate(make_recipe("single", folder)).model, seed=0)
    copies = []
    for updates in (0, 1):
        expected = {}
        for name, parameter in model.named_parameters():
            random = stream(5, updates, name, "cast")
            rounded = stochastic_to_bfloat16(parameter.detach().reshape(-1), random, start=0)
            expected[name] = digest_of(rounded)
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]  # tied
        copies.append(expected)
        for size in (1, 2, 4):
            if engine == "hsdp" and size == 1:
                continue
            changes: dict[str, Any] = {"engine__ranks": size, "train__optimizer__weight_decay": 0.0, "train__seed": 5}
            recipe = make_recipe(engine, folder, regime="mixed-stochastic", **changes)
            processes = 1 if engine == "single" else size
            for seen in ranks.run(processes, weights_seen, recipe=recipe, updates=updates):
                assert seen == expected, (updates, size)
    assert all(copies[0][name] != copies[1][name] for name in copies[0] if "layers" in name)
