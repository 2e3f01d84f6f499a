"""Drift between two arms of a comparison, with a confidence interval over seeds. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with a two-sided confidence interval; `low` and `high` are None for a single value."""

    mean: float
    low: float | None
    high: float | None
    values: int

    def described(self) -> dict[str, Any]:
        """The object in compare.json."""
        return {**asdict(self), "confidence": CONFIDENCE}


def mean_gap(a_steps: Sequence[dict[str, Any]], b_steps: Sequence[dict[str, Any]]) -> float | None:
    """Mean of (loss of b - loss of a) over the common steps at which both are finite; None when there is none."""
    pairs = [(a["loss"], b["loss"]) for a, b in zip(a_steps, b_steps, strict=False)]
    gaps = [b - a for a, b in pairs if a is not None and b is not None]
    return math.fsum(gaps) / len(gaps) if gaps else None


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Student's interval for the mean of independent values: mean +- t * s / sqrt(n).

    s is the standard deviation with n - 1 in its denominator and t the (1 + confidence) / 2 quantile of Student's
    distribution with n - 1 degrees of freedom (NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.5.2).
    It takes the values to be about normally distributed. ValueError without values.
    """
    n = len(values)
    if not n:
        raise ValueError("an interval needs values")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean=mean, low=None, high=None, values=1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = t_quantile((1 + confidence) / 2, n - 1) * deviation / math.sqrt(n)
    return Interval(mean=mean, low=mean - half, high=mean + half, values=n)


def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's distribution with a whole number of degrees of freedom, by bisection of `t_cdf`."""
    if not 0.5 <= probability < 1 or freedom < 1:
        raise ValueError("needs 0.5 <= probability < 1 and at least one degree of freedom")
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return high


def t_cdf(t: float, freedom: int) -> float:
    """P(T <= t) for Student's T, by its finite series in theta = atan(t / sqrt(freedom)) (Abramowitz and Stegun,
    Handbook of Mathematical Functions, 26.7.3 for odd and 26.7.4 for even degrees of freedom)."""
    theta = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term, total = (cosine, cosine if freedom > 1 else 0.0) if odd else (1.0, 1.0)
    for k in range(2 + odd, freedom, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inside = 2 / math.pi * (theta + sine * total) if odd else sine * total
    return (1 + inside) / 2
