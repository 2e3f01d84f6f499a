"""The comparison as a table for people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table


def table(report: dict[str, Any]) -> Table:
    """A row for each variant of a report, as compare.json holds it. All are compared with the first of their seed."""
    variants = report["variants"]
    has_held_out = any(v["held_out"] for v in variants)
    built = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    built.add_column("engine", overflow="fold")
    built.add_column("regime", overflow="fold")
    for heading in ("first\nloss", "last\nloss", *(["held-out\nbefore", "\nafter"] if has_held_out else [])):
        built.add_column(heading, justify="right")
    built.add_column("bit-equal to\nthe first", no_wrap=True)
    built.add_column("updates\nlost", justify="right")
    pairs: dict[str, dict[str, Any]] = {}
    for pair in report["pairs"]:
        pairs.setdefault(pair["b"], pair)  # pairs are in order, so the first one is with the first of the seed
    for variant in variants:
        losses = [_loss(variant["first_loss"]), _loss(variant["last_loss"])]
        # The longest names would not leave room for the numbers on 80 columns.
        regime = variant["precision"].replace("-stochastic", "-\nstochastic")
        cells = [_engine(variant, variants), regime, *losses]
        if has_held_out:
            held_out = variant["held_out"]
            cells += [_loss(held_out["before"]), _loss(held_out["after"])] if held_out else ["-", "-"]
        pair = pairs.get(variant["name"])
        built.add_row(*cells, _equality(pair) if pair else "(itself)", share(variant["lost_update_share"]))
    return built


def share(value: float | None) -> str:
    """A share for people: no share above 0 is shown as 0 %, none below 1 as 100 %."""
    if value is None:
        return "-"
    if 0 < value < 0.001:
        return "< 0.1 %"
    if 0.999 < value < 1:
        return "> 99.9 %"
    return f"{value:.1%}".replace("%", " %")


def _engine(variant: dict[str, Any], variants: list[dict[str, Any]]) -> str:
    """The engine; with the overrides where nothing else tells two variants apart."""
    alike = [v for v in variants if (v["engine"], v["precision"]) == (variant["engine"], variant["precision"])]
    return " ".join([variant["engine"], *(variant["overrides"] if len(alike) > 1 else [])])


def _equality(pair: dict[str, Any]) -> str:
    first = pair["first_difference"]
    if pair["bit_equal"]:
        return "yes"
    if first is None:
        return "not known"
    quantity = {"loss": "loss", "grad_norm": "norm", "weights": "weights"}[first["quantity"]]
    return f"no: step {first['step']}, {quantity}"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
