"""Speeds of links and memories as people write them."""

from __future__ import annotations

import re

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BITS = 8


def parse_rate(value: str | float) -> float:
    """Bytes per second of "400Gb/s" or "400Gbps" (bits), "50GB/s" (bytes), or a number of bytes per second.

    Raises ValueError that says what is wrong.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is no speed such as 400Gb/s or 50GB/s")
    if not isinstance(value, str):
        return _checked(float(value), value)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([KMGTkmgt]?)([Bb])(?:/s|ps)\s*", value)
    if match is None:
        raise ValueError(f"{value!r} is no speed such as 400Gb/s (bits) or 50GB/s (bytes)")
    number, prefix, unit = match.groups()
    rate = float(number) * _PREFIXES[prefix.upper()] / (_BITS if unit == "b" else 1)
    return _checked(rate, value)


def rate_text(rate: float) -> str:
    """Bytes per second for people: "300 GB/s"."""
    for prefix in ("T", "G", "M", "K"):
        if rate >= _PREFIXES[prefix]:
            return f"{rate / _PREFIXES[prefix]:.4g} {prefix}B/s"
    return f"{rate:.4g} B/s"


def _checked(rate: float, value: object) -> float:
    if not 0 < rate < 1e18:
        raise ValueError(f"{value!r} is no speed that a link or a memory can have")
    return rate
