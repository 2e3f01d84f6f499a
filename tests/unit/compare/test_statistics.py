"""Intervals against published tables, curves whose stretch is known, fields and causes worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from samestep.compare.cause import cause, facts_of, stage
from samestep.compare.fields import differences, observed_differences, unequal_work
from samestep.compare.pairs import compare_pair
from samestep.compare.rescale import stretch
from samestep.compare.sets import expand, varied
from samestep.compare.statistics import interval, mean_gap, t_cdf, t_quantile
from samestep.errors import SamestepError
from tests.unit.compare.made_runs import falling, made_recipe


# Two-sided 95 % and 99 % points of Student's distribution, from the NIST/SEMATECH e-Handbook, section 1.3.6.7.2.
@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 9, 2.262),
        (0.975, 30, 2.042),
        (0.995, 5, 4.032),
    ],
)
def test_students_quantiles(probability: float, freedom: int, value: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(value, abs=5e-4)


def test_students_distribution_in_closed_form() -> None:
    # Cauchy's for one degree of freedom; 1/2 + t / (2 sqrt(2 + t^2)) for two.
    assert t_cdf(3.0, 1) == pytest.approx(0.5 + math.atan(3.0) / math.pi)
    assert t_cdf(3.0, 2) == pytest.approx(0.5 + 3 / (2 * math.sqrt(11)))


def test_an_interval_by_hand() -> None:
    found = interval([1.0, 2.0, 3.0])  # s = 1, so the half-width is 4.303 / sqrt(3)
    assert found.mean == 2.0
    assert found.high == pytest.approx(2 + 4.30265 / math.sqrt(3), rel=1e-5)
    assert found.low == pytest.approx(2 - 4.30265 / math.sqrt(3), rel=1e-5)
    assert interval([1.0]).low is None


def test_the_mean_gap_leaves_out_what_is_not_finite() -> None:
    a, b = [{"loss": 1.0}, {"loss": None}, {"loss": 2.0}], [{"loss": 2.0}, {"loss": 5.0}, {"loss": 5.0}]
    assert mean_gap(a, b) == 2.0
    assert mean_gap(a[1:2], b[1:2]) is None


@pytest.mark.parametrize("speed", [0.1, 0.5])
def test_a_curve_at_another_speed_is_found(speed: float) -> None:
    fast = [falling(u) for u in range(60)]
    slow = [falling(speed * u) for u in range(60)]
    for found in (stretch("fast", "slow", fast, slow), stretch("fast", "slow", slow, fast)):
        assert found is not None
        assert found.speed == pytest.approx(speed, rel=0.06)
        assert found.matches
    assert stretch("fast", "slow", fast, slow).slower == "slow"  # type: ignore[union-attr]


def test_another_shape_is_not_called_another_speed() -> None:
    shifted = [falling(u) + 1.0 for u in range(60)]
    found = stretch("a", "b", [falling(u) for u in range(60)], shifted)
    assert found is None or not found.matches


def test_curves_that_say_nothing_about_speed() -> None:
    curve = [falling(u) for u in range(60)]
    assert stretch("a", "b", curve, curve) is None
    assert stretch("a", "b", curve[:5], [1.0] * 5) is None
    assert stretch("a", "b", curve, [None, *curve[1:]]) is None


def test_fields_and_what_they_matter() -> None:
    a = made_recipe().model_dump()
    b = made_recipe(
        "engine.name=zero3", "train.optimizer.lr=1e-4", "precision.regime=low", "log.every=3", "engine.ranks=4"
    ).model_dump()
    kinds = {d.field: d.kind for d in differences(a, b, ["precision"])}
    assert kinds == {
        "engine.name": "engine",
        "engine.ranks": "work",
        "log.every": "uncounted",
        "precision.regime": "tested",
        "train.optimizer.lr": "work",
    }
    assert [str(d) for d in unequal_work(differences(a, b))][-1].startswith("train.optimizer.lr is 1e-05 in one")


def test_work_as_it_was_recorded() -> None:
    a = [{"step": 1, "lr": 1.0, "tokens": 8}, {"step": 2, "lr": 1.0, "tokens": 8}]
    b = [{"step": 1, "lr": 1.0, "tokens": 8}, {"step": 2, "lr": 2.0, "tokens": 9}]
    assert [d.field for d in observed_differences(a, b)] == ["tokens of step 2", "lr of step 2"]
    assert {d.kind for d in observed_differences(a, b, ["train.optimizer.lr"]) if d.field.startswith("lr")} == {
        "tested"
    }
    assert observed_differences([{"step": 1}], b) == []


def rows(*values: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"step": n, "loss": loss, "grad_norm": norm} for n, (loss, norm) in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (rows((4.5, 1), (3, 1)), "forward"),
        (rows((4, 2), (3, 1)), "gradient"),
        (rows((4, 1), (3.5, 1)), "update"),
        (rows((4, 1)), "length"),
        (rows((4, 1), (3, 1)), "unknown"),
    ],
)
def test_the_part_of_a_step_in_which_logs_part(other: list[dict[str, Any]], part: str) -> None:
    """P132: two logs, the first step apart and the class of cause."""
    pair = compare_pair("a", "b", rows((4, 1), (3, 1)), other, None)
    assert stage(pair) == part
    assert cause(pair, None, None)


def without_norms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "grad_norm"} for row in rows]


def test_a_gradient_norm_that_one_log_lacks_is_no_difference() -> None:
    one, other = rows((4, 1), (3, 1)), without_norms(rows((4, 1), (3, 1)))
    pair = compare_pair("a", "b", one, other, None)
    assert (pair.first_difference, pair.max_abs_grad_norm_gap) == (None, None)
    # One that is there and not finite is a difference.
    assert compare_pair("a", "b", one, [row | {"grad_norm": None} for row in other], None).first_difference is not None


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (rows((4, 1), (3, 1)), without_norms(rows((4, 1), (3.5, 1)))),
        (without_norms(rows((4, 1), (3, 1))), without_norms(rows((4, 1), (3.5, 1)))),
        # Every tenth step alone: the runs may have parted at any step before it.
        ([{"step": 10, "loss": 4, "grad_norm": 1}], [{"step": 10, "loss": 4.5, "grad_norm": 1}]),
        ([{"step": 10, "loss": 4, "grad_norm": 1}], [{"step": 10, "loss": 4, "grad_norm": 2}]),
    ],
)
def test_what_was_not_recorded_is_not_blamed(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    pair = compare_pair("a", "b", a, b, None)
    assert stage(pair) == "unrecorded"
    said = cause(pair, None, None)
    assert said is not None
    assert "any part of a step" in said


def precision(master: str, lost: float, reduce: str = "float32") -> dict[str, Any]:
    roles = {"master": {"dtype": [master]}, "reduce": {"dtype": [reduce]}}
    return {"plan": {"roles": roles}, "facts": None, "forecast": {"lost_share": lost}}


def test_the_cause_is_the_optimizer_that_works_in_bf16() -> None:
    pair = compare_pair("A", "B", rows((4, 1), (3, 1)), rows((4, 1), (3.9, 1)), None)
    said = cause(pair, facts_of(precision("float32", 0.0), 0.0), facts_of(precision("bfloat16", 0.98), 0.96))
    assert said == "B's optimizer works in bfloat16: forecast 98% of updates lost, measured 96% of updates lost"


def test_the_cause_is_another_reduction() -> None:
    """P32: curves that part in the gradient alone, because one side reduces in bf16."""
    pair = compare_pair("A", "B", rows((4, 1), (3, 1)), rows((4, 1.5), (3.9, 1)), None)
    said = cause(pair, facts_of(precision("float32", 0.0), 0.0), facts_of(precision("float32", 0.0, "bfloat16"), 0.0))
    assert said is not None
    assert said.startswith(
        "reduce is float32 in A and bfloat16 in B (the losses are still equal when the gradient norm"
    )


def test_the_set_of_variants() -> None:
    found = expand(
        [("fsdp", "mixed")],
        [varied("train.optimizer.lr=1e-6,1e-5"), varied("engine.offload=none,{optimizer: cpu}")],
        [0, 1],
    )
    assert len(found) == 8
    assert [v.name for v in found[:3]] == [
        "fsdp+mixed+lr=1e-6+offload=none+seed=0",
        "fsdp+mixed+lr=1e-6+offload=none+seed=1",
        "fsdp+mixed+lr=1e-6+offload=optimizer-cpu+seed=0",
    ]
    assert found[1].overrides == ("train.optimizer.lr=1e-6", "engine.offload=none", "train.seed=1")
    assert found[0].arm == found[1].arm != found[2].arm


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.steps", "is not FIELD=A,B"),
        ("train.steps=1,,2", "is not FIELD=A,B"),
        ("train.steps=1,1", "one value twice"),
        ("engine.name=fsdp,ddp", "varied with --engines"),
        ("train.seed=0,1", "varied with --seeds"),
    ],
)
def test_faulty_variations(text: str, message: str) -> None:
    with pytest.raises(SamestepError, match=message):
        varied(text)
