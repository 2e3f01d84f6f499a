"""The plan of a run as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from samestep.console import say
from samestep.planning.sizes import number_text, size_text

_SHOWN_NAMES = 5
_LABELS = {
    "gather_buffers": "gathered",
    "reduce_buffers": "reduced",
    "optimizer_temporaries": "in the step",
}
_TOTALS = {
    "after_step_bytes": "held after a step",
    "after_backward_bytes": "... after backward",
    "host_bytes": "offloaded",
    "largest_buffer_bytes": "largest collective",
}


def show(report: dict[str, Any], console: Console) -> None:
    """Prints a report that `report.plan` made."""
    ranks = report["ranks"]
    say(console, f"{report['engine']} on {ranks} rank{'s' if ranks > 1 else ''}, regime {report['regime']}")
    console.print(_roles(report["roles"]))
    for sentence in [*_sentences(report["parameters"]), *_float8(report["float8"])]:
        say(console, sentence)
    rows = report["memory"]
    unit = _unit(row["bytes_per_rank"] for row in rows)
    say(console, f"\nPeak memory per rank, {unit}")
    console.print(_memory(rows, unit))
    say(console, _memory_notes(report))
    say(console, f"\nWhat it consists of in regime {report['regime']}, {unit}")
    console.print(_items([row for row in rows if row["regime"] == report["regime"]], unit))
    say(console, f"\nUpdates that rounding will make vanish ({report['steps']:,} steps)")
    if report["forecast"]["after"]:
        console.print(_forecast(report["forecast"]))
    for sentence in _forecast_notes(report["forecast"]):
        say(console, sentence)


def columns(first: str, *headings: str) -> Table:
    """An empty table of a column of names and columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _roles(roles: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("role", "dtype", "because"):
        table.add_column(heading)
    for role, entry in roles.items():
        table.add_row(role, entry["dtype"] or "-", entry["reason"])
    return table


def _sentences(parameters: dict[str, Any]) -> list[str]:
    lines = [f"{parameters['total']:,} parameters, {parameters['trainable']:,} of them trainable."]
    upcast, without = parameters["upcast"], parameters["without_master"]
    if upcast:
        cost = size_text(parameters["upcast_bytes"])
        lines.append(f"Upcast: {_some(upcast)}; {cost} more before sharding.")
    else:
        lines.append("Nothing is upcast.")
    if parameters["rounded"]:
        lines.append(f"Rounded before training: {_some(parameters['rounded'])}.")
    if parameters["quantised"]:
        lines.append(f"Quantised, left alone: {_some(parameters['quantised'])}.")
    if without:
        lines.append(f"Without a master: {_some(without)}.")
    return lines


def _float8(float8: dict[str, Any]) -> list[str]:
    if not float8["layers"]:
        return []
    lines = [f"{len(float8['layers']):,} layers multiply in float8: {_some(float8['layers'], 'layers')}."]
    by_reason: dict[str, list[str]] = {}
    for name, reason in float8["left_out"].items():
        by_reason.setdefault(reason, []).append(name)
    lines += [f"Not in float8, {reason}: {_some(names, 'layers')}." for reason, names in by_reason.items()]
    return lines


def _some(names: Sequence[str], things: str = "tensors") -> str:
    """The first names, and how many more there are."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more:,} more {things}" if more > 0 else "")


def _unit(sizes: Iterable[int]) -> str:
    listed = sorted(sizes)
    return "GB" if listed[len(listed) // 2] >= 10**9 else "MB"


def _memory(rows: list[dict[str, Any]], unit: str) -> Table:
    regimes = list(dict.fromkeys(row["regime"] for row in rows))
    table = columns("engine", *(regime.replace("-", "-\n") for regime in regimes))
    for engine in dict.fromkeys(row["engine"] for row in rows):
        cells = {row["regime"]: _cell(row, unit) for row in rows if row["engine"] == engine}
        table.add_row(engine, *(cells.get(regime, "-") for regime in regimes))
    return table


def _cell(row: dict[str, Any], unit: str) -> str:
    mark = " *" if row["cheapest_that_fits"] else " !" if row["fits"] is False else ""
    return number_text(row["bytes_per_rank"], unit) + mark


def _memory_notes(report: dict[str, Any]) -> str:
    device = report["device_memory_bytes"]
    activations = next(row for row in report["memory"] if row["regime"] == report["regime"])["activation_bytes"]
    notes = (
        f"Activations are an estimate: {size_text(activations['plain'])}, or {size_text(activations['checkpointed'])} "
        f"with train.activation_checkpointing."
    )
    if device is None:
        return notes
    if any(row["fits"] for row in report["memory"]):
        return f"! does not fit into {size_text(device)}; * fits with the least memory. {notes}"
    return f"None of these fits into {size_text(device)}. {notes}"


def _items(rows: list[dict[str, Any]], unit: str) -> Table:
    table = columns("at the peak", *(row["engine"] for row in rows))
    for item in rows[0]["items"]:
        if any(row["items"][item] for row in rows):
            table.add_row(_LABELS.get(item, item), *(_size(row["items"][item], unit) for row in rows))
    table.add_section()
    for name, label in _TOTALS.items():
        if any(row[name] for row in rows):
            table.add_row(label, *(_size(row[name], unit) for row in rows))
    return table


def _size(size: int, unit: str) -> str:
    return number_text(size, unit) if size else "-"


def _forecast(forecast: dict[str, Any]) -> Table:
    table = columns("", "learning\nrate", "lost", "unseen", "copy still\nas loaded", "dropped by\nan export")
    for shares in forecast["after"]:
        steps = shares["steps"]
        _shares_row(table, f"step {steps:,}", shares)
    table.add_section()
    for kind, entry in forecast["by_class"].items():
        _shares_row(table, f"{kind}, step {entry['after'][-1]['steps']:,}", entry["after"][-1])
    return table


def _shares_row(table: Table, label: str, shares: dict[str, Any]) -> None:
    table.add_row(
        label,
        f"{shares['lr']:.3g}",
        *(share_text(shares[name]) for name in ("lost", "unseen", "copy_unchanged", "dropped")),
    )


def share_text(value: float | None) -> str:
    """A share for people: no share above 0 is shown as 0 %, none below 1 as 100 %."""
    if value is None:
        return "-"
    if 0 < value < 0.001:
        return "< 0.1 %"
    if 0.999 < value < 1:
        return "> 99.9 %"
    return f"{value * 100:.1f} %"


def _forecast_notes(forecast: dict[str, Any]) -> list[str]:
    notes = [f"From {forecast['source']}." if forecast["after"] else f"{forecast['source'].capitalize()}."]
    if forecast["after"]:
        notes.append(
            "lost and unseen: of that step's updates. A dash: rounding is stochastic, on average nothing vanishes."
        )
    lost, limit = forecast["lost_share"], forecast["max_lost_share"]
    if lost is not None and limit is not None and lost > limit:
        notes.append(
            f"{share_text(lost)} of the updates at the highest learning rate are lost, more than "
            f"precision.max_lost_update_share ({limit:g}) allows: such a run refuses to start."
        )
    if forecast["never_move"]:
        notes.append(f"Will never move: {_some(forecast['never_move'])}.")
    return notes
