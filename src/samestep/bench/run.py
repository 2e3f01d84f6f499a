"""Runs the rounds of a benchmark and reports on them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from samestep import models, world
from samestep.bench.contenders import Contender, contenders, refuse_unequal_plans
from samestep.bench.order import Measured, Order
from samestep.bench.report import Settings, make_report
from samestep.bench.table import markdown, ratio_lines, rich_tables, sentences
from samestep.console import say
from samestep.engines.build import resolve_plan
from samestep.errors import EngineError, Interrupted, OutputError, SamestepError
from samestep.precision.plan import Plan
from samestep.recipe import Recipe
from samestep.training import folder
from samestep.training.launch import launch_ranks
from samestep.training.machine import versions
from samestep.training.signals import as_interrupt

# A file or a pipe has no width; the tables fit into this one.
_PIPED_COLUMNS = 140
REPORT, PAGE, ROUNDS = "bench.json", "bench.md", "rounds.jsonl"


def bench(
    recipe: Recipe,
    pairs: Sequence[tuple[str, str]],
    out: Path,
    *,
    against: Sequence[str] = (),
    settings: Settings,
    json_output: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Runs every contender in turn, round after round, and returns the content of bench.json.

    `pairs` are engines with their regimes, `against` names of peers. All is checked before the first round: that all
    would do the same work in the same dtypes. Every round is a new set of processes. Leaves in `out` bench.json,
    bench.md, rounds.jsonl (what each round measured) and NAME.log (what a contender printed). Raises SamestepError.
    """
    if world.launched():
        raise EngineError(
            "a benchmark starts the ranks of its engines itself and cannot run under torchrun.",
            where="bench",
            remedy="Start it without torchrun.",
        )
    found, missing = contenders(recipe, pairs, against)
    plans = [_plan(each) for each in found]
    refuse_unequal_plans(found, plans)
    out = out.absolute()
    prepare(out, found, overwrite=overwrite)
    console = Console(stderr=True)
    try:
        with as_interrupt():
            rounds = _rounds(found, settings, out, console)
    except (KeyboardInterrupt, Interrupted) as error:
        raise Interrupted(
            "the benchmark was interrupted; the turns that ended are here, without a report", where=str(out / ROUNDS)
        ) from error
    report = make_report(recipe.name, found, missing, plans[0], settings, rounds)
    folder.write_json(out / REPORT, report)
    folder.write_text(out / PAGE, markdown(report, versions()))
    if not json_output:
        _show(report, out)
    return report


def prepare(out: Path, found: Sequence[Contender], *, overwrite: bool) -> None:
    """Makes `out` a folder without results. OutputError when it has some that must stay, or cannot be written. Logs of
    a benchmark that came to no result are none."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        ours = [REPORT, PAGE, ROUNDS, *(f"{each.name}.log" for each in found)]
        there = [name for name in ours if (out / name).exists()]
        results = [name for name in there if not name.endswith(".log") and (out / name).stat().st_size]
        if results and not overwrite:
            raise OutputError(
                f"the folder holds {results[0]}.",
                where=str(out),
                remedy="Choose another with --out, or give --overwrite.",
            )
        for name in there:
            (out / name).unlink()
        folder.probe(out)
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}.", where=str(out), remedy="Choose another with --out."
        ) from error


def _plan(each: Contender) -> Plan:
    """The contender's plan, from its model's names, shapes and dtypes."""
    model = models.load_meta_model(each.recipe.model)
    models.unit_modules(model, each.recipe.engine.unit_classes)
    return resolve_plan(each.recipe, model)


def _rounds(found: Sequence[Contender], settings: Settings, out: Path, console: Console) -> dict[str, list[Measured]]:
    rounds: dict[str, list[Measured]] = {each.name: [] for each in found}
    lines = folder.JsonLines(out / ROUNDS)
    try:
        for number in range(1, settings.rounds + 1):
            for each in found:
                measured = _round(each, settings, out)
                rounds[each.name].append(measured)
                lines.write({"round": number, "engine": each.name, **measured.content()})
                middle = sorted(measured.step_seconds)[len(measured.step_seconds) // 2]
                say(console, f"round {number} of {settings.rounds}  {each.title}  {middle:.3f} s a step")
    finally:
        lines.close()
    return rounds


def _round(each: Contender, settings: Settings, out: Path) -> Measured:
    with tempfile.TemporaryDirectory(prefix="samestep-") as scratch:
        result = Path(scratch) / "measured.json"
        log = out / f"{each.name}.log"
        order = Order(
            recipe=each.recipe,
            peer=each.peer,
            warmup=settings.warmup,
            steps=settings.steps,
            split=settings.split,
            result=str(result),
            log=str(log),
        )
        try:
            launch_ranks("samestep.bench.worker", order.content(), each.recipe.engine, ranks=each.processes)
        except Interrupted:
            raise
        except SamestepError as error:
            # A rank that ended early came to write none.
            failed = SamestepError(str(error), where=f"{each.name} (its log: {log})" if log.exists() else each.name)
            failed.exit_code = error.exit_code
            raise failed from error
        return Measured(**json.loads(result.read_text(encoding="utf-8")))


def _show(report: dict[str, Any], out: Path) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_COLUMNS)
    for table in rich_tables(report):
        console.print(table)
    ratios = ratio_lines(report)
    lines = ["Step time over step time, median over rounds (smallest-largest):", *ratios] if ratios else []
    for line in [*lines, *sentences(report), ", ".join(str(out / name) for name in (REPORT, PAGE, ROUNDS))]:
        say(console, line)
