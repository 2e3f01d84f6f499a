"""The nearest known name for one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Short names of dtypes that are too far from the long ones for a text distance.
_DTYPE_NAMES = {
    "fp32": "float32",
    "f32": "float32",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The one name among `known` that somebody who wrote `name` most likely meant, or None.

    `cutoff`, from 0 to 1, is how alike they must be.
    """
    names = sorted(known)
    meant = _DTYPE_NAMES.get(name.lower())
    if meant in names:
        return meant
    for candidate in names:
        if candidate.lower() == name.lower().replace("-", "_"):
            return candidate
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=cutoff)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message that names the nearest known name (" - did you mean X?"); empty when none is near."""
    meant = nearest(name, known)
    return f" - did you mean {meant}?" if meant else ""
