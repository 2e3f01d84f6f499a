"""The likely cause of a difference, from where it first shows and from the precision of both runs. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from samestep.compare.fields import FieldDifference
from samestep.compare.pairs import Pair

Stage = Literal["none", "forward", "gradient", "update", "unrecorded", "weights", "length", "unknown"]

_LOW = ("bfloat16", "float16")
# A share of lost updates below this is not worth naming as a cause.
_WORTH_NAMING = 0.01
# Roles in the order in which a step uses them.
_ROLES = ("compute", "gradient", "reduce", "master", "moments")
_STAGES: dict[Stage, str] = {
    "forward": "the very first loss differs: the loaded weights, the data or the forward pass",
    "gradient": "the losses are still equal when the gradient norm differs: the backward pass, accumulation or the "
    "reduction between ranks",
    "update": "everything before the first update is equal: the optimizer or the rounding of its updates",
    "unrecorded": "not every loss and gradient norm before it is there: any part of a step",
    "weights": "every loss and gradient norm is equal: the last update alone",
    "length": "one of them has fewer steps",
    "unknown": "nothing that was recorded differs; the weights are not there to compare",
}


def stage(pair: Pair) -> Stage:
    """The part of a step in which the runs part."""
    first = pair.first_difference
    if first is None:
        return "none" if pair.bit_equal else "unknown"
    if pair.ends_early:
        return "length"
    if first.quantity == "weights":
        return "weights"
    if first.quantity == "grad_norm" and pair.all_before:
        return "gradient"
    if first.step == 1:
        return "forward"
    return "update" if pair.all_before else "unrecorded"


def cause(
    pair: Pair,
    a: Mapping[str, Any] | None,
    b: Mapping[str, Any] | None,
    work: Sequence[FieldDifference] = (),
) -> str | None:
    """One sentence without a stop on why a pair differs; None when it does not.

    `a` and `b` are the variants' facts (see `facts_of`), None where nothing is known of them.
    """
    found = stage(pair)
    if found == "none":
        return None
    if work:
        listed = "; ".join(str(difference) for difference in work[:3])
        return f"they did not do the same work: {listed}"
    reasons = [reason for name, facts in ((pair.a, a), (pair.b, b)) if facts and (reason := _losing(name, facts))]
    if len(reasons) == 1:
        return reasons[0]
    if a and b and (dtypes := _other_dtypes(pair.a, a, pair.b, b)):
        return f"{dtypes} ({_STAGES[found]})"
    return _STAGES[found]


def facts_of(precision: Mapping[str, Any] | None, lost_share: float | None) -> dict[str, Any] | None:
    """What `cause` needs of a run's precision.json: dtypes by role, observed where they were, the forecast share of
    lost updates and the measured one. None without precision.json."""
    if not precision:
        return None
    planned = {role: entry["dtype"] for role, entry in precision["plan"]["roles"].items()}
    seen = {role: dtypes for role, dtypes in (precision.get("facts") or {}).items() if role in planned and dtypes}
    forecast = precision.get("forecast")
    return {
        "dtypes": {**planned, **seen},
        "observed": bool(precision.get("facts")),
        "forecast_lost_share": forecast.get("lost_share") if forecast else None,
        "measured_lost_share": lost_share,
    }


def _losing(name: str, facts: Mapping[str, Any]) -> str | None:
    """That this run's optimizer loses updates, with the shares."""
    master = facts["dtypes"].get("master", [])
    if not any(dtype in _LOW for dtype in master):
        return None
    shares = {
        "forecast": facts["forecast_lost_share"],
        "measured": facts["measured_lost_share"],
    }
    said = [f"{word} {share:.0%} of updates lost" for word, share in shares.items() if share is not None]
    if not any(share is not None and share >= _WORTH_NAMING for share in shares.values()):
        return None
    return f"{name}'s optimizer works in {' and '.join(master)}: {', '.join(said)}"


def _other_dtypes(a: str, a_facts: Mapping[str, Any], b: str, b_facts: Mapping[str, Any]) -> str | None:
    one, other = a_facts["dtypes"], b_facts["dtypes"]
    parts = [
        f"{role} is {' and '.join(one[role])} in {a} and {' and '.join(other[role])} in {b}"
        for role in _ROLES
        if one.get(role) and other.get(role) and one[role] != other[role]
    ]
    return "; ".join(parts) or None
