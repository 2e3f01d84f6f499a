"""Loss and gradient-norm curves of all variants, drawn so that curves on top of each other can all be seen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from samestep.compare.outcome import Outcome
from samestep.errors import OutputError, SamestepError

# Okabe and Ito's palette, which people with any kind of colour blindness can tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
_DASHES = ((0, (4, 3)), (0, (1, 2)), (0, (7, 2, 1, 2)), (0, (2, 1)))
# Line widths in points; a dense curve drawn as wide as a sparse one would be a smear.
_WIDEST, _WIDEST_DENSE, _DENSE_STEPS = 6.5, 4.5, 60
_MIDDLE, _THINNEST = 1.8, 1.4
# What fits below the curves, in letters; a line sample and its gaps take the room of some.
_LEGEND_LETTERS, _SAMPLE_LETTERS = 140, 13


def require_matplotlib() -> None:
    """Raises SamestepError when no picture can be drawn."""
    if find_spec("matplotlib") is None:
        raise SamestepError(
            "the picture needs matplotlib, which is not installed.",
            where="compare",
            remedy="Run: pip install 'samestep[plots]' - or leave the picture out with --no-picture.",
        )


def draw(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Draws a PNG to `path`, completely or not at all. Raises OutputError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.2), dpi=120, layout="constrained")
    losses, norms = figure.subplots(1, 2)
    groups = _same_curves(outcomes)
    for axes, quantity, heading in ((losses, "loss", "training loss"), (norms, "grad_norm", "gradient norm")):
        for number, group in enumerate(groups):
            for position, index in enumerate(group):
                looks = _looks(number, position, len(group), dense=len(outcomes[index].steps) > _DENSE_STEPS)
                _plot(axes, outcomes[index], quantity, color=_COLOURS[index % len(_COLOURS)], **looks)
        axes.set_title(heading, loc="left", fontsize=13)
        axes.set_xlabel("optimizer step", fontsize=11)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.02)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=14)
    labels = [_label(outcomes, group, position) for group in groups for position in range(len(group))]
    lines = losses.get_lines()
    columns = max(1, min(len(lines), _LEGEND_LETTERS // (max(map(len, labels)) + _SAMPLE_LETTERS)))
    figure.legend(lines, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=5, fontsize=11)
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="png")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"cannot be written: {error.strerror or error}.", where=str(path)) from error


def _same_curves(outcomes: Sequence[Outcome]) -> list[list[int]]:
    """Positions of the outcomes, those with exactly the same two curves together."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, outcome in enumerate(outcomes):
        groups.setdefault(tuple((s["loss"], s.get("grad_norm")) for s in outcome.steps), []).append(index)
    return list(groups.values())


def _looks(group: int, position: int, members: int, *, dense: bool) -> dict[str, Any]:
    """Width and dashes: curves that coincide look like a cable, a thinner dashed core on every wider one."""
    widest = _WIDEST_DENSE if dense else _WIDEST
    if members == 1:
        # On top, since nothing else runs there.
        return {
            "linewidth": _MIDDLE,
            "linestyle": "-" if group < 2 else _DASHES[(group - 2) % len(_DASHES)],
            "zorder": 3,
        }
    if position == 0:
        return {"linewidth": widest, "linestyle": "-", "alpha": 0.4}
    second = widest * 0.5
    width = second - (second - _THINNEST) * (position - 1) / max(1, members - 2)
    return {"linewidth": width, "linestyle": _DASHES[(position - 1) % len(_DASHES)], "dash_capstyle": "butt"}


def _plot(axes: Any, outcome: Outcome, quantity: str, **looks: Any) -> None:
    steps = [record["step"] for record in outcome.steps]
    values = [float("nan") if record.get(quantity) is None else record[quantity] for record in outcome.steps]
    axes.plot(steps, values, marker="o" if len(steps) == 1 else None, **looks)


def _label(outcomes: Sequence[Outcome], group: Sequence[int], position: int) -> str:
    name = outcomes[group[position]].name
    return name if position == 0 else f"{name} (= {outcomes[group[0]].name})"
