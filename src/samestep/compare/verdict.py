"""Which pairs must agree, how closely, and one sentence on what was seen. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from samestep.compare.pairs import Difference, Pair
from samestep.recipe import Recipe

# Kernels and collectives of accelerators may add in another order from run to run, and low-precision compute magnifies
# that from step to step.
_ACCELERATOR_TOLERANCE = 0.01

Relation = Literal["bit-equal", "equal where recorded", "within bound", "diverging"]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How far two engines may be apart under one regime. 0 asks for equal bits of losses, gradient norms and weights;
    otherwise the relative gap of the losses counts, at every step."""

    max_relative_loss_gap: float
    because: str

    def holds(self, pair: Pair) -> bool:
        if self.max_relative_loss_gap == 0:
            return pair.bit_equal
        gap = pair.max_relative_loss_gap
        return gap is not None and gap <= self.max_relative_loss_gap and not pair.unequal_length


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A pair with whether it must agree and, then, whether it does."""

    pair: Pair
    must_agree: bool
    within_bound: bool | None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the sentence says of a variant besides its pairs."""

    name: str
    last_loss: float | None
    lost_update_share: float | None


def bound_for(recipes: Sequence[Recipe], devices: Sequence[str]) -> Bound:
    """The bound on runs of these recipes on these kinds of devices."""
    others = sorted(set(devices) - {"cpu"})
    if others:
        return Bound(
            max_relative_loss_gap=_ACCELERATOR_TOLERANCE,
            because=f"kernels on {', '.join(others)} may add in another order from run to run",
        )
    if any(recipe.engine.reduce_order == "backend" for recipe in recipes):
        return Bound(
            max_relative_loss_gap=_ACCELERATOR_TOLERANCE,
            because="engine.reduce_order: backend lets every engine sum its ranks in an order of its own",
        )
    return Bound(max_relative_loss_gap=0.0, because="on the CPU all engines compute the same bits")


def relation(judged: Judged, bound: Bound) -> Relation:
    """How a pair stands to each other. Pairs that need not agree, and so have no bound, are held to the tolerance for
    runs whose sums are in another order: 0.01 of the loss."""
    pair = judged.pair
    if pair.bit_equal:
        return "bit-equal"
    if pair.first_difference is None:
        return "equal where recorded"
    limit = bound if judged.must_agree else Bound(max_relative_loss_gap=_ACCELERATOR_TOLERANCE, because="")
    return "within bound" if limit.holds(pair) else "diverging"


def judge(pair: Pair, bound: Bound, *, must_agree: bool) -> Judged:
    """Holds a pair to the bound when it must agree."""
    return Judged(pair=pair, must_agree=must_agree, within_bound=bound.holds(pair) if must_agree else None)


def is_ok(judged: Sequence[Judged]) -> bool:
    """Whether every pair that must agree does."""
    return all(j.within_bound for j in judged if j.must_agree)


def sentence(
    judged: Sequence[Judged],
    subjects: Sequence[Subject],
    bound: Bound,
    *,
    nothing_held: str = "no two variants had to agree",
) -> str:
    """What was seen, in one sentence: who agrees, who does not, and what other regimes did."""
    groups = _groups(judged, [s.name for s in subjects])
    parts = [_agreement(members, judged, bound) for members in groups if len(members) > 1]
    if not parts:
        parts.append(nothing_held)
    by_name = {s.name: s for s in subjects}
    first = groups[0][0]
    parts += [_other_regime(by_name[g[0]], by_name[first], _find(judged, first, g[0])) for g in groups[1:]]
    return "; ".join(parts) + "."


def _groups(judged: Sequence[Judged], names: Sequence[str]) -> list[list[str]]:
    """The names in sets that must agree, in the given order."""
    groups: list[list[str]] = []
    for name in names:
        for group in groups:
            if _find(judged, group[0], name).must_agree:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _find(judged: Sequence[Judged], a: str, b: str) -> Judged:
    return next(j for j in judged if {j.pair.a, j.pair.b} == {a, b})


def _agreement(members: Sequence[str], judged: Sequence[Judged], bound: Bound) -> str:
    inside = [j for j in judged if {j.pair.a, j.pair.b} <= set(members)]
    if all(j.pair.bit_equal for j in inside):
        steps = _count(inside[0].pair.steps_compared)
        return f"{listed(members)} are bit-equal over {steps}: every loss, gradient norm and weight"
    worst = max(inside, key=lambda j: (j.within_bound is False, j.pair.max_relative_loss_gap or 0.0))
    if worst.within_bound:
        gap, limit = worst.pair.max_relative_loss_gap or 0.0, bound.max_relative_loss_gap
        return f"the losses of {listed(members)} agree within {gap:.1e}, relative (the bound is {limit:g})"
    return "; ".join(_disagreement(j.pair, bound) for j in inside if not j.within_bound)


def _disagreement(pair: Pair, bound: Bound) -> str:
    limit = "bit for bit" if bound.max_relative_loss_gap == 0 else f"within {bound.max_relative_loss_gap:g} of the loss"
    return f"{pair.b} differs from {pair.a} {where(pair)}{_gap(pair)}, but must agree {limit}"


def _gap(pair: Pair) -> str:
    """The gap of the first quantity that tells the size of a difference."""
    gaps = {
        "losses": pair.max_abs_loss_gap,
        "gradient norms": pair.max_abs_grad_norm_gap,
        "weights": pair.max_abs_weight_gap,
    }
    return next((f" (largest gap of the {name}: {gap:.2g})" for name, gap in gaps.items() if gap), "")


def _other_regime(subject: Subject, first: Subject, judged: Judged) -> str:
    if judged.pair.bit_equal:
        return f"{subject.name} is bit-equal to {first.name}"
    if judged.pair.first_difference is None:
        return f"{subject.name} is equal to {first.name} in all that was recorded (no weights to compare)"
    seen = [f"differs from {first.name} {where(judged.pair)}"]
    if subject.lost_update_share is not None and subject.lost_update_share >= 0.01:
        seen.append(f"lost {subject.lost_update_share:.0%} of its updates")
    if subject.last_loss is not None and first.last_loss is not None:
        seen.append(f"ends at loss {subject.last_loss:.4f} against {first.last_loss:.4f}")
    return f"{subject.name} {listed(seen)}"


def where(pair: Pair) -> str:
    """Where a pair first differs, in words."""
    first = pair.first_difference or Difference(step=pair.steps_compared, quantity="weights")
    if pair.ends_early:
        return f"in length: only one of them has a step {first.step}"
    if first.quantity == "weights":
        return f"in the weights after {_count(first.step)} alone"
    quantity = {"loss": "loss", "grad_norm": "gradient norm"}[first.quantity]
    return f"from step {first.step} on (first in the {quantity})"


def listed(names: Sequence[str]) -> str:
    """The names as in a sentence: a, b and c."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _count(steps: int) -> str:
    return f"{steps} step{'s' if steps != 1 else ''}"
