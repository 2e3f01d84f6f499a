"""Which pairs must agree, how closely, and what is said of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from samestep.compare.pairs import WeightGap, compare_pair
from samestep.compare.variants import Variant, recipes, should_agree, variant
from samestep.compare.verdict import Bound, Judged, Subject, bound_for, is_ok, judge, sentence
from samestep.errors import RecipeError, SamestepError
from samestep.recipe import Recipe, parse

EQUAL = WeightGap(equal_bits=True, largest=0.0, tensor=None)
EXACT = Bound(max_relative_loss_gap=0.0, because="")
LOOSE = Bound(max_relative_loss_gap=0.01, because="")


@pytest.fixture
def recipe() -> Recipe:
    return parse("model: {path: ./m}\ndata: {path: d.jsonl}\nengine: {ranks: 2}\ntrain: {steps: 3, accumulation: 2}\n")


def steps(*losses: float | None) -> list[dict[str, Any]]:
    return [{"step": n, "loss": loss, "grad_norm": 1.0} for n, loss in enumerate(losses, start=1)]


def judged(bound: Bound, **runs: tuple[str, list[dict[str, Any]]]) -> list[Judged]:
    """All pairs of runs, given by name as regime and steps; those of one regime must agree."""
    return [
        judge(compare_pair(a, b, runs[a][1], runs[b][1], EQUAL), bound, must_agree=runs[a][0] == runs[b][0])
        for a, b in itertools.combinations(runs, 2)
    ]


def subjects(*names: str, lost: float | None = None) -> list[Subject]:
    return [Subject(name=name, last_loss=2.0 + n, lost_update_share=lost) for n, name in enumerate(names)]


GOOD, OFF, FAR = steps(4.0, 3.0, 2.0), steps(4.0, 3.001, 2.0), steps(4.0, 3.5, 2.5)


def test_equal_engines_are_ok() -> None:
    found = judged(EXACT, x=("mixed", GOOD), y=("mixed", GOOD), z=("mixed", GOOD))
    assert is_ok(found)
    text = sentence(found, subjects("x", "y", "z"), EXACT)
    assert text == "x, y and z are bit-equal over 3 steps: every loss, gradient norm and weight."


def test_one_differing_bit_is_not_ok_on_the_cpu() -> None:
    found = judged(EXACT, x=("mixed", GOOD), y=("mixed", OFF))
    assert not is_ok(found)
    text = sentence(found, subjects("x", "y"), EXACT)
    assert text.startswith("y differs from x from step 2 on (first in the loss) (largest gap of the losses: 0.001)")
    assert text.endswith("but must agree bit for bit.")


def test_regimes_may_differ() -> None:
    found = judged(EXACT, x=("mixed", GOOD), y=("mixed", GOOD), low=("low", FAR))
    assert is_ok(found)
    assert [j.within_bound for j in found] == [True, None, None]
    text = sentence(found, subjects("x", "y", "low", lost=0.9), EXACT)
    assert text == (
        "x and y are bit-equal over 3 steps: every loss, gradient norm and weight; low differs from x from step 2 on "
        "(first in the loss), lost 90% of its updates and ends at loss 4.0000 against 2.0000."
    )


def test_the_second_regime_is_held_too() -> None:
    found = judged(EXACT, x=("mixed", GOOD), y=("low", GOOD), z=("low", OFF))
    assert not is_ok(found)
    assert "z differs from y from step 2 on" in sentence(found, subjects("x", "y", "z"), EXACT)


def test_nothing_to_hold() -> None:
    found = judged(EXACT, x=("mixed", GOOD), y=("low", FAR))
    assert is_ok(found)
    assert sentence(found, subjects("x", "y"), EXACT).startswith("no two variants had to agree; y differs from x")


def test_a_regime_that_happens_to_be_equal() -> None:
    found = judged(EXACT, x=("mixed", GOOD), y=("low", GOOD))
    assert sentence(found, subjects("x", "y"), EXACT) == "no two variants had to agree; y is bit-equal to x."


def test_within_the_tolerance() -> None:
    found = judged(LOOSE, x=("mixed", GOOD), y=("mixed", OFF))
    assert is_ok(found)
    assert sentence(found, subjects("x", "y"), LOOSE) == (
        "the losses of x and y agree within 3.3e-04, relative (the bound is 0.01)."
    )


def test_beyond_the_tolerance() -> None:
    found = judged(LOOSE, x=("mixed", GOOD), y=("mixed", FAR))
    assert not is_ok(found)
    assert "must agree within 0.01 of the loss" in sentence(found, subjects("x", "y"), LOOSE)


@pytest.mark.parametrize("bound", [EXACT, LOOSE])
def test_a_missing_step_is_beyond_any_bound(bound: Bound) -> None:
    found = judged(bound, x=("mixed", GOOD), y=("mixed", GOOD[:2]))
    assert not is_ok(found)
    assert "only one of them has a step 3" in sentence(found, subjects("x", "y"), bound)


@pytest.mark.parametrize("bound", [EXACT, LOOSE])
def test_a_loss_that_is_not_finite_is_beyond_any_bound(bound: Bound) -> None:
    assert not is_ok(judged(bound, x=("mixed", GOOD), y=("mixed", steps(4.0, None, 2.0))))


def test_the_weights_alone() -> None:
    gap = WeightGap(equal_bits=False, largest=0.5, tensor="a")
    found = [judge(compare_pair("x", "y", GOOD, GOOD, gap), EXACT, must_agree=True)]
    assert not is_ok(found)
    text = sentence(found, subjects("x", "y"), EXACT)
    assert "in the weights after 3 steps alone (largest gap of the weights: 0.5)" in text


def test_bounds(recipe: Recipe) -> None:
    assert bound_for([recipe], ["cpu", "cpu"]).max_relative_loss_gap == 0
    on_device = bound_for([recipe], ["cpu", "cuda"])
    assert on_device.max_relative_loss_gap == 0.01
    assert "cuda" in on_device.because
    backend = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"reduce_order": "backend"})})
    assert bound_for([recipe, backend], ["cpu", "cpu"]).max_relative_loss_gap == 0.01


def test_variants_of_a_recipe(recipe: Recipe) -> None:
    tight = Variant(name="tight", engine="zero2", precision="full", overrides=("train.max_grad_norm=0.1",))
    first, second = recipes(recipe, [variant("zero3", "low"), tight])
    assert (first.engine.name, first.precision.regime, first.train.max_grad_norm) == ("zero3", "low", None)
    assert (second.engine.name, second.precision.regime, second.train.max_grad_norm) == ("zero2", "full", 0.1)
    assert first.train.accumulation == second.train.accumulation == 2


@pytest.mark.parametrize(
    ("setting", "agree"),
    [
        ("engine.name=zero2", True),
        ("engine.reshard_after_forward=false", True),
        ("log.every=5", True),
        ("engine.ranks=4", False),
        ("engine.reduce_every=step", False),
        ("engine.reduce_order=backend", False),
        ("precision.regime=low", False),
        ("train.optimizer.lr=0.5", False),
    ],
)
def test_who_should_agree(recipe: Recipe, setting: str, agree: bool) -> None:
    other = Variant(name="other", engine="fsdp", precision="mixed", overrides=(setting,))
    assert should_agree(*recipes(recipe, [variant("fsdp", "mixed"), other])) is agree


def test_all_faults_of_all_variants_at_once(recipe: Recipe) -> None:
    prefetching = recipe.model_copy(
        update={
            "engine": recipe.engine.model_copy(update={"forward_prefetch": 1}),
            "precision": recipe.precision.model_copy(update={"low_dtype": "float16"}),
        }
    )
    with pytest.raises(RecipeError) as caught:
        recipes(prefetching, [variant("fsdp", "mixed"), variant("zero3", "mixed"), variant("fsdp", "low")])
    message = str(caught.value)
    assert "zero3+mixed: engine.forward_prefetch" in message
    assert "fsdp+low: precision.low_dtype" in message
    assert "fsdp+mixed:" not in message


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ([], "at least two variants; number given: 0"),
        ([variant("fsdp", "mixed")], "at least two variants; number given: 1"),
        ([variant("fsdp", "mixed"), variant("fsdp", "mixed")], "given twice"),
        ([variant("fsdp", "mixed"), Variant(name="b", engine="fsdp", precision="mixed")], "b is given twice"),
        ([variant("fsdp", "mixed"), Variant(name="FSDP+mixed", engine="ddp", precision="mixed")], "given twice"),
        ([variant("fsdp", "mixed"), Variant(name="../b", engine="ddp", precision="mixed")], "cannot be the name"),
        ([variant("fsdp", "mixed"), Variant(name="", engine="ddp", precision="mixed")], "cannot be the name"),
    ],
)
def test_sets_that_are_refused(recipe: Recipe, variants: list[Variant], message: str) -> None:
    with pytest.raises(SamestepError, match=message) as caught:
        recipes(recipe, variants)
    assert caught.value.exit_code == 2
