"""Exact arithmetic to test floating point against."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import torch

_LARGEST = Fraction(float(np.finfo(np.float32).max))


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> Fraction:
    """The sum of the squares of all elements, without any rounding."""
    return sum((Fraction(x) ** 2 for tensor in tensors for x in tensor.flatten().tolist()), Fraction(0))


def float32_root(square: Fraction) -> float:
    """The fp32 number nearest to the square root, ties to even; infinity where fp32 ends."""
    guess = np.float32(min(math.sqrt(square), float(_LARGEST)))
    with np.errstate(over="ignore"):  # the number after the largest one is infinity
        near = [np.nextafter(guess, np.float32(0)), guess, np.nextafter(guess, np.float32(np.inf))]
    best = near[0]
    for candidate in near[1:]:
        above = Fraction(float(candidate)) if np.isfinite(candidate) else _LARGEST + Fraction(2) ** 104
        middle = (Fraction(float(best)) + above) / 2
        is_even = int(candidate.view(np.uint32)) % 2 == 0
        if square > middle**2 or (square == middle**2 and is_even):
            best = candidate
    return float(best)
