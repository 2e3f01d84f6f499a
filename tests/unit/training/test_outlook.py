"""What is said before step 1 about updates that will vanish."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samestep.engines.build import resolve_plan
from samestep.precision.forecast import Forecast
from samestep.recipe import override, parse
from samestep.training.outlook import described, learning_rates, outlook, sentences

STEPS = 20


def foreseen(*changes: str, weights: torch.Tensor | None = None) -> Forecast | None:
    text = "{model: {path: m}, data: {path: d}, train: {steps: 20, schedule: {name: constant}}}"
    recipe = override(parse(text), ["precision.max_lost_update_share=null", *changes])
    model: Any = nn.Module()
    normal = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 0.02
    model.weight = nn.Parameter((normal if weights is None else weights).bfloat16())
    return outlook(recipe, resolve_plan(recipe, model), model, learning_rates(recipe, STEPS))


def text_of(*changes: str, **others: Any) -> str:
    found = foreseen(*changes, **others)
    assert found is not None
    return " ".join(sentences(found))


def test_low_says_what_is_lost() -> None:
    """84 % at 1e-5 is the known share for these weights."""
    assert "84% of the updates will be lost" in text_of("precision.regime=low", "train.optimizer.lr=1e-5")


def test_mixed_says_what_is_unseen_and_what_an_export_drops() -> None:
    text = text_of("precision.regime=mixed", "train.optimizer.lr=1e-6")
    assert "98% of the first step's updates will not be seen" in text
    assert "The export will show" in text
    assert "lost" not in text


@pytest.mark.parametrize("regime", ["mixed-stochastic", "low-stochastic"])
def test_stochastic_regimes_have_nothing_to_say(regime: str) -> None:
    assert text_of(f"precision.regime={regime}", "train.optimizer.lr=1e-6") == ""


def test_full_with_an_fp32_export_has_nothing_to_say() -> None:
    changes = ("precision.regime=full", "precision.export_dtype=float32", "train.optimizer.lr=1e-4")
    assert text_of(*changes) == ""


def test_tensors_that_cannot_move_are_named() -> None:
    text = text_of("precision.regime=low", "train.optimizer.lr=1e-3", weights=torch.ones(64))
    assert "1 tensors cannot move at all, weight first" in text
    assert "100% of the updates will be lost" in text


def test_sgd_has_no_forecast() -> None:
    assert foreseen("train.optimizer.name=sgd") is None


def test_the_file_has_the_headline_shares() -> None:
    found = foreseen("precision.regime=mixed", "train.optimizer.lr=1e-6")
    assert found is not None
    content = described(found)
    assert content["lost_share"] == 0.0
    assert content["unseen_share"] > 0.97
    assert [entry["steps"] for entry in content["after"]] == [1, 10, 20]


def test_learning_rates_are_the_schedule() -> None:
    recipe = parse("{model: {path: m}, data: {path: d}, train: {steps: 4, optimizer: {lr: 0.4}}}")
    assert learning_rates(recipe, 4) == pytest.approx([0.4, 0.3, 0.2, 0.1])
