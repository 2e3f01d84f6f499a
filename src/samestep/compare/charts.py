"""Line charts as inline SVG that keep the size of their text on any screen. No torch, no drawing library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

# Colours are classes of the page's style sheet; dashes and markers tell the curves apart without them.
_COLOURS = 7
_DASHES = ("", "7 4", "2 3", "10 3 2 3", "5 2", "1 3", "12 4")
# Curves that coincide: a wide pale one below, dashed ones on it.
_WIDE, _THIN = 7.0, 2.2
_MARKERS_PER_CURVE = 7
# The plot's inner coordinates; stretched to whatever size the screen gives.
_INNER = 1000.0


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve: a value for every step of the chart, None where there is none. `index` is its place among all
    variants, and with it its looks; `twin_of` the place of the first curve with the very same values."""

    name: str
    index: int
    values: Sequence[float | None]
    twin_of: int | None = None
    has_twins: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """`low` and `high` bound the drawn values; with `log` they are powers of ten, and 0 is drawn at the bottom."""

    id: str
    title: str
    note: str
    steps: Sequence[int]
    series: Sequence[Series]
    low: float
    high: float
    log: bool = False

    def data(self) -> dict[str, Any]:
        """What the page's script needs."""
        return {
            "id": self.id,
            "low": self.low,
            "high": self.high,
            "log": self.log,
            "series": [{"name": s.name, "index": s.index, "values": list(s.values)} for s in self.series],
        }


def linear_chart(id: str, title: str, note: str, steps: Sequence[int], series: Sequence[Series]) -> Chart | None:
    """A chart with room above and below all values; None where there is no value."""
    values = [v for s in series for v in s.values if v is not None]
    if not values:
        return None
    low, high = min(values), max(values)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return Chart(id=id, title=title, note=note, steps=steps, series=series, low=low - room, high=high + room)


def log_chart(id: str, title: str, note: str, steps: Sequence[int], series: Sequence[Series]) -> Chart | None:
    """A chart over whole powers of ten, with a floor of half a decade for zeros; None where there is no value."""
    values = [v for s in series for v in s.values if v is not None]
    if not values:
        return None
    above = [v for v in values if v > 0]
    low = math.floor(math.log10(min(above))) if above else -1
    high = max(math.ceil(math.log10(max(above))) if above else 0, low + 1)
    return Chart(
        id=id, title=title, note=note, steps=steps, series=series, low=low - (high - low) * 0.12, high=high, log=True
    )


def figure(chart: Chart) -> str:
    """The chart as HTML: a figure with axes, curves, a step cursor that is a slider, and a legend with values."""
    first, last = chart.steps[0], chart.steps[-1]
    title = escape(chart.title)
    slider = (
        f'class="plot" tabindex="0" role="slider" aria-label="{title}: step cursor, move with the arrow keys" '
        f'aria-valuemin="{first}" aria-valuemax="{last}" aria-valuenow="{last}" aria-valuetext="step {last}"'
    )
    y_ticks, x_ticks = _y_ticks(chart), _x_ticks(first, last)
    grid = "".join(f'<line class="grid" x1="0" x2="100%" y1="{y}%" y2="{y}%"/>' for y, _ in y_ticks)
    curves = "".join(_curve(chart, series) for series in chart.series)
    marks = "".join(_marks(chart, series) for series in chart.series)
    dots = "".join(
        f'<circle class="dot {_fill(s.index)}" data-series="{s.index}" r="5" visibility="hidden"/>'
        for s in chart.series
    )
    plot = (
        f'<svg {slider}>{grid}<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>'
        f'<svg width="100%" height="100%" viewBox="0 0 {_INNER:g} {_INNER:g}" preserveAspectRatio="none">{curves}</svg>'
        f'{marks}<line class="cursor" x1="100%" x2="100%" y1="0" y2="100%"/>{dots}'
        '<rect width="100%" height="100%" fill="transparent"/></svg>'
    )
    y_axis = "".join(f'<text x="92%" y="{y}%" dy="4" text-anchor="end">{escape(text)}</text>' for y, text in y_ticks)
    x_axis = "".join(f'<text x="{x}%" y="1.1em" text-anchor="{_anchor(x)}">{text}</text>' for x, text in x_ticks)
    legend = "".join(_entry(series) for series in chart.series)
    return (
        f'<figure id="chart-{chart.id}"><figcaption><h2>{title}</h2><p class="soft">{escape(chart.note)}</p>'
        f'</figcaption><div class="frame"><svg aria-hidden="true">{y_axis}</svg>{plot}<span></span>'
        f'<svg aria-hidden="true">{x_axis}</svg></div><p class="at">at step {last}</p>'
        f'<ul class="readout">{legend}</ul></figure>'
    )


def _entry(series: Series) -> str:
    line = f'<line class="curve {_stroke(series.index)}" x1="1" x2="47" y1="8" y2="8" {_looks(series)}/>'
    sample = f'<svg aria-hidden="true" viewBox="0 0 48 16">{line}{_marker(series.index, "24", "8")}</svg>'
    return (
        f'<li><button type="button" aria-pressed="true" data-series="{series.index}" title="Show or hide this curve">'
        f'{sample}<span class="name">{escape(series.name)}</span><span class="value"></span></button></li>'
    )


