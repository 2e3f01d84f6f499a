"""The gradient norm, exactly, and clipping, once for all engines.

The norm is the correctly rounded fp32 value of the true Euclidean norm of the gradient. Being a property of the
numbers alone it cannot depend on how they are cut over ranks. It is found by summing squares in fp64 over chunks,
whose rounding error is bounded; only when that bound leaves two fp32 values possible (about one step in two
thousand) are the squares summed without any rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from samestep.engines.protocol import Replica
from samestep.world import World, gather_numbers

_CHUNK = 65_536
# A sum of n non-negative fp64 terms in any order is off by less than n * 2**-53 of itself: 2**-37 for one chunk (the
# squares of fp32 and narrower numbers are exact in fp64). Chunks and ranks are added by math.fsum, which rounds once.
_RELATIVE_ERROR = 2.0**-36
# A sum of squares of fp32 numbers spans at most the bits from 2**-298 to 2**300, which twelve fp64 numbers hold.
_MAX_TERMS = 12


def global_norm(gradients: Sequence[torch.Tensor], replica: Replica, world: World) -> float:
    """Euclidean norm over all ranks of 1-D gradients in fp32, bf16 or fp16: an fp32 value, equal on all ranks.

    Ranks that hold the same gradient (`replica`) each square a share of it. Not finite when any element is not.
    """
    mine = _share(gradients, replica)
    total = math.fsum(row[0] for row in gather_numbers([_sum_of_squares(mine)], world))
    if not math.isfinite(total):
        return math.inf if total == math.inf else math.nan
    low, high = (_float32(math.sqrt(total * (1 + sign * _RELATIVE_ERROR))) for sign in (-1, 1))
    if low == high:
        return low
    terms = gather_numbers(_exact_terms(mine), world)
    return _float32(math.sqrt(math.fsum(term for row in terms for term in row)))


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The fp32 factor that brings a gradient of this norm to max_norm; 1.0 when nothing is to be done.

    The formula is torch.nn.utils.clip_grad_norm_'s: max_norm / (norm + 1e-6) in fp32, at most 1.
    """
    if max_norm is None:
        return 1.0
    return min(1.0, float(max_norm / (torch.tensor(norm, dtype=torch.float32) + 1e-6)))


def scale_(gradients: Sequence[torch.Tensor], factor: float) -> None:
    """Multiplies the gradients in place, with one rounding to their own dtype."""
    if factor == 1.0:
        return
    for gradient in gradients:
        gradient.mul_(factor)  # _foreach_mul_ would round the factor itself to bf16


def _share(gradients: Sequence[torch.Tensor], replica: Replica) -> list[torch.Tensor]:
    if replica.count == 1:
        return list(gradients)
    return [gradient.tensor_split(replica.count)[replica.index] for gradient in gradients]


def _sum_of_squares(gradients: Sequence[torch.Tensor]) -> float:
    """Sum of squares in fp64, off by less than 2**-37 of itself."""
    sums: list[torch.Tensor] = []
    if not gradients:
        return 0.0
    buffer = torch.empty(_CHUNK, dtype=torch.float64, device=gradients[0].device)
    for gradient in gradients:
        for chunk in gradient.detach().split(_CHUNK):
            wide = buffer[: chunk.numel()].copy_(chunk)
            sums.append(torch.dot(wide, wide))
    return math.fsum(torch.stack(sums).tolist()) if sums else 0.0


def _exact_terms(gradients: Sequence[torch.Tensor]) -> list[float]:
    """Numbers whose sum is exactly the sum of squares, padded with zeros to `_MAX_TERMS`."""
    sums: list[float] = []
    for gradient in gradients:
        for chunk in gradient.detach().split(_CHUNK):
            rest = chunk.double().square_()
            while rest.numel() and (largest := float(rest.abs().max())) > 0.0:
                # Adding and taking away 1.5 * 2**(e + 27) rounds to multiples of 2**(e - 25), where 2**e bounds the
                # numbers: each is at most 2**25 such multiples, so that 2**16 of them add up without rounding.
                grid = math.ldexp(1.5, math.frexp(largest)[1] + 27)
                digits = (rest + grid) - grid
                sums.append(float(digits.sum()))
                rest -= digits
    terms: list[float] = []
    while (term := math.fsum([*sums, *(-known for known in terms)])) != 0.0:
        terms.append(term)
    return terms + [0.0] * (_MAX_TERMS - len(terms))


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()
