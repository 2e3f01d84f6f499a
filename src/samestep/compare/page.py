"""The report as one HTML page that asks the network for nothing: styles, script, curves and numbers are inside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from samestep import __version__
from samestep.compare import tables_html
from samestep.compare.charts import Chart, Series, figure, linear_chart, log_chart
from samestep.compare.outcome import Outcome

# More steps than a screen has pixels are thinned; compare.json's runs have all of them.
_MOST_STEPS = 1500


def page(report: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The page of a report that `make_report` made of these outcomes. All text of others is escaped."""
    steps, thinned = _steps(outcomes)
    charts = _charts(steps, outcomes, report)
    style, script = _asset("page.css"), _asset("page.js")
    data = {
        "steps": steps,
        "first": steps[0] if steps else 0,
        "last": steps[-1] if steps else 0,
        "charts": [chart.data() for chart in charts],
    }
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    title = f"{escape(report['name'])}: comparison"
    note = f"<p class='soft'>Curves show {len(steps):,} of {thinned:,} steps.</p>" if thinned else ""
    body = "".join(
        [
            f"<h1>{title}</h1>",
            _verdict(report),
            _warnings(report),
            f'<div class="charts">{"".join(map(figure, charts))}</div>{note}',
            tables_html.steps_table(charts),
            tables_html.variants_table(report),
            tables_html.pairs_table(report),
            tables_html.arms_table(report),
            tables_html.precision_table(report),
            tables_html.differences_table(report),
            f'<p class="soft">Made by samestep {escape(__version__)}. {escape(_bound(report))}</p>',
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{style}</style></head><body><main>{body}</main>"
        f'<script type="application/json" id="data">{_inert(data)}</script><script>{script}</script></body></html>\n'
    )


def _verdict(report: dict[str, Any]) -> str:
    held = any(pair["must_agree"] for pair in report["pairs"])
    look, status = ("bad", "Not as it must be") if not report["ok"] else ("good", "As it must be")
    if report["ok"] and not held:
        look, status = "open", "Nothing here had to agree"
    return (
        f'<div class="verdict {look}" role="status"><span class="status">{status}</span>'
        f'<p id="verdict">{escape(report["verdict"])}</p></div>'
    )


def _warnings(report: dict[str, Any]) -> str:
    """What a reader has to know before the curves: unequal work, runs that did not end, causes."""
    notes = [f"{variant['name']}: {note}" for variant in report["variants"] for note in variant["notes"]]
    for pair in report["pairs"]:
        fields = [d["field"] for d in pair["differences"] if d["kind"] == "work"]
        if fields:
            notes.append(f"{pair['a']} and {pair['b']} did not do the same work: {', '.join(fields)}.")
    notes += [
        f"Likely cause of the difference of {pair['b']} from {pair['a']}: {pair['cause']}."
        for pair in report["pairs"]
        if pair["cause"] and pair["a"] == report["variants"][0]["name"]
    ]
    return f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else ""


def _bound(report: dict[str, Any]) -> str:
    limit = report["bound"]["max_relative_loss_gap"]
    asked = "Equal bits are asked for" if limit == 0 else f"Losses may differ by {limit:g}, relative"
    return f"{asked} of variants that must agree: {report['bound']['because']}."


def _charts(steps: Sequence[int], outcomes: Sequence[Outcome], report: dict[str, Any]) -> list[Chart]:
    if not steps:
        return []
    losses, norms = (_series(steps, outcomes, quantity) for quantity in ("loss", "grad_norm"))
    made = [
        linear_chart("loss", "Training loss", "Mean over the label tokens of each step.", steps, losses),
        linear_chart("norm", "Gradient norm", "Before clipping.", steps, norms),
        log_chart(
            "gap",
            "Gap of the loss to the first",
            "Absolute, on a log axis; what is exactly equal lies on the line at 0.",
            steps,
            _gaps(outcomes, losses),
        ),
        linear_chart(
            "lost",
            "Lost updates",
            "Share of the measured updates that rounding turned into no change.",
            steps,
            [
                s
                for s in _series(steps, outcomes, "lost_update_share", joined=True)
                if any(v is not None for v in s.values)
            ],
        ),
    ]
    return [chart for chart in made if chart is not None]


def _series(steps: Sequence[int], outcomes: Sequence[Outcome], quantity: str, *, joined: bool = False) -> list[Series]:
    """One curve for each outcome; with `joined`, steps that were not measured repeat the value before them."""
    columns: list[tuple[float | None, ...]] = []
    for outcome in outcomes:
        values = {record["step"]: record.get(quantity) for record in outcome.steps}
        column = [values.get(step) for step in steps]
        if joined:
            for at in range(1, len(column)):
                column[at] = column[at - 1] if column[at] is None else column[at]
        columns.append(tuple(column))
    first = {column: at for at, column in reversed(list(enumerate(columns)))}
    return [
        Series(
            name=outcome.name,
            index=at,
            values=columns[at],
            twin_of=first[columns[at]] if first[columns[at]] != at else None,
            has_twins=columns.count(columns[at]) > 1,
        )
        for at, outcome in enumerate(outcomes)
    ]


def _gaps(outcomes: Sequence[Outcome], losses: Sequence[Series]) -> list[Series]:
    """How far each curve is from the first one of its seed."""
    found = []
    for at, outcome in enumerate(outcomes):
        first = next(n for n, other in enumerate(outcomes) if other.variant.seed == outcome.variant.seed)
        if first != at:
            pairs = zip(losses[first].values, losses[at].values, strict=True)
            gaps = [None if a is None or b is None else abs(a - b) for a, b in pairs]
            found.append(Series(name=outcome.name, index=at, values=gaps))
    return found


def _steps(outcomes: Sequence[Outcome]) -> tuple[list[int], int]:
    """The steps that are shown, and of how many when not all are (else 0)."""
    every = sorted({record["step"] for outcome in outcomes for record in outcome.steps})
    if len(every) <= _MOST_STEPS:
        return every, 0
    apart = -(-len(every) // _MOST_STEPS)
    return sorted({*every[::apart], every[-1]}), len(every)


def _inert(data: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever names it holds."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return files("samestep.compare").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
