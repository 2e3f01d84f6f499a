"""The content of compare.json: variants, pairs, arms over seeds, and the verdict."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from samestep.compare.cause import cause, stage
from samestep.compare.fields import FieldDifference, differences, observed_differences, unequal_work
from samestep.compare.outcome import Outcome
from samestep.compare.pairs import Pair, WeightGap, compare_pair
from samestep.compare.rescale import Stretch, stretch
from samestep.compare.statistics import interval, mean_gap
from samestep.compare.variants import should_agree
from samestep.compare.verdict import Bound, Judged, Subject, bound_for, is_ok, judge, relation, sentence
from samestep.compare.weights import compare_weights, digest_gap
from samestep.errors import DataError

_NOTHING_KNOWN = "which of them had to agree is not known: a log does not say what was run"


def make_report(name: str, outcomes: Sequence[Outcome], *, tested: Sequence[str] = ()) -> dict[str, Any]:
    """Compares every two outcomes of one seed. `tested` are the recipe's fields or sections under test.

    Raises OutputError when masters cannot be read, DataError when two logs have no step in common.
    """
    recipes = [outcome.recipe for outcome in outcomes if outcome.recipe]
    bound = bound_for(recipes, [outcome.device for outcome in outcomes if outcome.device])
    judged: list[Judged] = []
    pairs: list[dict[str, Any]] = []
    for a, b in itertools.combinations(outcomes, 2):
        if a.variant.seed == b.variant.seed:
            found, described = _compared(a, b, bound, tested)
            judged.append(found)
            pairs.append(described)
    arms = _arms(outcomes)
    return {
        "name": name,
        "variants": [outcome.described() for outcome in outcomes],
        "pairs": pairs,
        "arms": arms,
        "bound": {"max_relative_loss_gap": bound.max_relative_loss_gap, "because": bound.because},
        "verdict": _verdict(outcomes, judged, pairs, arms, bound),
        "ok": is_ok(judged),
    }


def work_between(a: Outcome, b: Outcome, tested: Sequence[str]) -> list[FieldDifference]:
    """All differences between what two outcomes were asked to do and, where recorded, did."""
    found: list[FieldDifference] = []
    if a.recipe and b.recipe:
        found += differences(a.recipe.model_dump(mode="json"), b.recipe.model_dump(mode="json"), tested)
    return found + observed_differences(a.steps, b.steps, tested)


def _compared(a: Outcome, b: Outcome, bound: Bound, tested: Sequence[str]) -> tuple[Judged, dict[str, Any]]:
    a_steps, b_steps = _aligned(a, b)
    pair = compare_pair(a.name, b.name, a_steps, b_steps, _weights(a, b))
    agree = bool(a.recipe and b.recipe) and should_agree(a.recipe, b.recipe)  # type: ignore[arg-type]
    judged = judge(pair, bound, must_agree=agree)
    work = work_between(a, b, tested)
    drift = mean_gap(a_steps, b_steps)
    stretched = None if pair.bit_equal else _stretch(pair, a_steps, b_steps)
    return judged, {
        **pair.described(),
        "must_agree": judged.must_agree,
        "within_bound": judged.within_bound,
        "relation": relation(judged, bound),
        "stage": stage(pair),
        "mean_loss_gap": drift,
        "differences": [difference.described() for difference in work],
        "stretch": stretched.described() if stretched else None,
        "cause": cause(pair, a.facts, b.facts, unequal_work(work)),
    }


def _aligned(a: Outcome, b: Outcome) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps of both, side by side: as they are when one has the other's first steps, otherwise those of both."""
    a_numbers, b_numbers = [s["step"] for s in a.steps], [s["step"] for s in b.steps]
    shorter = min(len(a_numbers), len(b_numbers))
    if a_numbers[:shorter] == b_numbers[:shorter]:
        return a.steps, b.steps
    common = set(a_numbers) & set(b_numbers)
    if not common:
        raise DataError(
            f"has no step in common with {b.name}.", where=a.name, remedy="Compare logs that share some of their steps."
        )
    return [s for s in a.steps if s["step"] in common], [s for s in b.steps if s["step"] in common]


