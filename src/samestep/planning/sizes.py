"""Sizes of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str) -> int:
    """Bytes of "80GB" (10**9 each), "24 GiB" (2**30 each) or "1e9". Raises ValueError that says what is wrong."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 80GB or 24GiB")
    number, unit = match.groups()
    if unit.upper() not in _UNITS:
        raise ValueError(f"{unit!r} is not a unit of memory; use KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    size = float(number) * _UNITS[unit.upper()]
    if not 1 <= size < 2**63:
        raise ValueError(f"{text!r} is no memory that a device can have")
    return int(size)


def size_text(size: int) -> str:
    """Bytes for people, in powers of 1000: "14.2 GB"."""
    for unit in ("GB", "MB", "KB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:,.1f} {unit}"
    return f"{size} B"


def number_text(size: int, unit: str) -> str:
    """Bytes as a number of `unit`, three digits of it: "14.2" for 14,200,000,000 in GB."""
    number = size / _UNITS[unit]
    if 0 < number < 0.001:
        return "< 0.001"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
