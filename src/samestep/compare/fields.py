"""Recipes compared field by field: what two runs did not have in common, and what of it matters. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

# The settings of the engine section that are part of what is computed. All others must not change a bit.
COUNTED_ENGINE_FIELDS = frozenset({"ranks", "reduce_every", "reduce_order"})
# What is said, shown and written, but not computed.
UNCOUNTED_SECTIONS = frozenset({"name", "log", "checkpoint"})
UNCOUNTED_FIELDS = frozenset(
    {
        "precision.export_dtype",
        "precision.export_rounding",
        "precision.max_lost_update_share",
        "precision.measure_every",
        "train.evaluate_every",
        "train.export",
    }
)

Kind = Literal["tested", "engine", "uncounted", "work"]


@dataclass(frozen=True, kw_only=True)
class FieldDifference:
    """A field in which two recipes differ. `kind` is tested (the difference under test), engine (an engine, or a
    setting of it, that must not change a bit), uncounted (said or written only) or work (the runs did not do the
    same)."""

    field: str
    a: Any
    b: Any
    kind: Kind

    def __str__(self) -> str:
        return f"{self.field} is {_shown(self.a)} in one and {_shown(self.b)} in the other"

    def described(self) -> dict[str, Any]:
        """The object in compare.json."""
        return asdict(self)


def differences(a: Mapping[str, Any], b: Mapping[str, Any], tested: Sequence[str] = ()) -> list[FieldDifference]:
    """Every field in which two recipes, as plain data, differ. `tested` are fields or sections under test."""
    return [
        FieldDifference(field=field, a=one, b=other, kind=_kind(field, tested)) for field, one, other in _walk(a, b, "")
    ]


def unequal_work(found: Sequence[FieldDifference]) -> list[FieldDifference]:
    """Those because of which two runs did not do the same."""
    return [difference for difference in found if difference.kind == "work"]


def observed_differences(
    a_steps: Sequence[dict[str, Any]], b_steps: Sequence[dict[str, Any]], tested: Sequence[str] = ()
) -> list[FieldDifference]:
    """The first step at which two runs had other tokens, or another learning rate, than each other.

    A value that is not recorded is not compared. A learning rate may differ where the training's rate is under test.
    """
    found = []
    for quantity, fields in (
        ("label_tokens", ("data", "train.micro_batch", "train.accumulation")),
        ("tokens", ("data", "train.micro_batch", "train.accumulation")),
        ("lr", ("train.optimizer.lr", "train.schedule", "train.steps")),
    ):
        for one, other in zip(a_steps, b_steps, strict=False):
            values = one.get(quantity), other.get(quantity)
            if None not in values and values[0] != values[1]:
                kind: Kind = "tested" if any(_covers(t, f) or _covers(f, t) for t in tested for f in fields) else "work"
                where = f"{quantity} of step {one['step']}"
                found.append(FieldDifference(field=where, a=values[0], b=values[1], kind=kind))
                break
    return found


def _kind(field: str, tested: Sequence[str]) -> Kind:
    if any(_covers(name, field) for name in tested):
        return "tested"
    section, _, rest = field.partition(".")
    if section in UNCOUNTED_SECTIONS or field in UNCOUNTED_FIELDS:
        return "uncounted"
    if section == "engine" and rest.partition(".")[0] not in COUNTED_ENGINE_FIELDS:
        return "engine"
    return "work"


def _covers(name: str, field: str) -> bool:
    return field == name or field.startswith(f"{name}.")


def _walk(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for name in [*a, *(name for name in b if name not in a)]:
        one, other, path = a.get(name), b.get(name), f"{prefix}{name}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _walk(one, other, f"{path}.")
        elif one != other:
            yield path, one, other


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
