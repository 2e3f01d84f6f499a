"""Rows P18, P19 and P21: models that mix dtypes, and quantised weights. Expected values come from plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samestep.errors import EngineError
from tests.equivalence.cases import ENGINES, make_recipe
from tests.equivalence.mixed_dtypes import MODELS, reference, trained

BF16, FP32, UINT8 = torch.bfloat16, torch.float32, torch.uint8

pytestmark = pytest.mark.timeout(120)


def outcome(ranks, folder, engine: str, kind: str, regime: str = "mixed") -> dict[str, Any]:
    recipe = make_recipe(engine, folder, regime=regime, train__optimizer={"lr": 1e-2, "weight_decay": 0.0})
    return ranks.run(1 if engine == "single" else 2, trained, recipe=recipe, kind=kind)[0]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_p18_p19_several_dtypes_in_one_unit_train_as_in_plain_torch(ranks, model_folder, engine, kind):
    """Fails at the first forward pass on plain FSDP."""
    if (engine, kind) == ("zero3", "quantised_base"):
        pytest.skip("refused, see below")
    found, expected = outcome(ranks, model_folder(), engine, kind), reference(kind, BF16)
    assert found["masters"].keys() == expected.keys()
    for name, master in expected.items():
        assert torch.equal(found["masters"][name], master), name
    assert found["held"] == found["planned"]
    assert {found["held"][name] for name in expected} == {FP32}


@pytest.mark.parametrize("engine", ENGINES)
def test_full_computes_in_fp32_whatever_was_loaded(ranks, model_folder, engine):
    found, expected = outcome(ranks, model_folder(), engine, "norms_in_fp32", "full"), reference("norms_in_fp32", FP32)
    for name, master in expected.items():
        assert torch.equal(found["masters"][name], master), name


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "zero3"])
@pytest.mark.parametrize("regime", ["mixed", "low"])
def test_p21_quantised_weights_stay_whole_and_as_they_are(ranks, model_folder, engine, regime):
    found = outcome(ranks, model_folder(), engine, "quantised_base", regime)
    assert found["held"]["1.weight"] == UINT8
    assert found["bytes"]["1.weight"] == 16 * 16
    assert found["types"]["1.weight"] == "Packed"


def test_p21_what_would_cut_quantised_weights_refuses_by_name(ranks, model_folder):
    with pytest.raises(Exception) as caught:
        outcome(ranks, model_folder(), "zero3", "quantised_base")
    text = str(caught.value)
    assert EngineError.__name__ in text or isinstance(caught.value, EngineError)
    assert "1.weight is quantised" in text