def _curve(chart: Chart, series: Series) -> str:
    lines = "".join(
        f'<polyline class="curve {_stroke(series.index)}" {_looks(series)} points="{points}"/>'
        for points in _pieces(chart, series)
    )
    return f'<g data-series="{series.index}">{lines}</g>'


def _pieces(chart: Chart, series: Series) -> Iterable[str]:
    """Points of the curve's unbroken pieces; a value alone becomes a short dash."""
    piece: list[tuple[float, float]] = []
    for step, value in [*zip(chart.steps, series.values, strict=True), (0, None)]:
        if value is not None:
            piece.append((_across(chart, step) * _INNER / 100, _down(chart, value) * _INNER / 100))
        elif piece:
            if len(piece) == 1:
                piece.append((piece[0][0] + 4, piece[0][1]))
            yield " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
            piece = []


def _marks(chart: Chart, series: Series) -> str:
    """A few markers, at other steps for each curve, so that curves on top of each other all show theirs."""
    there = [(step, value) for step, value in zip(chart.steps, series.values, strict=True) if value is not None]
    apart = max(1, len(there) // _MARKERS_PER_CURVE)
    start = (series.index * max(1, apart // 3)) % apart
    marks = "".join(
        _marker(series.index, f"{_across(chart, step):.2f}%", f"{_down(chart, value):.2f}%")
        for step, value in there[start::apart]
    )
    return f'<g data-series="{series.index}">{marks}</g>'


def _marker(index: int, x: str, y: str) -> str:
    """A nested svg at the place, with a shape of its own for every curve."""
    shapes = (
        '<circle r="4"/>',
        '<rect x="-3.6" y="-3.6" width="7.2" height="7.2"/>',
        '<path d="M0 -5 L4.6 3.6 L-4.6 3.6 Z"/>',
        '<path d="M0 -5.2 L5.2 0 L0 5.2 L-5.2 0 Z"/>',
        '<path d="M0 5 L4.6 -3.6 L-4.6 -3.6 Z"/>',
        '<path d="M-4.6 -1.6 H-1.6 V-4.6 H1.6 V-1.6 H4.6 V1.6 H1.6 V4.6 H-1.6 V1.6 H-4.6 Z"/>',
        '<rect x="-5" y="-2.4" width="10" height="4.8"/>',
    )
    shape = shapes[index % len(shapes)]
    return f'<svg x="{x}" y="{y}" overflow="visible" class="mark {_fill(index)}">{shape}</svg>'


def _looks(series: Series) -> str:
    if series.has_twins and series.twin_of is None:
        return f'stroke-width="{_WIDE}" stroke-opacity="0.4"'
    dashes = _DASHES[series.index % len(_DASHES)]
    if series.twin_of is not None and not dashes:
        dashes = _DASHES[1]
    return f'stroke-width="{_THIN}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def _stroke(index: int) -> str:
    return f"c{index % _COLOURS}"


def _fill(index: int) -> str:
    return f"f{index % _COLOURS}"


def _across(chart: Chart, step: int) -> float:
    first, last = chart.steps[0], chart.steps[-1]
    return 100 * (step - first) / (last - first) if last > first else 50.0


def _down(chart: Chart, value: float) -> float:
    if chart.log:
        if value <= 0:
            return 100.0
        value = math.log10(value)
    return 100 - 100 * (value - chart.low) / (chart.high - chart.low)


def _anchor(x: float) -> str:
    return "start" if x < 3 else "end" if x > 97 else "middle"


def _y_ticks(chart: Chart) -> list[tuple[str, str]]:
    if not chart.log:
        return [(f"{_down(chart, v):.2f}", text) for v, text in _nice(chart.low, chart.high, 5)]
    lowest, highest = math.ceil(chart.low), math.floor(chart.high)
    apart = max(1, math.ceil((highest - lowest) / 5))
    powers = range(lowest, highest + 1, apart)
    ticks = [(f"{100 - 100 * (p - chart.low) / (chart.high - chart.low):.2f}", f"1e{p}") for p in powers]
    return [*ticks, ("100", "0")]


def _x_ticks(first: int, last: int) -> list[tuple[float, str]]:
    if last == first:
        return [(50.0, f"{first:,}")]
    ticks = [(100 * (v - first) / (last - first), f"{v:,.0f}") for v, _ in _nice(first, last, 5) if v == int(v)]
    inner = [(x, text) for x, text in ticks if 12 < x < 88]
    return [(0.0, f"{first:,}"), *inner, (100.0, f"{last:,}")]


def _nice(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """About `count` round numbers inside the bounds, with their texts."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    digits = max(0, -math.floor(math.log10(apart)) + (1 if apart / power == 2.5 else 0))
    values = [k * apart for k in range(math.ceil(low / apart), math.floor(high / apart) + 1)]
    large = max(abs(low), abs(high)) >= 1e5 or digits > 5
    return [(v, f"{v:.3g}" if large else f"{v:.{digits}f}") for v in values]
