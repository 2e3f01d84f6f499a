"""Masters of two runs, compared tensor by tensor and in slices: never is a whole model in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.compare.pairs import WeightGap
from samestep.errors import OutputError

if TYPE_CHECKING:
    import torch

# Elements compared at once; bounds the memory of the fp64 difference to some 100 MB.
_SLICE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class _TensorGap:
    """`largest` is None when shapes differ or a difference is not finite; `relative` is |a - b| / |a|, of lengths."""

    equal: bool
    largest: float | None
    relative: float | None


def compare_weights(a: Path, b: Path) -> WeightGap:
    """The gap between two safetensors files of masters. Raises OutputError when one cannot be read.

    Tensors of one name are equal when dtype, shape and all bits are; gaps are taken in fp64.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(a, framework="pt") as a_file, safe_open(b, framework="pt") as b_file:
            a_names, b_names = set(a_file.keys()), set(b_file.keys())
            gaps = {name: _gap(a_file.get_tensor(name), b_file.get_tensor(name)) for name in sorted(a_names & b_names)}
    except (OSError, SafetensorError) as error:
        raise OutputError(f"the masters cannot be compared: {error}.", where=f"{a}, {b}") from error
    alone = sorted(a_names ^ b_names)
    unmatched = alone + [name for name, gap in gaps.items() if gap.largest is None]
    differing = sorted([*alone, *(name for name, gap in gaps.items() if not gap.equal)], key=_natural)
    counts = {"first": differing[0] if differing else None, "differing": len(differing), "tensors": len(gaps)}
    if unmatched or not gaps:
        return WeightGap(equal_bits=False, largest=None, tensor=unmatched[0] if unmatched else None, **counts)
    name = max(gaps, key=lambda name: gaps[name].largest or 0.0)
    relative = {name: gap.relative for name, gap in gaps.items() if gap.relative is not None}
    worst = max(relative, key=lambda name: relative[name]) if relative else None
    largest = gaps[name].largest
    return WeightGap(
        equal_bits=not differing,
        largest=largest,
        tensor=name if largest else None,
        relative=relative[worst] if worst else None,
        relative_in=worst if worst and relative[worst] else None,
        **counts,
    )


def digest_gap(a: str | None, b: str | None) -> WeightGap | None:
    """What the digests of all masters say where the masters are gone: equal bits or not, but no size of a gap."""
    if a is None or b is None:
        return None
    return WeightGap(equal_bits=a == b, largest=0.0 if a == b else None, tensor=None)


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _gap(a: torch.Tensor, b: torch.Tensor) -> _TensorGap:
    import math

    import torch

    if a.shape != b.shape:
        return _TensorGap(equal=False, largest=None, relative=None)
    equal, largest, squares, norm = a.dtype == b.dtype, 0.0, 0.0, 0.0
    for one, other in zip(a.flatten().split(_SLICE), b.flatten().split(_SLICE), strict=True):
        norm += one.double().square().sum().item()
        if one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            continue
        equal = False
        if not one.numel():
            continue
        gap = one.double() - other.double()
        furthest = gap.abs().max().item()
        if not math.isfinite(furthest):
            return _TensorGap(equal=False, largest=None, relative=None)
        largest = max(largest, furthest)
        squares += gap.square().sum().item()
    relative = math.sqrt(squares / norm) if norm and math.isfinite(norm) else None
    return _TensorGap(equal=equal, largest=largest, relative=relative)
