"""AdamW on bf16 weights and moments that loses no update: it rounds stochastically, or carries rounding errors along.

All arithmetic is in fp32, on small chunks; only what is stored is bf16. Bytes per parameter: 8 with its gradient
(stochastic), 10 (compensated).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samestep.rounding import stochastic_to_bfloat16, stream

_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of a named parameter inside a tensor that the optimizer holds.

    Elements [offset, offset + numel) of the flattened tensor are elements [start, start + numel) of the parameter.
    """

    name: str
    start: int
    offset: int
    numel: int


class LowPrecisionAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's update for bf16 parameters, with a rounding that keeps small updates.

    stochastic: weight and moments are rounded up or down so that the expectation is exact.
    compensated: what rounding took from the weight is kept in a bf16 `compensation` and added to the next update
    (Kahan). Moments are rounded to nearest then.

    Call `describe` for every parameter before the first step: the random numbers depend on names and places.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        rounding: str,
        seed: int,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._stochastic = {"stochastic": True, "compensated": False}[rounding]
        self._seed = seed
        self._pieces: dict[torch.Tensor, Sequence[Piece]] = {}

    def describe(self, parameter: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Says which named parameters a tensor of the optimizer holds. What lies outside of them stays as it is."""
        self._pieces[parameter] = tuple(piece for piece in pieces if piece.numel)
        names = ["exp_avg", "exp_avg_sq"] + ([] if self._stochastic else ["compensation"])
        zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in names}
        self.state[parameter] = {"step": torch.tensor(0.0), **zeros}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        """One update of every parameter that has a gradient. Takes no closure."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        flat = {name: tensor.view(-1) for name, tensor in state.items() if name != "step"}
        flat |= {"weight": parameter.detach().view(-1), "gradient": gradient.view(-1)}
        step = int(state["step"])
        for piece in self._pieces[parameter]:
            for begin in range(0, piece.numel, _CHUNK):
                low, high = piece.offset + begin, piece.offset + min(piece.numel, begin + _CHUNK)
                chunk = {name: tensor[low:high] for name, tensor in flat.items()}
                self._update_chunk(chunk, piece.name, piece.start + begin, step, group)

    def _update_chunk(
        self, chunk: dict[str, torch.Tensor], name: str, start: int, step: int, group: dict[str, Any]
    ) -> None:
        """torch's AdamW formula in fp32 on equally long 1-D chunks, then the rounding."""
        beta1, beta2 = group["betas"]
        gradient = chunk["gradient"].float()
        exp_avg = chunk["exp_avg"].float().lerp_(gradient, 1 - beta1)
        exp_avg_sq = chunk["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        weight = chunk["weight"].float()
        update = exp_avg.div(denominator).mul_(-group["lr"] / (1 - beta1**step))
        if group["weight_decay"]:
            update.add_(weight, alpha=-group["lr"] * group["weight_decay"])
        if self._stochastic:
            for purpose, value in (("weight", weight.add_(update)), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
                random = stream(self._seed, step, name, purpose)
                stochastic_to_bfloat16(value, random, start=start, out=chunk[purpose])
            return
        chunk["exp_avg"].copy_(exp_avg)
        chunk["exp_avg_sq"].copy_(exp_avg_sq)
        wanted = update.add_(chunk["compensation"]).add_(weight)
        chunk["weight"].copy_(wanted)
        chunk["compensation"].copy_(wanted.sub_(chunk["weight"]))
