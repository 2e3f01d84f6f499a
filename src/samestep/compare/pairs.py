"""Two runs side by side, on exact values: where they first differ and by how much at most. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Quantity = Literal["loss", "grad_norm", "weights"]
# In the order in which a step produces them.
_PER_STEP: tuple[Quantity, ...] = ("loss", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first thing that differs. `step` counts from 1; weights are those after that step."""

    step: int
    quantity: Quantity


@dataclass(frozen=True, kw_only=True)
class WeightGap:
    """How two sets of masters differ. `largest` is None when a value is not finite or there is nothing to subtract;
    `tensor` names where it is, or the first tensor that only one side has or that has another shape. `first` is the
    first tensor in the order of the names that differs, `differing` and `tensors` are counts, and `relative` is the
    largest share of its own length by which a tensor is off, in the tensor `relative_in`."""

    equal_bits: bool
    largest: float | None
    tensor: str | None
    first: str | None = None
    differing: int | None = None
    tensors: int | None = None
    relative: float | None = None
    relative_in: str | None = None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two variants compared. Gaps are None where a value is not finite on one side only, or where nothing could be
    compared. A gap can be 0 without equal bits: -0.0 and 0.0, or equal values in different dtypes. `all_before`:
    both have loss and gradient norm of every step before the first difference. `ends_early`: all that both have is
    equal, and the first difference is a step that one lacks."""

    a: str
    b: str
    bit_equal: bool
    first_difference: Difference | None
    max_abs_loss_gap: float | None
    max_abs_grad_norm_gap: float | None
    max_abs_weight_gap: float | None
    max_relative_loss_gap: float | None
    max_relative_grad_norm_gap: float | None
    max_relative_weight_gap: float | None
    largest_weight_gap_in: str | None
    largest_relative_weight_gap_in: str | None
    first_weight_difference_in: str | None
    weights_differing: int | None
    weights_compared: int | None
    steps_compared: int
    all_before: bool
    unequal_length: bool
    ends_early: bool

    def described(self) -> dict[str, Any]:
        """The pair's object in compare.json."""
        return asdict(self)


def compare_pair(
    a: str,
    b: str,
    a_steps: Sequence[dict[str, Any]],
    b_steps: Sequence[dict[str, Any]],
    weights: WeightGap | None,
) -> Pair:
    """Compares two runs by their steps.jsonl objects and their weights after the last step. A quantity that a step of
    either does not have (a log without gradient norms) is not compared there.

    When one run has fewer steps, the first step that it lacks counts as a difference in the loss, and the weights,
    which then belong to different steps, are not compared. Without `weights` nothing is bit-equal.
    """
    common = min(len(a_steps), len(b_steps))
    unequal_length = len(a_steps) != len(b_steps)
    if unequal_length:
        weights = None
    first = _first_step_difference(a_steps, b_steps)
    ends_early = first is None and unequal_length
    if ends_early:
        longer = a_steps if len(a_steps) > common else b_steps
        first = Difference(step=longer[common]["step"], quantity="loss")
    if first is None and weights is not None and not weights.equal_bits:
        first = Difference(step=a_steps[-1]["step"] if common else 0, quantity="weights")
    return Pair(
        a=a,
        b=b,
        bit_equal=first is None and weights is not None,
        first_difference=first,
        max_abs_loss_gap=_largest_gap(a_steps, b_steps, "loss"),
        max_abs_grad_norm_gap=_largest_gap(a_steps, b_steps, "grad_norm"),
        max_abs_weight_gap=weights.largest if weights else None,
        max_relative_loss_gap=_largest_gap(a_steps, b_steps, "loss", relative=True),
        max_relative_grad_norm_gap=_largest_gap(a_steps, b_steps, "grad_norm", relative=True),
        max_relative_weight_gap=weights.relative if weights else None,
        largest_weight_gap_in=weights.tensor if weights else None,
        largest_relative_weight_gap_in=weights.relative_in if weights else None,
        first_weight_difference_in=weights.first if weights else None,
        weights_differing=weights.differing if weights else None,
        weights_compared=weights.tensors if weights else None,
        steps_compared=common,
        all_before=_all_before(a_steps, b_steps, first),
        unequal_length=unequal_length,
        ends_early=ends_early,
    )


def _first_step_difference(a_steps: Sequence[dict[str, Any]], b_steps: Sequence[dict[str, Any]]) -> Difference | None:
    for a, b in zip(a_steps, b_steps, strict=False):
        for quantity in _PER_STEP:
            if quantity in a and quantity in b and not _same_bits(a[quantity], b[quantity]):
                return Difference(step=a["step"], quantity=quantity)
    return None


def _all_before(a_steps: Sequence[dict[str, Any]], b_steps: Sequence[dict[str, Any]], first: Difference | None) -> bool:
    pairs = [(a, b) for a, b in zip(a_steps, b_steps, strict=False) if first is None or a["step"] < first.step]
    whole = all(quantity in step for pair in pairs for step in pair for quantity in _PER_STEP)
    return whole and (first is None or len(pairs) == first.step - 1 or first.quantity == "weights")


def _same_bits(a: float | None, b: float | None) -> bool:
    """Equal values of equal sign, or both not finite (None)."""
    if a is None or b is None:
        return a is b
    return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)


def _largest_gap(
    a_steps: Sequence[dict[str, Any]], b_steps: Sequence[dict[str, Any]], quantity: str, *, relative: bool = False
) -> float | None:
    """Largest |a - b|, or |a - b| / max(|a|, |b|), over the common steps."""
    gaps = []
    for a_step, b_step in zip(a_steps, b_steps, strict=False):
        a, b = a_step.get(quantity), b_step.get(quantity)
        if (a is None and b is None) or quantity not in a_step or quantity not in b_step:
            continue
        if a is None or b is None:
            return None
        gap = abs(a - b)
        gaps.append(gap / max(abs(a), abs(b)) if relative and gap else gap)
    return max(gaps) if gaps else None
