"""Two checkpoints compared by value, whatever engine and number of ranks wrote them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from samestep.checkpoint.manifest import StoredTensor, intact_manifest
from samestep.checkpoint.tensors import whole_tensors


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor that is not the same in both. `what` says how; `elements` is how many differ, None where shapes or
    dtypes already do; `gap` the largest absolute difference of values, None also where it is not finite."""

    name: str
    what: str
    gap: float | None = None
    elements: int | None = None


def differences(one: Path, other: Path) -> list[Difference]:
    """Every tensor that is not bit-equal in two checkpoint folders, by name. Raises CheckpointError, also for
    files that are not as they were written."""
    a, b = (intact_manifest(folder).tensors for folder in (one, other))
    found = [Difference(name=name, what="only in the first") for name in sorted(a.keys() - b.keys())]
    found += [Difference(name=name, what="only in the second") for name in sorted(b.keys() - a.keys())]
    both = sorted(a.keys() & b.keys())
    found += [
        Difference(name=name, what=f"{_text(a[name])} and {_text(b[name])}") for name in both if a[name] != b[name]
    ]
    alike = {name: a[name] for name in both if a[name] == b[name]}
    pairs = zip(whole_tensors(one, alike), whole_tensors(other, alike), strict=True)
    for (name, x), (_, y) in pairs:
        differing = (x.view(_BITS[x.itemsize]) != y.view(_BITS[y.itemsize])).sum().item()
        if differing:
            gap = float((x.double() - y.double()).abs().max())
            finite = gap if math.isfinite(gap) else None
            found.append(Difference(name=name, what="other values", gap=finite, elements=int(differing)))
    return sorted(found, key=lambda difference: difference.name)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _text(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {tensor.shape}"
