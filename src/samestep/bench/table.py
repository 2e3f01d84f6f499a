"""A benchmark for people: a table on the screen, and the same as Markdown."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

_LEFT = 1
"""Columns that hold words; the others hold numbers."""


def headings() -> list[str]:
    """Of the first table. A line break is where a narrow terminal breaks."""
    return [
        "",
        "tokens/s\n/device",
        "step (s)",
        "quartiles",
        "MFU\n6N",
        "MFU\ncausal",
        "MFU\nfull",
        "label\ntokens/s",
        "peak GB\n/rank",
    ]


def cells(row: dict[str, Any]) -> list[str]:
    """One contender's numbers under `headings`."""
    spread = row["step_seconds_spread"]
    attention = row["mfu_with_attention"]
    return [
        row["title"],
        f"{row['tokens_per_second_per_device']:,.1f}",
        f"{row['step_seconds']:.3f}",
        f"{spread['lower_quartile']:.3f}-{spread['upper_quartile']:.3f}",
        share(row["mfu"]),
        share(attention["causal"]),
        share(attention["full"]),
        f"{row['label_tokens_per_second']:,.0f}",
        f"{row['peak_memory_bytes'] / 1e9:.2f}",
    ]


def split_headings() -> list[str]:
    """Of the second table: seconds of a step that is taken apart."""
    return ["", "data", "forward", "backward", "optimizer", "rest", "whole\nstep", "communi-\ncation"]


def split_cells(row: dict[str, Any]) -> list[str]:
    """One contender's numbers under `split_headings`. The rest is what lies between the parts."""
    split = row["split_seconds"]
    known = [split[name] for name in ("data", "forward", "backward", "optimizer")]
    rest = split["step"] - sum(value for value in known if value is not None)
    return [row["title"], *map(seconds, [*known, rest, split["step"], split["communication"]])]


def tables(report: dict[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Headings and rows of both tables; the second one only where steps were taken apart."""
    rows = report["rows"]
    absent = [[each["title"], each["status"]] for each in report["not_installed"]]
    width = len(headings())
    found = [_known(headings(), [*map(cells, rows), *(row + ["-"] * (width - len(row)) for row in absent)])]
    if all(row["split_seconds"] for row in rows):
        found.append((split_headings(), [split_cells(row) for row in rows]))
    return found


def _known(names: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Without the columns of MFU where it is known for nobody; a footnote says why."""
    kept = [i for i, name in enumerate(names) if not name.startswith("MFU") or any(row[i] != "-" for row in rows)]
    return [names[i] for i in kept], [[row[i] for i in kept] for row in rows]


def ratio_lines(report: dict[str, Any]) -> list[str]:
    """Step times over each other, one line a pair."""
    return [
        f"{name}: {ratio['median']:.3f} ({ratio['smallest']:.3f}-{ratio['largest']:.3f})"
        for name, ratio in report["ratios"].items()
    ]


def sentences(report: dict[str, Any]) -> list[str]:
    """How it was measured, and what to know about the numbers."""
    settings, equal = report["settings"], report["equal"]
    said = [
        f"{settings['rounds']} rounds in turn, each in new processes: {settings['warmup']} steps of warm-up that do "
        f"not count, {settings['steps']} timed. Medians over the timed steps of all rounds.",
        f"Equal for all: regime {equal['regime']}, {equal['parameters']:,} parameters, {equal['ranks']} ranks, "
        f"{equal['micro_batch']} rows per rank and micro-batch, accumulation {equal['accumulation']}, "
        f"clipping {equal['max_grad_norm'] or 'off'}, the same batches and initial weights.",
    ]
    unlike = [row for row in report["rows"] if not row["losses"]["bit_equal"]]
    if not unlike:
        said.append("The losses of all steps are equal bit for bit.")
    else:
        gaps = ", ".join(f"{row['title']} by {row['losses']['max_abs_gap']:.2g}" for row in unlike)
        said.append(f"Losses differ from those of {report['rows'][0]['title']} at most: {gaps}.")
    return said + report["footnotes"]


def rich_tables(report: dict[str, Any]) -> list[Table]:
    """The tables for a terminal."""
    built = []
    for names, rows in tables(report):
        table = Table(box=box.SIMPLE)
        for index, name in enumerate(names):
            table.add_column(name, justify="left" if index < _LEFT else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        built.append(table)
    return built


def markdown(report: dict[str, Any], versions: dict[str, str]) -> str:
    """The whole benchmark as a page."""
    lines = [f"# Benchmark of {report['name']}", ""]
    lines += [f"Device: {report['device']['name']}. " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".", ""]
    for number, (names, rows) in enumerate(tables(report)):
        if number == 1:
            lines += ["Seconds of a step that is taken apart (by timers and a profiler, which slow it):", ""]
        lines += [_line([_joined(name) for name in names]), _line(["---"] * len(names)), *map(_line, rows), ""]
    if ratios := ratio_lines(report):
        lines += ["Step time over step time, median over rounds (smallest-largest):", ""]
        lines += [f"- {line}" for line in ratios]
    return "\n".join([*lines, "", *sentences(report)]) + "\n"


def share(value: float | None) -> str:
    """A share of the peak; a dash where it is not known."""
    return "-" if value is None else f"{value:.3f}"


def seconds(value: float | None) -> str:
    """Seconds; a dash where they were not measured."""
    return "-" if value is None else f"{value:.3f}"


def _joined(heading: str) -> str:
    """The heading on one line."""
    return heading.replace("-\n", "").replace("\n/", "/").replace("\n", " ")


def _line(cells_of_row: list[str]) -> str:
    return "| " + " | ".join(cells_of_row) + " |"
