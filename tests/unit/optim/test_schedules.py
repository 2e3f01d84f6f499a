"""Learning rates against transformers' schedules, and the groups of the optimizer."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from samestep.optim import factory, is_decayed, lr_at, set_lr
from samestep.recipe.schema import Optimizer, Schedule

LR = 3e-4


def ours(name: str, warmup: int, total: int, **changes) -> list[float]:
    schedule = Schedule(name=name, warmup_steps=warmup, **changes)  # type: ignore[arg-type]
    return [lr_at(step, lr=LR, schedule=schedule, total_steps=total) for step in range(1, total + 1)]


def theirs(name: str, warmup: int, total: int) -> list[float]:
    """What transformers' scheduler has the optimizer use in steps 1 to `total`."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    if name == "constant":
        scheduler = get_constant_schedule_with_warmup(optimizer, warmup)
    elif name == "linear":
        scheduler = get_linear_schedule_with_warmup(optimizer, warmup, total)
    else:
        scheduler = get_cosine_schedule_with_warmup(optimizer, warmup, total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 10), (0, 37), (3, 10), (1, 5), (9, 10), (50, 100)])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_after_the_warmup_it_is_transformers(name, warmup, total):
    assert ours(name, warmup, total)[warmup:] == pytest.approx(theirs(name, warmup, total)[warmup:], rel=1e-12)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_the_warmup_rises_to_the_rate_and_never_is_zero(name):
    assert ours(name, 4, 9)[:4] == pytest.approx([LR / 4, LR / 2, LR * 3 / 4, LR])
    assert ours(name, 5, 5)[-1] == pytest.approx(LR)


def test_p43_ten_steps_fall_by_a_tenth_each():
    """Ten steps were done after five on two processes: 0.8 0.6 0.4 0.2 0 0. Nothing but the step counts."""
    assert ours("linear", 0, 10) == pytest.approx([LR * tenths / 10 for tenths in range(10, 0, -1)])


def test_final_factor():
    """One step after the last the rate would be at the final factor; half way it is in the middle."""
    schedule = Schedule(name="linear", final_factor=0.2)
    assert lr_at(6, lr=1.0, schedule=schedule, total_steps=10) == pytest.approx(0.6)
    assert lr_at(11, lr=1.0, schedule=schedule, total_steps=10) == pytest.approx(0.2)
    schedule = Schedule(name="cosine", final_factor=0.2)
    assert lr_at(6, lr=1.0, schedule=schedule, total_steps=10) == pytest.approx(0.6)
    assert lr_at(11, lr=1.0, schedule=schedule, total_steps=10) == pytest.approx(0.2)


NAMES = ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.norm.weight", "lm_head.bias")


def test_groups_are_decayed_and_not_decayed():
    named = {name: torch.zeros(2, requires_grad=True) for name in NAMES}
    recipe = Optimizer(lr=LR, weight_decay=0.1, betas=[0.8, 0.9], eps=1e-7)
    optimizer = factory(recipe)(named)
    assert type(optimizer) is torch.optim.AdamW
    decayed, kept = optimizer.param_groups
    assert [id(t) for t in decayed["params"]] == [id(named[NAMES[0]])]
    assert [id(t) for t in kept["params"]] == [id(named[name]) for name in NAMES[1:]]
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (LR, (0.8, 0.9), 1e-7)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_an_empty_group_is_left_out_and_sgd_is_torchs():
    named = {NAMES[0]: torch.zeros(2, requires_grad=True)}
    optimizer = factory(Optimizer(name="sgd", lr=0.1, momentum=0.9))(named)
    assert type(optimizer) is torch.optim.SGD
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9]


def test_what_is_decayed_is_the_recipes_to_say():
    recipe = Optimizer(no_decay=["*embed*"])
    assert [is_decayed(name, recipe) for name in NAMES] == [False, True, True, True]
