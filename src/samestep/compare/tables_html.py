"""The tables of the report page. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from samestep.compare.charts import Chart
from samestep.compare.table import share

# Rows of the table that stands in for the curves.
_MOST_ROWS = 60


def steps_table(charts: Sequence[Chart]) -> str:
    """The curves as numbers, for those who do not see them; thinned evenly when there are many steps."""
    if not charts:
        return ""
    steps = charts[0].steps
    apart = -(-len(steps) // _MOST_ROWS)
    rows = sorted({*range(0, len(steps), apart), len(steps) - 1})
    columns = [(chart, series) for chart in charts for series in chart.series]
    head = [("step", True), *((f"{chart.title}, {series.name}", True) for chart, series in columns)]
    body = [[str(steps[row]), *(_value(series.values[row]) for _, series in columns)] for row in rows]
    shown = "" if len(rows) == len(steps) else f", {len(rows)} of {len(steps)} steps"
    table = _table("The curves as numbers", head, body)
    return f"<details><summary>The curves as a table{shown}</summary>{table}</details>"


def variants_table(report: dict[str, Any]) -> str:
    """What was run and how it ended: losses, lost updates, memory."""
    variants = report["variants"]
    relations: dict[str, str] = {}
    for pair in report["pairs"]:
        relations.setdefault(pair["b"], pair["relation"])
    held_out = any(v["held_out"] for v in variants)
    head = [("variant", False), ("engine", False), ("regime", False), ("set", False), ("steps", True)]
    head += [("first loss", True), ("last loss", True)]
    head += [("held-out before", True), ("held-out after", True)] if held_out else []
    head += [("against the first", False), ("updates lost", True), ("lost, forecast", True), ("unseen", True)]
    head += [("peak memory", True), ("seconds", True)]
    body = []
    for v in variants:
        outside = v["held_out"] or {"before": None, "after": None}
        row = [v["name"], v["engine"], v["precision"], ", ".join(v["overrides"]) or "–", f"{v['steps']:,}"]
        row += [_value(v["first_loss"]), _value(v["last_loss"])]
        row += [_value(outside["before"]), _value(outside["after"])] if held_out else []
        row += [relations.get(v["name"], "(itself)"), share(v["lost_update_share"]), share(v["forecast_lost_share"])]
        row += [share(v["unseen_update_share"]), _bytes(v["peak_memory_bytes"]), _value(v["seconds"], digits=1)]
        body.append(row)
    return _section("Variants", "", _table("Variants", head, body))


def pairs_table(report: dict[str, Any]) -> str:
    """Every pair: how it stands, where it parts, by how much, and why."""
    head = [("a", False), ("b", False), ("relation", False), ("first difference", False), ("part of the step", False)]
    head += [("largest loss gap", True), ("relative", True), ("largest norm gap", True), ("mean loss gap, b − a", True)]
    head += [("weights", False), ("likely cause", False)]
    body = []
    for pair in report["pairs"]:
        row = [pair["a"], pair["b"], pair["relation"] + ("" if pair["must_agree"] else " (need not agree)")]
        row += [_first(pair), pair["stage"], _gap(pair["max_abs_loss_gap"]), _gap(pair["max_relative_loss_gap"])]
        row += [_gap(pair["max_abs_grad_norm_gap"]), _gap(pair["mean_loss_gap"]), _weights(pair), pair["cause"] or "–"]
        body.append(row)
    first = report["variants"][0]["name"]
    with_first = [pair["stretch"] for pair in report["pairs"] if pair["a"] == first and pair["stretch"]]
    stretched = [found for found in with_first if found["matches"]]
    notes = "".join(
        f"<p>{escape(s['slower'])} looks like {escape(s['faster'])} at {s['speed']:.2g} of its speed: stretching time "
        f"takes away {s['explained']:.0%} of the squared gap. A learning rate {1 / s['speed']:.3g} times as large "
        "would bring the curves together; it would not mend the cause.</p>"
        for s in stretched
    )
    return _section("Pairs", notes, _table("Pairs", head, body, long={2, 9, 10}))


def arms_table(report: dict[str, Any]) -> str:
    """Mean drift over seeds with its interval; nothing without several seeds."""
    if not report["arms"]:
        return ""
    head = [("a", False), ("b", False), ("seeds", True), ("mean loss gap, b − a", True), ("95 % interval", True)]
    body = []
    for arm in report["arms"]:
        gap = arm["mean_loss_gap"]
        span = "–" if gap["low"] is None else f"{gap['low']:.4g} to {gap['high']:.4g}"
        body.append([arm["a"], arm["b"], str(len(arm["seeds"])), f"{gap['mean']:.4g}", span])
    note = '<p class="soft">Student\'s t interval over seeds: mean ± t s / √n, with n − 1 degrees of freedom.</p>'
    return _section("Drift over seeds", note, _table("Drift over seeds", head, body))


def precision_table(report: dict[str, Any]) -> str:
    """Observed dtypes by role; planned ones where nothing was observed. Rows in which variants differ are marked."""
    variants = [v for v in report["variants"] if v["roles"]]
    if not variants:
        return ""
    roles = list(dict.fromkeys(role for v in variants for role in v["roles"]))
    head = [("role", False), *((v["name"], False) for v in variants)]
    body = [[role, *(_dtypes(v["roles"].get(role)) for v in variants)] for role in roles]
    differs = {number for number, row in enumerate(body) if len(set(row[1:])) > 1}
    note = '<p class="soft">Read from live tensors and from what crossed the ranks, after the first step.</p>'
    return _section("Observed precision", note, _table("Observed precision", head, body, marked=differs))


def differences_table(report: dict[str, Any]) -> str:
    """The recipes' differences, field by field, of every pair with the first."""
    words = {
        "tested": "under test",
        "engine": "must not change a bit",
        "uncounted": "not computed",
        "work": "OTHER WORK",
    }
    head = [("a", False), ("b", False), ("field", False), ("in a", False), ("in b", False), ("what it is", False)]
    body, marked = [], set()
    for pair in report["pairs"]:
        for d in pair["differences"]:
            if d["kind"] == "work":
                marked.add(len(body))
            body.append([pair["a"], pair["b"], d["field"], _plain(d["a"]), _plain(d["b"]), words[d["kind"]]])
    if not body:
        return ""
    return _section("Differences of the recipes", "", _table("Differences", head, body, marked=marked, long={3, 4}))


