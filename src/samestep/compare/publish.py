"""Writes a comparison: compare.json, the page and the picture; prints the table and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from samestep.compare import page
from samestep.compare import picture as pictures
from samestep.compare.outcome import Outcome
from samestep.compare.table import table
from samestep.console import say
from samestep.errors import OutputError
from samestep.training import folder

REPORT, PICTURE, PAGE = "compare.json", "compare.png", "compare.html"


def publish(
    report: dict[str, Any],
    outcomes: Sequence[Outcome],
    out: Path,
    *,
    picture: bool,
    json_output: bool,
) -> None:
    """Writes a report into the folder `out`, each file completely or not at all. Raises OutputError."""
    folder.write_json(out / REPORT, report)
    folder.write_text(out / PAGE, page.page(report, outcomes))
    if picture:
        pictures.draw(outcomes, report["name"], out / PICTURE)
    if json_output:
        return
    console = Console()
    console.print(table(report))
    say(console, report["verdict"])
    files = [REPORT, PAGE, *([PICTURE] if picture else [])]
    say(console, ", ".join(str(out / name) for name in files))


def check(out: Path, *, overwrite: bool) -> None:
    """Makes the folder of a comparison of finished runs. OutputError when one is there and may not go."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = [name for name in (REPORT, PAGE, PICTURE) if (out / name).exists()]
        folder.probe(out)
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}.", where=str(out), remedy="Choose another with --out."
        ) from error
    if there and not overwrite:
        raise OutputError(
            f"the folder holds {there[0]}.", where=str(out), remedy="Choose another with --out, or give --overwrite."
        )
