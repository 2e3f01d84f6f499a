"""Jobs on models whose parameters have several dtypes in one shard unit, and the same steps in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from samestep import world
from samestep.checkpoint.gather import gather_masters
from samestep.engines import build
from samestep.recipe.schema import Recipe

BF16 = torch.bfloat16
SIZE, STEPS, LR = 16, 3, 1e-2


class Packed(nn.Parameter):
    """A stand-in for quantised weights: whole numbers from 0 to 255 that mean (n - 128) * scale."""

    scale: float


def packed(values: torch.Tensor, scale: float) -> Packed:
    made = torch.Tensor._make_subclass(Packed, values, False)
    made.scale = scale
    return made


class QuantisedLinear(nn.Module):
    """Dequantises its weight on every call, by the scale that it keeps as an attribute of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = packed(torch.randint(0, 256, (SIZE, SIZE), dtype=torch.uint8), scale=1 / 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ ((self.weight.float() - 128) * self.weight.scale).to(x.dtype).T


def norms_in_fp32() -> nn.Module:
    """bf16 linear layers around an fp32 norm, everything trainable."""
    return nn.Sequential(nn.Linear(SIZE, SIZE).to(BF16), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE).to(BF16))


def head_in_bf16() -> nn.Module:
    """An fp32 model with a bf16 head."""
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE).to(BF16))


def frozen_base() -> nn.Module:
    """A frozen base of both dtypes, and fp32 adapters."""
    model = nn.Sequential(nn.Linear(SIZE, SIZE).to(BF16), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    return model


def quantised_base() -> nn.Module:
    """Quantised weights between trainable layers of two dtypes."""
    return nn.Sequential(nn.Linear(SIZE, SIZE).to(BF16), QuantisedLinear(), nn.Linear(SIZE, SIZE))


MODELS = {f.__name__: f for f in (norms_in_fp32, head_in_bf16, frozen_base, quantised_base)}


def make(kind: str) -> nn.Module:
    torch.manual_seed(3)
    model = MODELS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, SIZE, generator=random)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().sum() / 64


def trained(recipe: dict[str, Any], kind: str) -> dict[str, Any]:
    """A job: masters after a few steps (rank 0), and how each parameter is held."""
    checked, here, model = Recipe.model_validate(recipe), world.start(timeout_seconds=60), make(kind)
    plan = build.resolve_plan(checked, model)
    engine = build.build(checked, model, plan, here)
    try:
        for step in range(STEPS):
            for turn in engine.turns(1):
                engine.backward(loss_of(engine.model(batch(step, turn.rank).to(plan.compute))), turn, 1)
            engine.apply(LR)
        shards = {s.name: s.values.dtype for s in engine.masters()}
        return {
            "masters": {name: whole for name, whole in gather_masters(engine, here) if whole is not None},
            "held": {n: shards.get(n, p.dtype) for n, p in engine.module.named_parameters()},
            "planned": {p.name: p.held for p in plan.parameters},
            "bytes": {n: (p.to_local() if hasattr(p, "to_local") else p).nbytes for n, p in model.named_parameters()},
            "types": {n: type(p).__name__ for n, p in model.named_parameters()},
        }
    finally:
        engine.close()


def reference(kind: str, compute: torch.dtype) -> dict[str, torch.Tensor]:
    """The same steps on two ranks' batches in plain torch: fp32 masters, a copy of everything in the compute dtype."""
    model = make(kind)
    masters = {n: p.detach().float().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(masters.values(), lr=LR, betas=(0.9, 0.999), weight_decay=0.0)
    for step in range(STEPS):
        gradients = []
        for rank in range(2):
            copies = {n: m.detach().to(compute).requires_grad_() for n, m in masters.items()}
            others = {n: p.to(compute) if p.is_floating_point() else p for n, p in frozen.items()}
            loss = loss_of(functional_call(model, copies | others, (batch(step, rank).to(compute),)))
            gradients.append(torch.autograd.grad(loss, list(copies.values())))
        for master, one, other in zip(masters.values(), *gradients, strict=True):
            master.grad = one.float() + other.float()
        optimizer.step()
    return {name: master.detach() for name, master in masters.items()}