def _section(heading: str, note: str, table: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{note}{table}</section>"


def _table(
    label: str,
    head: Sequence[tuple[str, bool]],
    body: Sequence[Sequence[str]],
    *,
    marked: set[int] | frozenset[int] = frozenset(),
    long: set[int] | frozenset[int] = frozenset(),
) -> str:
    """A table that scrolls by itself on a narrow screen. `head` says of each column whether it holds numbers."""
    headings = "".join(f'<th scope="col"{_class(number)}>{escape(text)}</th>' for text, number in head)
    rows = []
    for number, row in enumerate(body):
        cells = "".join(
            f"<td{_class(head[at][1], long=at in long)}>{escape(cell)}</td>" for at, cell in enumerate(row) if at
        )
        mark = ' class="differs"' if number in marked else ""
        rows.append(f'<tr{mark}><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}"><table><thead><tr>{headings}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _class(number: bool, *, long: bool = False) -> str:
    return ' class="number"' if number else ' class="long"' if long else ""


def _first(pair: dict[str, Any]) -> str:
    first = pair["first_difference"]
    if first is None:
        return "none"
    if pair["ends_early"]:
        return f"step {first['step']} is in one only"
    words = {"loss": "loss", "grad_norm": "gradient norm", "weights": "weights"}
    return f"step {first['step']}, {words[first['quantity']]}"


def _weights(pair: dict[str, Any]) -> str:
    if pair["weights_compared"] is None:
        return "equal bits" if pair["max_abs_weight_gap"] == 0 else "no masters to compare"
    if not pair["weights_differing"]:
        return f"all {pair['weights_compared']} tensors equal"
    text = f"{pair['weights_differing']} of {pair['weights_compared']} tensors differ"
    text += f", {pair['first_weight_difference_in']} first"
    text += f"; largest gap {_gap(pair['max_abs_weight_gap'])} in {pair['largest_weight_gap_in']}"
    if pair["largest_relative_weight_gap_in"]:
        text += f"; relative {_gap(pair['max_relative_weight_gap'])} in {pair['largest_relative_weight_gap_in']}"
    return text


def _dtypes(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    if entry["observed"] is None:
        return f"{', '.join(entry['planned']) or 'none'} (planned)"
    return ", ".join(entry["observed"]) or "none"


def _value(value: float | None, *, digits: int = 4) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if value and abs(value) < 0.001 else f"{value:.{digits}f}"


def _gap(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.3g}"


def _bytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def _plain(value: Any) -> str:
    return "null" if value is None else str(value)
