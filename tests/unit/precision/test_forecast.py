"""The forecast against closed forms, plain loops and torch's own AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from samestep.precision import forecast as forecasts
from samestep.precision.forecast import PATHS, Rounding, Weights, forecast, motions, spread_of, tensor_class

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


MIXED = Rounding(master=FP32, compute=BF16, update="nearest", cast="nearest", export=None, export_rounding="nearest")


def rounding(**changes: Any) -> Rounding:
    return replace(MIXED, **changes)


LOW = rounding(master=BF16)


def tensor(values: torch.Tensor, name: str = "layers.0.mlp.up_proj.weight", numel: int | None = None) -> Weights:
    return Weights(name=name, numel=numel or values.numel(), dimensions=2, values=values)


def normal(numel: int = 100_000) -> torch.Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()


# A bf16 weight in [2**e, 2**(e + 1)) stays where it is when the step is below half of its spacing, 2**(e - 8): so a
# normal weight is lost with the probability of being at least the smallest such 2**e.
@pytest.mark.parametrize(("lr", "about"), [(1e-3, 0.0), (1e-4, 0.118), (1e-5, 0.845), (1e-6, 0.98)])
def test_lost_in_the_first_step_is_the_closed_form(lr: float, about: float) -> None:
    edge = 2.0 ** math.ceil(math.log2(lr) + 8)
    exact = math.erfc(edge / 0.02 / math.sqrt(2))
    assert exact == pytest.approx(about, abs=0.005)
    found = forecast([tensor(normal())], [lr], LOW)
    assert found.first.lost == pytest.approx(exact, abs=0.006)
    assert found.after[0].lost == pytest.approx(exact, abs=0.006)  # other signs were drawn
    assert found.first.unseen == 0.0


def test_ones_never_move_by_a_thousandth() -> None:
    ones = tensor(torch.ones(64, dtype=BF16), "model.norm.weight")
    found = forecast([tensor(normal(1000)), ones], [1e-3] * 5, LOW)
    assert found.first_by_class["norm"].lost == 1.0
    assert found.never_move == ("model.norm.weight",)
    assert found.weights_by_class == {"norm": 64, "mlp": 1000}
    # Just below 1.0 bf16 is spaced by 2**-8: half of that is the smallest step that moves a one down.
    assert forecast([ones], [2.0**-9 * 1.01], LOW).never_move == ()


def test_a_copy_that_the_whole_run_cannot_change_is_named() -> None:
    ones = tensor(torch.ones(64, dtype=BF16), "model.norm.weight")
    # Downwards the copy changes from half of 2**-8 on; 19 steps of 1e-4 are below, 20 are above.
    assert forecast([ones], [1e-4] * 19, MIXED).never_move == ("model.norm.weight",)
    assert forecast([ones], [1e-4] * 20, MIXED).never_move == ()
    assert forecast([ones], [1e-4] * 19, rounding(cast="stochastic")).never_move == ()


def test_unseen_in_the_first_step_is_what_low_would_lose() -> None:
    mixed, low = (forecast([tensor(normal())], [1e-5], r).first for r in (MIXED, LOW))
    assert mixed.lost == 0.0
    assert mixed.unseen == low.lost


def test_weights_off_the_grid_are_seen_in_proportion() -> None:
    """fp32 weights spread evenly over cells of 2**-7: a step of s crosses a boundary with probability s / 2**-7."""
    spread = 1.0 + torch.rand(200_000, generator=torch.Generator().manual_seed(2)) * 0.99
    found = forecast([tensor(spread)], [1e-3], MIXED)
    assert found.first.unseen == pytest.approx(1 - 1e-3 * 2**7, abs=0.003)


def test_fp16_has_an_eighth_of_the_dead_zone() -> None:
    weights = [tensor(torch.full((1000,), 0.75))]
    for dtype, edge in ((BF16, 2.0**-9), (FP16, 2.0**-12)):
        for factor, unseen in ((0.9, 1.0), (1.1, 0.0)):
            assert forecast(weights, [edge * factor], rounding(compute=dtype)).first.unseen == unseen


def test_full_precision_loses_nothing() -> None:
    found = forecast([tensor(normal())], [1e-6] * 20, rounding(compute=FP32))
    last = found.after[-1]
    assert last.unseen == 0.0
    assert last.lost == pytest.approx(0.0, abs=0.01)
    # But its bf16 export has the dead zone, as wide as that of a copy.
    assert last.dropped == pytest.approx(forecast([tensor(normal())], [1e-6] * 20, MIXED).after[-1].copy_unchanged)


def test_what_an_export_drops() -> None:
    weights, lrs = [tensor(normal())], [1e-6] * 20
    nearest = forecast(weights, lrs, MIXED).after[-1]
    assert nearest.dropped == pytest.approx(nearest.copy_unchanged, abs=1e-3)
    assert nearest.dropped is not None and nearest.dropped > 0.5
    assert forecast(weights, lrs, rounding(export=FP32)).after[-1].dropped == 0.0
    assert forecast(weights, lrs, rounding(export_rounding="stochastic")).after[-1].dropped is None
    assert forecast(weights, lrs, LOW).after[-1].dropped == 0.0


def test_where_rounding_is_stochastic_nothing_vanishes() -> None:
    cast = forecast([tensor(normal())], [1e-6], rounding(cast="stochastic")).first
    assert (cast.lost, cast.unseen, cast.copy_unchanged) == (0.0, None, None)
    update = forecast([tensor(normal())], [1e-6], rounding(master=BF16, update="stochastic")).first
    assert (update.lost, update.unseen) == (None, None)


def test_kahan_loses_nothing_but_has_the_dead_zone() -> None:
    kahan, mixed = (
        forecast([tensor(normal())], [1e-6] * 10, r) for r in (rounding(master=BF16, update="compensated"), MIXED)
    )
    assert kahan.first.lost == 0.0
    assert [s.unseen for s in kahan.after] == [s.unseen for s in mixed.after]


def test_tensors_count_by_their_size() -> None:
    small, large = torch.zeros(100, dtype=BF16), torch.ones(100, dtype=BF16)
    found = forecast([tensor(small, numel=100), tensor(large, numel=300)], [1e-3], LOW)
    assert found.first.lost == 0.75
    assert (found.weights, found.sampled) == (400, 200)


def test_horizons_end_with_the_run() -> None:
    assert [s.steps for s in forecast([tensor(normal(10))], [1e-5] * 250, MIXED).after] == [1, 10, 100, 250]
    assert [s.steps for s in forecast([tensor(normal(10))], [1e-5] * 10, MIXED).after] == [1, 10]
    assert [s.lr for s in forecast([tensor(normal(10))], [4.0, 3.0, 2.0], MIXED).after] == [4.0, 2.0]


def test_the_first_step_is_the_learning_rate() -> None:
    (motion,) = motions([0.3], [1], betas=(0.9, 0.999), persistence=torch.full((PATHS,), 0.2, dtype=torch.float64))
    assert motion.before.abs().max() == 0
    torch.testing.assert_close(motion.step.abs(), torch.full_like(motion.step, 0.3))


@pytest.mark.parametrize("steps", [12, 1500])
def test_gradients_that_persist_make_a_straight_line(steps: int) -> None:
    lrs = [1 / n for n in range(1, steps + 1)]
    (motion,) = motions(lrs, [steps], betas=(0.9, 0.999), persistence=torch.full((PATHS,), 1.0, dtype=torch.float64))
    torch.testing.assert_close(motion.before.abs(), torch.full_like(motion.before, math.fsum(lrs[:-1])))
    torch.testing.assert_close(motion.step.abs(), torch.full_like(motion.step, lrs[-1]))
    assert motion.before.sum().item() == pytest.approx(0.0, abs=1e-6)
    assert motion.reach == 1.0


@pytest.mark.parametrize("persistence", [0.0, 0.4])
def test_motion_is_that_of_torchs_adamw(persistence: float) -> None:
    """40 steps of the real optimizer on gradients of the same kind; both are random, so their spreads are compared."""
    random, steps = torch.Generator().manual_seed(3), 40
    weights = torch.zeros(20_000, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weights], lr=0.01, betas=(0.8, 0.99), weight_decay=0.0)
    noise = math.sqrt(1 - persistence**2)
    for _ in range(steps - 1):
        weights.grad = torch.randn(20_000, generator=random, dtype=torch.float64) * noise + persistence
        optimizer.step()
    (motion,) = motions(
        [0.01] * steps, [steps], betas=(0.8, 0.99), persistence=torch.full((PATHS,), persistence, dtype=torch.float64)
    )
    upward = torch.ones_like(motion.before)
    upward[1::2] = -1
    assert (motion.before * upward).mean().item() == pytest.approx(-weights.mean().item(), abs=0.004)
    assert (motion.before * upward).std().item() == pytest.approx(weights.std().item(), rel=0.05)


def test_beyond_the_simulated_steps_the_walk_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 600
    spreads = []
    for simulated in (steps, 200):
        monkeypatch.setattr(forecasts, "SIMULATED", simulated)
        (motion,) = motions(
            [1.0] * steps, [steps], betas=(0.9, 0.999), persistence=torch.full((PATHS,), 0.1, dtype=torch.float64)
        )
        spreads.append(motion.before.std().item())
    assert spreads[1] == pytest.approx(spreads[0], rel=0.06)


def test_persistence_is_spread_exponentially() -> None:
    found = spread_of(0.2)
    assert found.mean().item() == pytest.approx(0.2, rel=0.02)
    # Half of an exponential distribution lies below mean * ln 2, and exp(-1 / mean) of it beyond 1.
    assert found.median().item() == pytest.approx(0.2 * math.log(2), rel=0.01)
    assert (found == 1).double().mean().item() == pytest.approx(math.exp(-5), abs=1e-3)
    assert torch.equal(found[::2], found[1::2])


def test_equal_arguments_give_equal_forecasts() -> None:
    assert forecast([tensor(normal(1000))], [1e-5] * 20, MIXED) == forecast([tensor(normal(1000))], [1e-5] * 20, MIXED)


@pytest.mark.parametrize(
    ("name", "dimensions", "kind"),
    [
        ("model.embed_tokens.weight", 2, "embedding"),
        ("transformer.wpe.weight", 2, "embedding"),
        ("model.layers.3.self_attn.q_proj.weight", 2, "attention"),
        ("model.layers.3.self_attn.q_proj.bias", 1, "bias"),
        ("model.layers.3.self_attn.q_norm.weight", 1, "norm"),
        ("model.layers.3.post_attention_layernorm.weight", 1, "norm"),
        ("base_model.model.model.layers.0.self_attn.v_proj.lora_A.default.weight", 2, "attention"),
        ("model.layers.3.mlp.gate_proj.weight", 2, "mlp"),
        ("transformer.h.0.mlp.c_fc.weight", 2, "mlp"),
        ("transformer.h.0.ln_1.weight", 1, "norm"),
        ("model.norm.weight", 1, "norm"),
        ("lm_head.weight", 2, "head"),
        ("score.weight", 2, "other"),
    ],
)
def test_classes(name: str, dimensions: int, kind: str) -> None:
    assert tensor_class(name, dimensions) == kind
