"""AdamW on bf16 weights against torch's in fp32, an independent Kahan AdamW, and closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from samestep.optim import LowPrecisionAdamW, Piece

BF16 = torch.bfloat16
ROUNDINGS = ("stochastic", "compensated")


def make(
    named: dict[str, torch.Tensor], rounding: str, *, decay: float = 0.0, seed: int = 0, **options: Any
) -> LowPrecisionAdamW:
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8} | options
    groups = [{"params": list(named.values()), "weight_decay": decay}]
    optimizer = LowPrecisionAdamW(groups, rounding=rounding, seed=seed, **settings)
    for name, tensor in named.items():
        optimizer.describe(tensor, [Piece(name=name, start=0, offset=0, numel=tensor.numel())])
    return optimizer


def weights(count: int, *, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def gradients(count: int, step: int) -> torch.Tensor:
    """bf16 gradients with a direction that lasts and noise upon it."""
    lasting = torch.randn(count, generator=torch.Generator().manual_seed(77))
    noise = torch.randn(count, generator=torch.Generator().manual_seed(1000 + step))
    return ((0.3 * lasting + noise) * 1e-2).to(BF16)


def held(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, compensation: str = "compensation") -> torch.Tensor:
    """What a weight stands for: itself, with the compensation where there is one."""
    extra = optimizer.state[parameter].get(compensation)
    return parameter.detach().double() + (0.0 if extra is None else extra.double())


def ulp(values: torch.Tensor) -> torch.Tensor:
    """Spacing of bf16 numbers, which have eight bits, at these places."""
    return 2.0 ** (torch.frexp(values.double())[1].double() - 8)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_first_step_is_torchs_in_fp32(rounding: str, decay: float) -> None:
    start = weights(10_000)
    wide = start.float().requires_grad_()
    torchs = torch.optim.AdamW([wide], lr=1e-3, weight_decay=decay)
    ours = start.clone().requires_grad_()
    optimizer = make({"w": ours}, rounding, decay=decay)
    wide.grad = gradients(10_000, 0).float()
    ours.grad = gradients(10_000, 0)
    torchs.step()
    optimizer.step()
    gap = (held(optimizer, ours) - wide.detach().double()).abs()
    if rounding == "stochastic":
        assert bool((gap < ulp(torch.maximum(start.abs(), ours.detach().abs()))).all())
    else:
        # The compensation has eight bits of its own of what is at most half a spacing; fp32 rounds as well.
        largest = torch.maximum(start.abs(), ours.detach().abs())
        assert bool((gap <= ulp(largest) * 2**-8).all())
    for name in ("exp_avg", "exp_avg_sq"):
        moment, right = optimizer.state[ours][name], torchs.state[wide][name]
        assert moment.dtype == BF16
        steps = (moment.double() - right.double()).abs() / ulp(right)
        assert float(steps.max()) <= (1.0 if rounding == "stochastic" else 0.5)
    assert int(optimizer.state[ours]["step"]) == 1


def test_compensated_against_another_kahan_adamw() -> None:
    """torch-optimi computes in bf16 throughout, ours in fp32. After 300 steps, what ours holds is less than 1 % of the
    way from fp32 training (0.4 % seen), and less than 2 % from what theirs holds (1.2 % seen; theirs is 1.0 % off)."""
    optimi = pytest.importorskip("optimi")
    count, steps, options = 4096, 300, {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 1e-8}
    start = weights(count)
    wide = start.float().requires_grad_()
    theirs, ours, plain = (start.clone().requires_grad_() for _ in range(3))
    torchs = torch.optim.AdamW([wide], weight_decay=0.0, **options)
    torchs_low = torch.optim.AdamW([plain], weight_decay=0.0, **options)
    kahan = optimi.AdamW([theirs], weight_decay=0.0, kahan_sum=True, foreach=False, **options)
    optimizer = make({"w": ours}, "compensated", **options)
    for step in range(steps):
        gradient = gradients(count, step)
        wide.grad = gradient.float()
        theirs.grad, ours.grad, plain.grad = gradient.clone(), gradient.clone(), gradient.clone()
        for one in (torchs, kahan, optimizer, torchs_low):
            one.step()
    way = (wide.detach() - start.float()).double()

    def apart(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).norm() / way.norm())

    right, our_place, their_place = wide.detach().double(), held(optimizer, ours), held(kahan, theirs, "kahan_comp")
    assert apart(plain.detach().double(), right) > 0.3  # the same without compensation
    assert apart(our_place, right) < 0.01
    assert apart(our_place, their_place) < 0.02
    # The weights themselves are the nearest bf16 numbers to what is held.
    assert bool(((our_place - ours.detach().double()).abs() <= ulp(our_place) * 0.5 * (1 + 2**-7)).all())


def test_stochastic_follows_fp32_on_average() -> None:
    """50 steps of 32,768 weights: the mean difference to fp32 is as small as its own standard error says."""
    count, steps, options = 1 << 15, 50, {"lr": 2e-5}
    start = weights(count)
    wide, ours = start.float().requires_grad_(), start.clone().requires_grad_()
    torchs, optimizer = (
        torch.optim.AdamW([wide], weight_decay=0.0, **options),
        make({"w": ours}, "stochastic", **options),
    )
    for step in range(steps):
        gradient = gradients(count, step)
        wide.grad, ours.grad = gradient.float(), gradient
        torchs.step()
        optimizer.step()
    way = (wide.detach() - start.float()).double()
    gap = ours.detach().double() - wide.detach().double()
    along = gap * way.sign()  # a way that is too short, or too long, would not cancel here
    for error in (gap, along):
        assert abs(float(error.mean())) < 5 * float(error.std()) / math.sqrt(count)
    assert float(error.std()) / math.sqrt(count) < 0.02 * float(way.abs().mean())  # the test sees 10 % of the way
    for name in ("exp_avg", "exp_avg_sq"):
        moment, right = optimizer.state[ours][name].double(), torchs.state[wide][name].double()
        relative = (moment - right) / right.abs().mean()
        assert abs(float(relative.mean())) < 5 * float(relative.std()) / math.sqrt(count)


def test_a_vector_of_ones() -> None:
    """200 steps of 1e-3 with a constant gradient: fp32 goes to 0.8, bf16 stays at 1."""

    def run(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
        for _ in range(200):
            parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
        return float(held(optimizer, parameter).mean())

    wide, plain, stochastic, compensated = (
        torch.ones(4096, dtype=dtype, requires_grad=True) for dtype in (torch.float32, BF16, BF16, BF16)
    )
    assert run(wide, torch.optim.AdamW([wide], lr=1e-3, weight_decay=0.0)) == pytest.approx(0.8, rel=1e-4)
    assert run(plain, torch.optim.AdamW([plain], lr=1e-3, weight_decay=0.0)) == 1.0
    assert run(stochastic, make({"w": stochastic}, "stochastic")) == pytest.approx(0.8, rel=0.01)
    assert run(compensated, make({"w": compensated}, "compensated")) == pytest.approx(0.8, rel=0.01)


STUCK = pytest.mark.xfail(reason="rounded to nearest, a bf16 moment does not shrink by a factor of 0.999")


@pytest.mark.parametrize("rounding", ["stochastic", pytest.param("compensated", marks=STUCK)])
def test_second_moments_follow_gradients_that_shrink(rounding: str) -> None:
    """After 100 steps with gradients of 1 and 900 with gradients of 0.03, the second moment is 0.04, not 0.1."""
    parameter = weights(1024).requires_grad_()
    optimizer = make({"w": parameter}, rounding, lr=1e-5)
    right = 0.0
    for step in range(1000):
        size = 1.0 if step < 100 else 0.03
        parameter.grad = torch.full_like(parameter, size)
        right = 0.999 * right + 0.001 * float(parameter.grad[0]) ** 2
        optimizer.step()
    assert float(optimizer.state[parameter]["exp_avg_sq"].double().mean()) == pytest.approx(right, rel=0.02)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_decay_reaches_its_group_alone(rounding: str) -> None:
    """Without gradients, weights of a decayed group shrink by (1 - lr * decay) a step; the others stay."""
    decayed, others = (torch.full((1 << 14,), 0.75, dtype=BF16, requires_grad=True) for _ in range(2))
    groups = [{"params": [decayed], "weight_decay": 0.5}, {"params": [others], "weight_decay": 0.0}]
    optimizer = LowPrecisionAdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, rounding=rounding, seed=0)
    for name, tensor in (("decayed", decayed), ("others", others)):
        optimizer.describe(tensor, [Piece(name=name, start=0, offset=0, numel=tensor.numel())])
    for _ in range(100):
        decayed.grad, others.grad = torch.zeros_like(decayed), torch.zeros_like(others)
        optimizer.step()
    lost = 1 - float(held(optimizer, decayed).mean()) / 0.75
    assert lost == pytest.approx(1 - (1 - 5e-4) ** 100, rel=0.05 if rounding == "stochastic" else 0.01)
    assert bool((others == 0.75).all())


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_parameters_without_gradient_stay(rounding: str) -> None:
    one, other = weights(100).requires_grad_(), weights(100, seed=1).requires_grad_()
    before = other.detach().clone()
    optimizer = make({"one": one, "other": other}, rounding)
    one.grad = gradients(100, 0)
    optimizer.step()
    assert torch.equal(other, before)
    assert int(optimizer.state[other]["step"]) == 0


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_pieces_of_one_tensor_are_tensors_of_their_own(rounding: str, decay: float) -> None:
    """Three parameters in one flat tensor, one of them cut in two, with gaps and padding around: the same bits as each
    in a tensor of its own, and nothing outside of them changes."""
    sizes = {"a": 70_000, "b": 5, "c": 131_072}
    names = list(sizes)
    whole = {name: weights(size, seed=index).requires_grad_() for index, (name, size) in enumerate(sizes.items())}
    layout = [  # name, start in the parameter, place in the flat tensor, elements
        ("c", 65_000, 3, 66_072),
        ("a", 0, 66_080, 70_000),
        ("b", 0, 136_080, 5),
        ("b", 5, 136_085, 0),
        ("c", 0, 140_000, 65_000),
    ]
    flat = weights(205_011, seed=9)
    for name, start, offset, numel in layout:
        flat[offset : offset + numel] = whole[name].detach()[start : start + numel]
    before = flat.clone()
    flat.requires_grad_()
    separate = make(whole, rounding, decay=decay, lr=1e-2)
    together = LowPrecisionAdamW(
        [{"params": [flat], "weight_decay": decay}],
        lr=1e-2, betas=(0.9, 0.999), eps=1e-8, rounding=rounding, seed=0,
    )  # fmt: skip
    together.describe(flat, [Piece(name=n, start=s, offset=o, numel=k) for n, s, o, k in layout])
    inside = torch.zeros(flat.numel(), dtype=torch.bool)
    for step in range(3):
        for index, name in enumerate(names):
            whole[name].grad = gradients(sizes[name], 10 * step + index)
        flat.grad = gradients(flat.numel(), 500 + step)
        for name, start, offset, numel in layout:
            grad = whole[name].grad
            assert grad is not None
            flat.grad[offset : offset + numel] = grad[start : start + numel]
            inside[offset : offset + numel] = True
        separate.step()
        together.step()
    for name, start, offset, numel in layout:
        mine, other = slice(offset, offset + numel), slice(start, start + numel)
        assert torch.equal(flat[mine], whole[name][other]), name
        for key in together.state[flat].keys() - {"step"}:
            assert torch.equal(together.state[flat][key][mine], separate.state[whole[name]][key][other]), (name, key)
    assert torch.equal(flat[~inside], before[~inside])
    assert not bool(together.state[flat]["exp_avg"][~inside].any())
    assert not torch.equal(flat[inside], before[inside])


def test_stochastic_depends_on_seed_and_name_and_nothing_else() -> None:
    def run(name: str, seed: int) -> torch.Tensor:
        parameter = weights(5000).requires_grad_()
        optimizer = make({name: parameter}, "stochastic", seed=seed)
        for step in range(2):
            parameter.grad = gradients(5000, step)
            torch.manual_seed(step)  # the global generator has no say
            torch.rand(3)
            optimizer.step()
        return parameter.detach()

    assert torch.equal(run("w", 0), run("w", 0))
    assert not torch.equal(run("w", 0), run("w", 1))
    assert not torch.equal(run("w", 0), run("v", 0))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_state_that_is_saved_goes_on_in_equal_bits(rounding: str) -> None:
    def steps(parameter: torch.Tensor, optimizer: LowPrecisionAdamW, which: range) -> None:
        for step in which:
            parameter.grad = gradients(5000, step)
            optimizer.step()

    through = weights(5000).requires_grad_()
    optimizer = make({"w": through}, rounding)
    steps(through, optimizer, range(3))
    saved, kept = optimizer.state_dict(), through.detach().clone()
    saved = {**saved, "state": {k: {n: t.clone() for n, t in s.items()} for k, s in saved["state"].items()}}
    steps(through, optimizer, range(3, 6))
    resumed = kept.requires_grad_()
    second = make({"w": resumed}, rounding)
    second.load_state_dict(saved)
    steps(resumed, second, range(3, 6))
    assert torch.equal(through, resumed)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_bytes_per_parameter(rounding: str) -> None:
    """8 with the gradient, 10 with the compensation; the step counter is one number."""
    parameter = weights(1000).requires_grad_()
    optimizer = make({"w": parameter}, rounding)
    parameter.grad = gradients(1000, 0)
    optimizer.step()
    state = [t for key, t in optimizer.state[parameter].items() if key != "step"]
    held_bytes = sum(t.numel() * t.itemsize for t in [parameter, parameter.grad, *state])
    assert held_bytes == {"stochastic": 8, "compensated": 10}[rounding] * 1000
    assert optimizer.state[parameter]["step"].numel() == 1


def test_a_rounding_it_does_not_know() -> None:
    with pytest.raises(KeyError):
        make({"w": weights(4).requires_grad_()}, "nearest")
