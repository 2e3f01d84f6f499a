"""Masters of two runs, compared tensor by tensor and in slices: never is a whole model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from samestep.compare.pairs import WeightGap
from samestep.errors import OutputError

if TYPE_CHECKING:
    import torch

# Elements compared at once; bounds the memory of the fp64 difference to some 100 MB.
_SLICE = 1 << 22


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
    unmatched = sorted(a_names ^ b_names) + [name for name, (_, gap) in gaps.items() if gap is None]
    if unmatched or not gaps:
        return WeightGap(equal_bits=False, largest=None, tensor=unmatched[0] if unmatched else None)
    name = max(gaps, key=lambda name: gaps[name][1] or 0.0)
    largest = gaps[name][1]
    return WeightGap(
        equal_bits=all(equal for equal, _ in gaps.values()), largest=largest, tensor=name if largest else None
    )


def _gap(a: torch.Tensor, b: torch.Tensor) -> tuple[bool, float | None]:
    """Whether all bits are equal, and the largest gap; None when shapes differ or a difference is not finite."""
    import math

    import torch

    if a.shape != b.shape:
        return False, None
    equal, largest = a.dtype == b.dtype, 0.0
    for one, other in zip(a.flatten().split(_SLICE), b.flatten().split(_SLICE), strict=True):
        if one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            continue
        equal = False
        if not one.numel():
            continue
        gap = (one.double() - other.double()).abs().max().item()
        if not math.isfinite(gap):
            return False, None
        largest = max(largest, gap)
    return equal, largest
