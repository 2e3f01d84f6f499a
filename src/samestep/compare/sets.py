"""The set of variants that the options ask for: engines x regimes x varied fields x seeds. No torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from samestep.compare.variants import Variant
from samestep.errors import SamestepError

# What has an option of its own, and a column of its own in the report.
_ELSEWHERE = {
    "engine.name": "--engines",
    "precision.regime": "--precisions",
    "train.seed": "--seeds",
    "engine": "--engines",
    "precision": "--precisions",
}
_OPENING, _CLOSING = "{[", "}]"


def varied(text: str) -> list[str]:
    """The settings "FIELD=VALUE" in "FIELD=A,B": commas inside {}, [] and quotes belong to a value.

    Raises SamestepError for anything else, for one value given twice, and for fields that have an option of their own.
    """
    field, equals, values = text.partition("=")
    field = field.strip()
    found = [value.strip() for value in _split(values)]
    if not field or not equals or not all(found):
        raise SamestepError(
            f"{text!r} is not FIELD=A,B.", where="--vary", remedy="Write, for example, train.optimizer.lr=1e-6,1e-5."
        )
    if option := _ELSEWHERE.get(field):
        raise SamestepError(f"{field} is varied with {option}.", where="--vary", remedy=f"Give {option} instead.")
    if len(set(found)) < len(found):
        raise SamestepError(f"{field} is given one value twice.", where="--vary", remedy="Remove one of them.")
    return [f"{field}={value}" for value in found]


def expand(
    pairs: Sequence[tuple[str, str]], vary: Sequence[Sequence[str]] = (), seeds: Sequence[int] = ()
) -> list[Variant]:
    """Every (engine, regime) with every choice of the varied settings, under every seed; seeds change fastest."""
    fields = [settings[0].partition("=")[0] for settings in vary]
    if doubled := next((field for field in fields if fields.count(field) > 1), None):
        raise SamestepError(f"{doubled} is varied twice.", where="--vary", remedy=f"Write --vary {doubled}=A,B once.")
    short = _short_names(fields)
    variants: list[Variant] = []
    for (engine, precision), chosen in itertools.product(pairs, itertools.product(*vary)):
        values = [setting.partition("=")[2] for setting in chosen]
        arm = "+".join([engine, precision, *(f"{n}={_plain(v)}" for n, v in zip(short, values, strict=True))])
        for seed in seeds or [None]:
            variants.append(
                Variant(
                    name=arm if seed is None else f"{arm}+seed={seed}",
                    engine=engine,
                    precision=precision,
                    overrides=(*chosen, *(() if seed is None else (f"train.seed={seed}",))),
                    arm=arm,
                    seed=seed,
                )
            )
    return variants


def _split(text: str) -> Iterable[str]:
    """Parts between the commas that are in no bracket and no quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in _OPENING + _CLOSING:
            depth += 1 if sign in _OPENING else -1
        if sign == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _short_names(fields: Sequence[str]) -> list[str]:
    """The last part of each field's path; all of the path where two end alike."""
    last = [field.rpartition(".")[2] for field in fields]
    return [name if last.count(name) == 1 else field for name, field in zip(last, fields, strict=True)]


def _plain(value: str) -> str:
    """The value with only such signs as a folder's name may have."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", value).strip("-") or "empty"
