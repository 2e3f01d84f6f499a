"""Two checkpoints compared by value, whatever engine and number of ranks wrote them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from samestep.checkpoint.manifest import StoredTensor, read_manifest
from samestep.checkpoint.tensors import whole_tensors


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor that is not the same in both. `what` says how; `gap` is the largest absolute difference of values,
    `elements` how many differ; both None where shapes or dtypes already do."""

    name: str
    what: str
    gap: float | None = None
    elements: int | None = None


def differences(one: Path, other: Path) -> list[Difference]:
    """Every tensor that is not bit-equal in two checkpoint folders, by name. Raises CheckpointError."""
    a, b = read_manifest(one).tensors, read_manifest(other).tensors
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
            found.append(Difference(name=name, what="other values", gap=gap, elements=int(differing)))
    return sorted(found, key=lambda difference: difference.name)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _text(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {tensor.shape}"
