"""Pairs of hand-made runs whose differences are known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from samestep.compare.pairs import Difference, WeightGap, compare_pair

EQUAL = WeightGap(equal_bits=True, largest=0.0, tensor=None)
LOSSES = (4.0, 3.5, 3.25, 3.0)
NORMS = (8.0, 7.0, 6.0, 5.0)


def steps(losses: Any = LOSSES, norms: Any = NORMS) -> list[dict[str, Any]]:
    rows = zip(losses, norms, strict=True)
    return [{"step": n, "loss": loss, "grad_norm": norm} for n, (loss, norm) in enumerate(rows, start=1)]


def changed(values: tuple[float, ...], step: int, value: float | None) -> list[float | None]:
    return [value if n == step else old for n, old in enumerate(values, start=1)]


def test_equal_runs() -> None:
    pair = compare_pair("one", "two", steps(), steps(), EQUAL)
    assert (pair.a, pair.b) == ("one", "two")
    assert pair.bit_equal
    assert pair.first_difference is None
    assert (pair.max_abs_loss_gap, pair.max_abs_grad_norm_gap, pair.max_abs_weight_gap) == (0.0, 0.0, 0.0)
    assert pair.steps_compared == 4


def test_one_unit_in_the_last_place_of_one_loss() -> None:
    # 3.25 is in [2, 4), where doubles are 2**-51 apart.
    other = steps(losses=changed(LOSSES, 3, 3.25 + 2.0**-51))
    pair = compare_pair("one", "two", steps(), other, EQUAL)
    assert not pair.bit_equal
    assert pair.first_difference == Difference(step=3, quantity="loss")
    assert pair.max_abs_loss_gap == 2.0**-51
    assert pair.max_relative_loss_gap == pytest.approx(2.0**-51 / 3.25, rel=1e-12)
    assert pair.max_abs_grad_norm_gap == 0.0


def test_the_gradient_norm_alone() -> None:
    pair = compare_pair("one", "two", steps(), steps(norms=changed(NORMS, 2, 7.5)), EQUAL)
    assert pair.first_difference == Difference(step=2, quantity="grad_norm")
    assert (pair.max_abs_loss_gap, pair.max_abs_grad_norm_gap) == (0.0, 0.5)


def test_the_loss_comes_before_the_norm_of_its_step() -> None:
    other = steps(losses=changed(LOSSES, 2, 3.75), norms=changed(NORMS, 2, 7.5))
    assert compare_pair("one", "two", steps(), other, EQUAL).first_difference == Difference(step=2, quantity="loss")


def test_an_earlier_norm_comes_before_a_later_loss() -> None:
    other = steps(losses=changed(LOSSES, 3, 3.75), norms=changed(NORMS, 2, 7.5))
    found = compare_pair("one", "two", steps(), other, EQUAL).first_difference
    assert found == Difference(step=2, quantity="grad_norm")


def test_gaps_are_the_largest_of_all_steps() -> None:
    other = steps(losses=[4.0, 3.5 + 0.125, 3.25 - 0.5, 3.0 + 0.25])
    pair = compare_pair("one", "two", steps(), other, EQUAL)
    assert pair.max_abs_loss_gap == 0.5
    assert pair.max_relative_loss_gap == pytest.approx(0.5 / 3.25)


def test_the_weights_alone() -> None:
    gap = WeightGap(equal_bits=False, largest=2.0**-10, tensor="lm_head.weight")
    pair = compare_pair("one", "two", steps(), steps(), gap)
    assert not pair.bit_equal
    assert pair.first_difference == Difference(step=4, quantity="weights")
    assert (pair.max_abs_weight_gap, pair.largest_weight_gap_in) == (2.0**-10, "lm_head.weight")


def test_a_shorter_run_differs_where_it_ends() -> None:
    pair = compare_pair("one", "two", steps(), steps()[:3], EQUAL)
    assert not pair.bit_equal
    assert pair.first_difference == Difference(step=4, quantity="loss")
    assert pair.steps_compared == 3
    assert pair.max_abs_loss_gap == 0.0
    # Weights after different numbers of steps say nothing.
    assert pair.max_abs_weight_gap is None


def test_a_run_without_steps() -> None:
    pair = compare_pair("one", "two", [], steps(), None)
    assert pair.first_difference == Difference(step=1, quantity="loss")
    assert (pair.steps_compared, pair.max_abs_loss_gap) == (0, None)


def test_runs_are_compared_up_to_the_shorter_ones_end() -> None:
    other = steps(losses=changed(LOSSES, 2, 9.0))[:3]
    assert compare_pair("one", "two", steps(), other, None).first_difference == Difference(step=2, quantity="loss")


def test_not_finite_on_one_side_is_a_difference_without_a_size() -> None:
    pair = compare_pair("one", "two", steps(), steps(losses=changed(LOSSES, 2, None)), EQUAL)
    assert pair.first_difference == Difference(step=2, quantity="loss")
    assert pair.max_abs_loss_gap is None
    assert pair.max_relative_loss_gap is None


def test_not_finite_on_both_sides_is_no_difference() -> None:
    both = steps(losses=changed(LOSSES, 2, None))
    pair = compare_pair("one", "two", both, both, EQUAL)
    assert pair.bit_equal
    assert pair.max_abs_loss_gap == 0.0


def test_zeros_of_both_signs_are_not_the_same_bits() -> None:
    pair = compare_pair("one", "two", steps(norms=[0.0] * 4), steps(norms=[0.0, -0.0, 0.0, 0.0]), EQUAL)
    assert pair.first_difference == Difference(step=2, quantity="grad_norm")
    assert pair.max_abs_grad_norm_gap == 0.0


def test_without_weights_nothing_is_called_bit_equal() -> None:
    assert not compare_pair("one", "two", steps(), steps(), None).bit_equal


def test_the_object_of_compare_json() -> None:
    content = compare_pair("one", "two", steps(), steps(losses=changed(LOSSES, 1, 5.0)), EQUAL).described()
    assert content["first_difference"] == {"step": 1, "quantity": "loss"}
    contract = ("a", "b", "bit_equal", "max_abs_loss_gap", "max_abs_grad_norm_gap", "max_abs_weight_gap")
    assert [content[key] for key in contract] == ["one", "two", False, 1.0, 0.0, 0.0]
    assert not any(isinstance(value, float) and not math.isfinite(value) for value in content.values())
