"""The predicted step on a cluster as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.console import say
from samestep.planning.sizes import size_text
from samestep.planning.tables import columns

_PARTS = {
    "compute": "matrix multiplications",
    "memory": "memory: activations, optimizer",
    "gather": "gathering weights",
    "reduce": "reducing gradients",
    "offload": "offload: host links, host optimizer",
}
_LIMITS = {
    "compute": "matrix multiplications",
    "memory": "the speed of the device's memory",
    "gather": "the gathering of weights",
    "reduce": "the reduction of gradients",
    "offload": "offload",
}


def show(report: dict[str, Any], console: Console) -> None:
    """Prints a report that `prediction.predict` made."""
    shape = f"{report['nodes']:,} x {report['devices_per_node']} {report['device']}"
    say(console, f"{report['engine']} on {shape}, {report['parameters']:,} parameters, regime {report['regime']}")
    for sentence in _headline(report):
        say(console, sentence)
    if report["memory"]["fits"]:
        console.print(_seconds(report))
    say(console, "Assumed:")
    for text in report["assumptions"]:
        say(console, f"- {text}")


def _headline(report: dict[str, Any]) -> list[str]:
    memory = report["memory"]
    sizes = f"{size_text(memory['bytes_per_rank'])} per device at the peak, of {size_text(memory['device_bytes'])}"
    if not memory["fits"]:
        return [
            f"DOES NOT FIT: {sizes}.",
            "Take more devices, a smaller micro-batch, checkpointing, offload or another engine.",
        ]
    mfu = report["mfu"]
    low, high = report["tokens_per_second_per_device_range"]
    lines = [
        f"Step: {_duration(report['step_seconds'])} for {report['tokens_per_step']:,} tokens "
        f"({_duration(report['step_seconds_without_overlap'])} if nothing overlapped)",
        f"Throughput: {report['tokens_per_second_per_device']:,.4g} tokens/s per device "
        f"({low:,.4g} to {high:,.4g}), {report['tokens_per_second']:,.4g} in all",
        f"MFU: {mfu['6N']:.1%} (6N), {mfu['6W+attention, causal']:.1%} (6W + causal attention); "
        f"{mfu['hardware']:.1%} of the peak with recomputation",
        f"Limited by {_LIMITS[report['limited_by']]}",
        f"Memory: {sizes}" + (f"; {size_text(memory['host_bytes'])} on the host" if memory["host_bytes"] else ""),
    ]
    return [*lines, *_cost(report["cost"])]


def _cost(cost: dict[str, Any]) -> list[str]:
    hours = cost["run_hours"]
    run = "" if hours is None else f"{cost['steps']:,} steps take {hours:,.3g} hours"
    if cost["price_per_device_hour"] is None:
        return [f"Run: {run}"] if run else []
    prices = f"{cost['per_million_tokens']:,.3g} per million tokens"
    if cost["run"] is not None:
        prices = f"{run} and {cost['run']:,.4g}; {prices}"
    return [f"Cost: {prices}, at {cost['price_per_device_hour']:,.4g} per device and hour"]


def _seconds(report: dict[str, Any]) -> Table:
    table = columns("in a step", "takes", "step without it")
    for part, seconds in report["seconds"].items():
        if seconds:
            table.add_row(_PARTS[part], _duration(seconds), _duration(report["step_seconds_if_free"][part]))
    return table


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.4g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