def _weights(a: Outcome, b: Outcome) -> WeightGap | None:
    if a.masters.is_file() and b.masters.is_file():
        return compare_weights(a.masters, b.masters)
    return digest_gap(a.summary.get("weights_sha256"), b.summary.get("weights_sha256"))


def _stretch(pair: Pair, a_steps: list[dict[str, Any]], b_steps: list[dict[str, Any]]) -> Stretch | None:
    return stretch(pair.a, pair.b, [s["loss"] for s in a_steps], [s["loss"] for s in b_steps])


def _arms(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Each arm but the first against the first, over the seeds that both have; nothing without several seeds."""
    by_arm: dict[str, dict[int | None, Outcome]] = {}
    for outcome in outcomes:
        by_arm.setdefault(outcome.variant.arm, {})[outcome.variant.seed] = outcome
    names = list(by_arm)
    if len({outcome.variant.seed for outcome in outcomes}) < 2:
        return []
    arms = []
    for name in names[1:]:
        shared = [seed for seed in by_arm[names[0]] if seed in by_arm[name]]
        gaps = {seed: mean_gap(by_arm[names[0]][seed].steps, by_arm[name][seed].steps) for seed in shared}
        known = {seed: gap for seed, gap in gaps.items() if gap is not None}
        if known:
            drift = interval(list(known.values())).described()
            arms.append({"a": names[0], "b": name, "seeds": list(known), "mean_loss_gap": drift})
    return arms


def _verdict(
    outcomes: Sequence[Outcome],
    judged: Sequence[Judged],
    pairs: Sequence[dict[str, Any]],
    arms: Sequence[dict[str, Any]],
    bound: Bound,
) -> str:
    """One sentence. Of several seeds, the first that is not as it must be is described, or else the first."""
    by_seed: dict[int | None, list[Outcome]] = {}
    for outcome in outcomes:
        by_seed.setdefault(outcome.variant.seed, []).append(outcome)
    said: list[tuple[bool, str]] = []
    for members in by_seed.values():
        names = {outcome.name for outcome in members}
        inside = [j for j in judged if {j.pair.a, j.pair.b} <= names]
        if not inside:
            continue
        subjects = [Subject(name=o.name, last_loss=o.last_loss, lost_update_share=o.lost_update_share) for o in members]
        known = all(outcome.recipe for outcome in members)
        text = sentence(inside, subjects, bound, **({} if known else {"nothing_held": _NOTHING_KNOWN}))
        said.append((is_ok(inside), text.removesuffix(".")))
    if not said:
        return "no two variants have one seed, so none were compared."
    parts = [next((text for ok, text in said if not ok), said[0][1])]
    parts += [drift_sentence(arm) for arm in arms]
    parts += [text for pair in pairs if pair["a"] == outcomes[0].name and (text := stretch_sentence(pair))]
    return "; ".join(parts) + "."


def drift_sentence(arm: dict[str, Any]) -> str:
    """How far an arm is from the first on average, over seeds, in words without a stop."""
    gap, seeds = arm["mean_loss_gap"], len(arm["seeds"])
    if not gap["mean"] and not gap["high"]:
        return f"over {seeds} seeds the losses of {arm['b']} are on average those of {arm['a']}"
    side = "above" if gap["mean"] > 0 else "below"
    span = "" if gap["low"] is None else f", 95 % interval {gap['low']:.4g} to {gap['high']:.4g}"
    return f"over {seeds} seeds the loss of {arm['b']} is on average {abs(gap['mean']):.4g} {side} {arm['a']}{span}"


def stretch_sentence(pair: dict[str, Any]) -> str | None:
    """That one curve is another one slowed down, in words without a stop; None where it is not."""
    found = pair["stretch"]
    if not found or not found["matches"]:
        return None
    times = f"{1 / found['speed']:.3g} times"
    return (
        f"{found['slower']} follows the curve of {found['faster']} at {found['speed']:.2g} of its speed: "
        f"a learning rate some {times} as large would bring the curves together without mending the cause"
    )
