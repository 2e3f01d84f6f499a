"""The verdict of a cross-check, and what it runs, without ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from samestep.crosscheck.check import compared
from samestep.crosscheck.configs import runnable
from samestep.crosscheck.side import Observed
from samestep.recipe import parse

SEEN = Observed(master="float32", moments="float32", compute="bfloat16", reduce="float32", gradient="float32",
                optimizer={"eps": 1e-8}, clip=0.5,
                accumulation=2, rates=[1e-3, 1e-3], losses=[4.0, 3.9], updates=2)  # fmt: skip
RECIPE = parse("model: {path: m}\ndata: {path: d}\ntrain: {steps: 5, micro_batch: 3}\n")


def verdicts(lossy: set[str] | None = None, *, sixteen_bit: bool = True, **changes: Any) -> dict[str, str]:
    other = dataclasses.replace(SEEN, **changes)
    return {row.quantity: row.verdict for row in compared(SEEN, other, lossy=lossy or set(), sixteen_bit=sixteen_bit)}


def test_the_same_is_equal() -> None:
    assert set(verdicts().values()) == {"equal"}


def test_no_clipping_against_clipping_is_a_difference() -> None:
    assert verdicts(clip=None)["clip"] == "different"
    assert verdicts({"clipping"}, clip=None)["clip"] == "reported"
    assert verdicts({"schedule"}, clip=None)["clip"] == "different"


def test_a_schedule_that_is_late_is_found() -> None:
    assert verdicts(rates=[0.0, 1e-3])["rates"] == "different"
    assert verdicts({"schedule"}, rates=[0.0, 1e-3])["rates"] == "reported"


def test_a_dtype_that_nobody_saw_is_neither() -> None:
    assert verdicts(moments=None)["moments"] == "unseen"
    assert verdicts(moments="bfloat16")["moments"] == "different"


def test_rates_are_held_to_more_than_losses() -> None:
    assert verdicts(rates=[1e-3, 1.001e-3])["rates"] == "different"


def test_another_optimizer_is_found_by_what_it_was_built_with() -> None:
    assert verdicts(optimizer={"eps": 1e-6})["optimizer"] == "different"


def test_precision_excuses_what_rounding_allows_and_no_more() -> None:
    assert verdicts({"precision"}, sixteen_bit=False, losses=[4.0, 3.902])["losses"] == "reported"
    assert verdicts({"precision"}, losses=[4.0, 3.8])["losses"] == "different"


def test_losses_are_held_to_the_precision_of_the_regime() -> None:
    assert verdicts(losses=[4.0, 3.901])["losses"] == "equal"
    assert verdicts(losses=[4.0, 3.901], sixteen_bit=False)["losses"] == "different"


def test_nothing_excuses_another_first_loss() -> None:
    late = {"rates": [0.0, 1e-3]}
    assert verdicts({"schedule"}, losses=[4.0, 3.0], **late)["losses"] == "reported"
    assert verdicts({"schedule"}, losses=[4.1, 3.0], **late)["losses"] == "different"
    assert verdicts({"schedule"}, losses=[4.0, 3.0])["losses"] == "different"


def test_what_runs_has_no_auto_offload_or_logging() -> None:
    config = {
        "train_batch_size": 512,
        "tensorboard": {"enabled": True},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    run = runnable(config, RECIPE)
    assert "train_batch_size" not in run and "tensorboard" not in run
    assert run["train_micro_batch_size_per_gpu"] == 3
    assert run["bf16"] == {"enabled": True}
    assert run["gradient_clipping"] == 0.5
    assert "offload_optimizer" not in run["zero_optimization"]
    assert run["optimizer"]["params"] == {"lr": 1e-3, "torch_adam": True}
