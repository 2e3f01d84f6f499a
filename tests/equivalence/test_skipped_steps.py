"""Steps that do not count: overflows under loss scaling, and gradients or losses that are not finite. All engines leave
the same weights alone and go on alike."""

from __future__ import annotations

import math

import numpy as np
import pytest

from samestep.data import Examples
from tests.equivalence.cases import ENGINES, SHARDED, make_examples, make_recipe
from tests.equivalence.trajectories import Trajectory, first_difference

EXAMPLES = make_examples(30)

pytestmark = pytest.mark.timeout(120)


def skipped_of(trajectory: Trajectory) -> list[bool]:
    return [step.skipped for step in trajectory.steps]


def check_skips_move_nothing(trajectory: Trajectory) -> None:
    before = trajectory.start
    for index, step in enumerate(trajectory.steps):
        assert (step.digests == before) == step.skipped, f"step {index + 1}"
        before = step.digests


FP16 = {
    "precision__low_dtype": "float16",
    "precision__loss_scale": {"initial": 2.0**40, "growth_interval": 3, "minimum": 1.0},
    "train__schedule": {"name": "constant"},
    "steps": 30,
}


@pytest.mark.parametrize("engine", ENGINES)
def test_fp16_scale(run, model_folder, engine):
    """A scale far too high halves until gradients fit into fp16, doubles after three good steps, and so on."""
    single = run(make_recipe("single", model_folder(), **FP16), EXAMPLES)
    other = run(make_recipe(engine, model_folder(), **FP16), EXAMPLES)
    assert first_difference(single, other) is None
    check_skips_move_nothing(other)
    skipped = skipped_of(other)
    assert skipped[0] and sum(skipped) > 10
    assert not all(skipped[-4:])
    scale, good = 2.0**40, 0
    for step in other.steps:
        assert step.loss_scale == scale
        assert math.isfinite(step.loss)
        assert math.isfinite(step.grad_norm) != step.skipped
        scale, good = (scale / 2, 0) if step.skipped else (scale, good + 1)
        if good == 3:
            scale, good = scale * 2, 0


def test_fp16_scale_changes_no_number_that_fits(run, model_folder):
    """Powers of two: without overflow and underflow, norms and losses do not depend on the scale."""
    usual = {"precision__low_dtype": "float16", "steps": 4}
    runs = []
    for initial in (2.0**8, 2.0**10):
        scale = {"initial": initial, "growth_interval": 100}
        runs.append(run(make_recipe("single", model_folder(), **usual, precision__loss_scale=scale), EXAMPLES))
    one, other = ([(s.loss, s.skipped) for s in r.steps] for r in runs)
    assert [skipped for _, skipped in one] == [False] * 4
    assert one[0] == other[0]
    assert one[-1][0] == pytest.approx(other[-1][0], rel=1e-3)
    assert runs[0].steps[0].grad_norm == pytest.approx(runs[1].steps[0].grad_norm, rel=1e-3)


@pytest.mark.parametrize(
    ("regime", "every"),
    [("mixed", "step"), ("mixed", "micro_batch"), ("low-kahan", "micro_batch")],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_infinite_gradient_on_one_rank(run, model_folder, engine, regime, every):
    """The second micro-batch of rank 1 overflows in the second step, with accumulation."""
    if every == "step" and engine in ("zero2", "zero3"):
        pytest.skip("zero2 and zero3 reduce after every micro-batch")
    changes = {"train__accumulation": 3, "train__on_non_finite": "skip", "engine__reduce_every": every}
    poison = (2, 1, 1)
    single = run(make_recipe("single", model_folder(), regime=regime, **changes), EXAMPLES, poison=poison)
    other = run(make_recipe(engine, model_folder(), regime=regime, **changes), EXAMPLES, poison=poison)
    assert first_difference(single, other) is None
    check_skips_move_nothing(other)
    assert skipped_of(other) == [False, True, False, False]
    assert math.isfinite(other.steps[1].loss) and not math.isfinite(other.steps[1].grad_norm)


def with_token(examples: Examples, row: int, token: int) -> Examples:
    """The examples with the second token of a row replaced."""
    tokens = np.array(examples.tokens)
    tokens[examples.row_starts[row] + 1] = token
    return Examples(tokens=tokens, counts=examples.counts, row_starts=examples.row_starts)


@pytest.mark.parametrize("engine", SHARDED)
def test_loss_that_is_not_a_number_on_one_rank(run, model_folder, engine):
    """Row 5 of the file has a token whose embedding is infinite: the second step, rank 0, first micro-batch."""
    rows = with_token(
        Examples(tokens=EXAMPLES.tokens % 500, counts=EXAMPLES.counts, row_starts=EXAMPLES.row_starts), 5, 514
    )
    model = model_folder(tie_word_embeddings=False, broken_token=514)
    changes = {"data__shuffle": False, "train__on_non_finite": "skip"}
    single = run(make_recipe("single", model, **changes), rows)
    other = run(make_recipe(engine, model, **changes), rows)
    assert first_difference(single, other) is None
    assert skipped_of(other) == [False, True, False, False]
    assert not math.isfinite(other.steps[1].loss)
    check_skips_move_nothing(other)
