"""Faults that users of such tools reported, each with the right value. The numbers are rows of a collection of issue
threads; the docstrings say what went wrong there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from samestep.data import Examples
from tests.equivalence.against_reference import BF16, check_equal, reference_run
from tests.equivalence.cases import ENGINES, SHARDED, make_examples, make_recipe
from tests.equivalence.toys import accumulated, loss_of_table
from tests.equivalence.trajectories import Trajectory, first_difference

EXAMPLES = make_examples(30)
UNCLIPPED = {"train__max_grad_norm": None}

pytestmark = pytest.mark.timeout(120)


def travel(run: Trajectory, start: dict[str, torch.Tensor]) -> torch.Tensor:
    """How far every weight has moved, in fp64, all parameters one after the other."""
    moved = [run.masters[name].double() - start[name].double() for name in sorted(run.masters)]
    return torch.cat([tensor.reshape(-1) for tensor in moved])


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


TINY_LR: dict[str, Any] = {
    "train__optimizer": {"lr": 1e-6},
    "train__schedule": {"name": "linear"},
    "steps": 30,
} | UNCLIPPED


@pytest.mark.parametrize("engine", ENGINES)
def test_p01_bf16_loaded_mixed_travels_like_fp32(run, ranks, model_folder, engine):
    """A model loaded in bf16 learnt with one engine and hardly with another, at 1e-6: the masters had stayed bf16."""
    folder = model_folder(dtype=BF16)
    recipe = make_recipe(engine, folder, **TINY_LR)
    seen = travel(run(recipe, EXAMPLES), weights_of(folder))
    expected = reference_run(ranks, make_recipe("single", folder, regime="full", **TINY_LR), EXAMPLES)
    start = weights_of(folder)
    right = torch.cat([(expected[-1][3][n].double() - start[n].double()).reshape(-1) for n in sorted(start)])
    assert (seen != 0).double().mean() > 0.99
    assert seen.norm() == pytest.approx(right.norm(), rel=2**-7)
    # Of two gradients of which one has bf16's eight bits, few have another sign.
    assert torch.dot(seen, right) / (seen.norm() * right.norm()) > 0.98


def test_p01_what_low_loses(run, model_folder):
    """The other half: bf16 masters do not move at 1e-6, and the share of lost updates says so."""
    folder = model_folder(dtype=BF16)
    low = run(make_recipe("single", folder, regime="low", **TINY_LR), EXAMPLES, measure=True)
    assert (travel(low, weights_of(folder)) != 0).double().mean() < 0.1
    assert all(step.lost_update_share is not None and step.lost_update_share > 0.9 for step in low.steps)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("regime", ["full", "mixed", "low"])
def test_p06_the_load_dtype_does_not_change_the_regime(run, model_folder, regime, engine):
    """The same bf16 values loaded as bf16 and as fp32 gave two curves."""
    folder = model_folder(dtype=BF16)
    as_stored = run(make_recipe(engine, folder, regime=regime, model__load_dtype="stored"), EXAMPLES)
    as_fp32 = run(make_recipe(engine, folder, regime=regime, model__load_dtype="float32"), EXAMPLES)
    assert first_difference(as_stored, as_fp32) is None


@pytest.mark.parametrize("every", ["micro_batch", "step"])
@pytest.mark.parametrize("engine", ENGINES)
def test_p13_micro_gradients_accumulate_in_fp32(ranks, engine, every):
    """256 and four times 1 make 256 in bf16, whose next number is 258. Accumulation in bf16 hid in some stages."""
    if every == "step" and engine in ("zero2", "zero3"):
        pytest.skip("zero2 and zero3 reduce after every micro-batch")
    recipe = make_recipe(engine, "unused", engine__reduce_every=every, train__accumulation=5)
    size = 1 if engine == "single" else 2
    on_one_rank = [[256.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    on_both = [[0.0, 256.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]
    for factors in (on_one_rank, on_both):
        assert ranks.run(size, accumulated, recipe=recipe, factors=factors) == [[260.0]] * size


@pytest.mark.parametrize("engine", ENGINES)
def test_p13_low_says_bf16_and_means_it(ranks, engine):
    """The other half: regime low accumulates in bf16 on every engine, as its plan says."""
    recipe = make_recipe(engine, "unused", regime="low", train__accumulation=5)
    size = 1 if engine == "single" else 2
    factors = [[256.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    assert ranks.run(size, accumulated, recipe=recipe, factors=factors) == [[256.0]] * size


@pytest.mark.parametrize("engine", ENGINES)
def test_p20_frozen_weights_are_not_upcast(run, model_folder, engine):
    """With adapters on a bf16 model the whole frozen base was upcast to fp32."""
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}
    result = run(make_recipe(engine, model_folder(dtype=BF16), model__lora=lora), EXAMPLES)
    assert result.masters and all("lora_" in name for name in result.masters)
    assert {tensor.dtype for tensor in result.masters.values()} == {torch.float32}
    frozen = {dtype for name, dtype in result.dtypes.items() if "lora_" not in name}
    assert frozen == {"torch.bfloat16"}


@pytest.mark.parametrize("engine", ENGINES)
def test_p29_eight_micro_batches_of_a_token_mean(run, ranks, model_folder, engine):
    """The loss was divided by the tokens, the engine told not to divide again, and the norm came out eightfold."""
    changes = {"train__accumulation": 8, "train__micro_batch": 1, "steps": 2}
    recipe = make_recipe("single", model_folder(), regime="full", **changes)
    result = run(make_recipe(engine, model_folder(), regime="full", **changes), EXAMPLES)
    check_equal(result, reference_run(ranks, recipe, EXAMPLES))


@pytest.mark.parametrize("engine", ["single", "fsdp", "zero2", "zero3"])
def test_p31_accumulation_is_a_larger_batch(run, model_folder, engine):
    """Six rows a rank as 1x6, 2x3 and 6x1. Products of other shapes round in another way, so fp32 rounding is allowed;
    a mean of means would be off by a tenth."""
    runs = []
    for micro_batch, accumulation in ((1, 6), (2, 3), (6, 1)):
        shape: dict[str, Any] = {"train__micro_batch": micro_batch, "train__accumulation": accumulation}
        changes = shape | {"train__optimizer__eps": 1e-3, "data__shuffle": False}
        runs.append(run(make_recipe(engine, model_folder(), regime="full", **changes), EXAMPLES))
    for other in runs[1:]:
        for a, b in zip(runs[0].steps, other.steps, strict=True):
            assert b.loss == pytest.approx(a.loss, rel=1e-6)
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
        for name, tensor in runs[0].masters.items():
            assert torch.allclose(tensor, other.masters[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tied", [True, False])
def test_p35_stages_agree_under_accumulation(run, ranks, model_folder, tied, engine):
    """Losses of the ZeRO stages fell apart with four micro-batches, more so with tied weights."""
    folder = model_folder(tie_word_embeddings=tied)
    changes = {"train__accumulation": 4, "train__micro_batch": 1, "steps": 10}
    result = run(make_recipe(engine, folder, **changes), EXAMPLES)
    check_equal(result, reference_run(ranks, make_recipe("single", folder, **changes), EXAMPLES))


def unlike_rows() -> Examples:
    """Rank 0 gets rows of the same few tokens that all count, rank 1 long ones of which the last counts."""
    generator = np.random.default_rng(3)
    rows = [(generator.integers(1, 5, 4), 1) if i % 4 < 2 else (generator.integers(1, 515, 17), 16) for i in range(16)]
    return Examples(
        tokens=np.concatenate([tokens for tokens, _ in rows]).astype(np.int32),
        counts=np.concatenate([np.arange(len(tokens)) >= first for tokens, first in rows]),
        row_starts=np.cumsum([0, *(len(tokens) for tokens, _ in rows)], dtype=np.int64),
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_p38_the_norm_is_the_global_one(run, ranks, model_folder, engine):
    """The logged norm was a rank's own: 1656 against 0.025. Ranks get very different rows here; that all of them log
    one norm is checked in every run of these tests."""
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}
    changes = {"data__shuffle": False}
    result = run(make_recipe(engine, model_folder(), regime="full", **changes), unlike_rows())
    check_equal(
        result, reference_run(ranks, make_recipe("single", model_folder(), regime="full", **changes), unlike_rows())
    )
    with_adapters = [
        run(make_recipe(name, model_folder(), model__lora=lora, **changes), unlike_rows())
        for name in ("single", engine)
    ]
    assert first_difference(*with_adapters) is None


@pytest.mark.parametrize("regime", ["full", "low"])
@pytest.mark.parametrize("engine", ENGINES)
def test_p39_both_norms_are_logged(run, model_folder, engine, regime):
    """The logged norm was above the limit, being the one before clipping."""
    result = run(make_recipe(engine, model_folder(), regime=regime, train__max_grad_norm=1e-3), EXAMPLES)
    for step in result.steps:
        assert step.grad_norm > 0.1
        # The factor is limit / (norm + 1e-6), and each element is rounded once more.
        assert step.grad_norm_clipped == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_p40_the_limit_is_what_the_recipe_says(run, model_folder, engine):
    """A limit in the script was ignored, and the engine clipped at a default of its own. Under plain SGD the way of the
    weights is the learning rate times the norm that counted."""
    folder = model_folder()
    sgd: dict[str, Any] = {
        "train__optimizer": {"name": "sgd", "lr": 0.5},
        "train__schedule": {"name": "constant"},
        "steps": 1,
    }
    for limit in (None, 1e-3):
        changes = sgd | {"train__max_grad_norm": limit}
        result = run(make_recipe(engine, folder, regime="full", **changes), EXAMPLES)
        norm = result.steps[0].grad_norm
        assert norm > 1.1  # an engine that clips at its default of 1 would be found
        way = travel(result, weights_of(folder)).norm().item()
        assert way == pytest.approx(0.5 * (limit or norm), rel=1e-3 if limit else 1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_p41_norms_are_those_of_one_process(run, ranks, model_folder, engine):
    """FSDP's norms differed from DDP's, and so did runs with clipping."""
    recipe = make_recipe("single", model_folder(), regime="full", train__max_grad_norm=1.0)
    expected = reference_run(ranks, recipe, EXAMPLES)
    result = run(make_recipe(engine, model_folder(), regime="full", train__max_grad_norm=1.0), EXAMPLES)
    assert [step.grad_norm for step in result.steps] == [norm for _, norm, _, _ in expected]
    assert [step.grad_norm_clipped for step in result.steps] == [clipped for _, _, clipped, _ in expected]


@pytest.mark.parametrize(("engine", "count"), [("ddp", 2), ("fsdp", 2), ("zero1", 2), ("zero2", 1), ("zero3", 2)])
def test_p43_the_schedule_counts_optimizer_steps(run, ranks, model_folder, engine, count):
    """A linear schedule of ten steps was done after five, since every process advanced it. The reference has the rates
    by hand: only a run that applies the same ones has the same weights."""
    changes: dict[str, Any] = {"train__schedule": {"name": "linear"}, "steps": 10, "engine__ranks": count}
    changes["train__accumulation"] = 2
    result = run(make_recipe(engine, model_folder(), **changes), EXAMPLES)
    check_equal(result, reference_run(ranks, make_recipe("single", model_folder(), **changes), EXAMPLES))
    assert [step.lr for step in result.steps] == pytest.approx([1e-2 * (10 - step) / 10 for step in range(10)])


@pytest.mark.parametrize("engine", ENGINES)
def test_p49_the_last_window_counts_its_own_tokens(run, ranks, model_folder, engine):
    """Five micro-batches, accumulation four: the last window was divided by four, or left out."""
    rows = make_examples(20, seed=2)
    changes = {"train__accumulation": 4, "steps": 2, "data__shuffle": False}
    result = run(make_recipe(engine, model_folder(), regime="full", **changes), rows)
    check_equal(result, reference_run(ranks, make_recipe("single", model_folder(), regime="full", **changes), rows))
    assert result.steps[0].digests != result.steps[1].digests
    assert result.steps[1].grad_norm > 0.5 * result.steps[0].grad_norm


@pytest.mark.parametrize("engine", ENGINES)
def test_p53_the_loss_is_that_of_all_ranks(ranks, engine):
    """The logged loss was rank 0's. Rank 0 has a loss of 1, rank 1 of 3; and when rank 1 has twice as many tokens, the
    loss is the mean over tokens."""
    recipe = make_recipe(engine, "unused", regime="full", train__micro_batch=1, data__shuffle=False, **UNCLIPPED)
    size = 1 if engine == "single" else 2
    for rows, loss in (([[0, 1], [1, 0]], 2.0), ([[0, 1], [1, 0, 0]], None)):
        losses = ranks.run(size, loss_of_table, recipe=recipe, rows=rows, first=1.0, second=3.0)
        # After 0, the token 0 costs what 1 would not: its logit is the other one's.
        other = 1.0 - math.log(math.expm1(1.0))
        right = loss if loss is not None else (1.0 + 3.0 + other) / 3
        assert losses == [pytest.approx(right, rel=1e-6)] * size
        assert len(set(losses)) == 1


@pytest.mark.parametrize("engine", SHARDED)
def test_p53_evaluation_is_that_of_all_ranks(run, model_folder, engine):
    """The same for held-out loss, with a last batch that leaves a rank without rows."""
    held_out = make_examples(7, seed=4)
    single = run(make_recipe("single", model_folder()), EXAMPLES, held_out=held_out)
    other = run(make_recipe(engine, model_folder()), EXAMPLES, held_out=held_out)
    assert first_difference(single, other) is None
    assert len(other.evaluations) == 2
