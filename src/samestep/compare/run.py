"""Runs the variants one after the other and reports on them."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from samestep.compare import picture as pictures
from samestep.compare.child import Child, interrupted_by_sigterm
from samestep.compare.outcome import Outcome, read_outcome
from samestep.compare.pairs import compare_pair
from samestep.compare.progress import VariantProgress
from samestep.compare.table import table
from samestep.compare.variants import Variant, recipes, should_agree, variant
from samestep.compare.verdict import Subject, bound_for, is_ok, judge, sentence
from samestep.compare.weights import compare_weights
from samestep.errors import EngineError, OutputError, RunError, SamestepError
from samestep.recipe import Recipe
from samestep.training import folder

_POLL_SECONDS = 0.2
_REPORT, _PICTURE = "compare.json", "compare.png"


def compare(
    recipe: Recipe,
    engines: list[str],
    precisions: list[str],
    out: Path,
    *,
    json_output: bool = False,
    overwrite: bool = False,
    keep_masters: bool = False,
    picture: bool = True,
) -> dict[str, Any]:
    """Runs every engine under every regime, regime by regime; see `compare_variants`."""
    variants = [variant(engine, precision) for precision in precisions for engine in engines]
    return compare_variants(
        recipe,
        variants,
        out,
        json_output=json_output,
        overwrite=overwrite,
        keep_masters=keep_masters,
        picture=picture,
    )


def compare_variants(
    recipe: Recipe,
    variants: Sequence[Variant],
    out: Path,
    *,
    json_output: bool = False,
    overwrite: bool = False,
    keep_masters: bool = False,
    picture: bool = True,
) -> dict[str, Any]:
    """Runs the variants of a recipe into folders of `out`, one after the other, and compares every two of them.

    All variants are checked before the first one starts. Leaves out/NAME (the run) and out/NAME.log (what it printed)
    for each variant, compare.json, and compare.png unless `picture` is false; returns the content of compare.json. The
    masters (masters.safetensors, as large as the model in its master dtype) are removed once they are compared, unless
    `keep_masters`. Prints progress on stderr and, unless `json_output`, a table on stdout. Raises SamestepError.
    """
    out = out.absolute()
    checked = recipes(recipe, variants)
    _check_process()
    if picture:
        pictures.require_matplotlib()
    _prepare(out, overwrite=overwrite)
    try:
        outcomes = _run_all(variants, checked, out)
    except KeyboardInterrupt:
        _say(Console(stderr=True), f"interrupted; what was done is in {out}")
        raise
    report = _report(recipe.name, outcomes, checked)
    folder.write_json(out / _REPORT, report)
    if not keep_masters:
        for outcome in outcomes:
            outcome.masters.unlink(missing_ok=True)
    if picture:
        pictures.draw(outcomes, report["name"], out / _PICTURE)
    if not json_output:
        _show(report, out, with_picture=picture)
    return report


def _run_all(variants: Sequence[Variant], checked: Sequence[Recipe], out: Path) -> list[Outcome]:
    console = Console(stderr=True)
    outcomes: list[Outcome] = []
    with interrupted_by_sigterm():
        for number, (each, recipe) in enumerate(zip(variants, checked, strict=True), start=1):
            run = out / each.name
            with VariantProgress(console, name=each.name, number=number, variants=len(variants), run=run) as progress:
                outcome = _run_one(each, recipe, run, out / f"{each.name}.log", progress)
                progress.done(outcome.summary["last_loss"])
            outcomes.append(outcome)
    return outcomes


def _run_one(each: Variant, recipe: Recipe, run: Path, log: Path, progress: VariantProgress) -> Outcome:
    # Before the log: so every log has a run folder beside it, by which --overwrite knows it.
    folder.prepare(run, overwrite=False)
    with Child(recipe, run, log) as child:
        while not child.ended(_POLL_SECONDS):
            progress.look()
        progress.look()
        failure = child.failure()
    if failure:
        failed = SamestepError(str(failure), where=f"variant {each.name}")
        failed.exit_code = failure.exit_code
        raise failed
    outcome = read_outcome(each, run)
    if outcome.summary["status"] != "completed":
        raise RunError(
            f"the run was {outcome.summary['status']} after {len(outcome.steps)} steps; there is nothing to compare.",
            where=f"variant {each.name}",
            remedy="Run the comparison again with --overwrite.",
        )
    return outcome


def _report(name: str, outcomes: Sequence[Outcome], checked: Sequence[Recipe]) -> dict[str, Any]:
    bound = bound_for(checked, [outcome.device for outcome in outcomes])
    judged = []
    for (a, a_recipe), (b, b_recipe) in itertools.combinations(zip(outcomes, checked, strict=True), 2):
        pair = compare_pair(a.name, b.name, a.steps, b.steps, compare_weights(a.masters, b.masters))
        judged.append(judge(pair, bound, must_agree=should_agree(a_recipe, b_recipe)))
    subjects = [
        Subject(name=o.name, last_loss=o.summary["last_loss"], lost_update_share=o.lost_update_share) for o in outcomes
    ]
    return {
        "name": name,
        "variants": [outcome.described() for outcome in outcomes],
        "pairs": [{**j.pair.described(), "must_agree": j.must_agree, "within_bound": j.within_bound} for j in judged],
        "bound": {"max_relative_loss_gap": bound.max_relative_loss_gap, "because": bound.because},
        "verdict": sentence(judged, subjects, bound),
        "ok": is_ok(judged),
    }


def _show(report: dict[str, Any], out: Path, *, with_picture: bool) -> None:
    console = Console()
    console.print(table(report))
    _say(console, report["verdict"])
    _say(console, f"{out / _REPORT}, {out / _PICTURE}" if with_picture else f"{out / _REPORT}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _check_process() -> None:
    from samestep import world

    if world.launched():
        raise EngineError(
            "a comparison starts the ranks of its variants itself and cannot run under torchrun.",
            where="compare",
            remedy="Start it without torchrun.",
        )


def _is_run(entry: Path) -> bool:
    """Whether this is a run's folder, or one that a run never came to fill."""
    return entry.is_dir() and ((entry / "recipe.yaml").exists() or not any(entry.iterdir()))


def _prepare(out: Path, *, overwrite: bool) -> None:
    """Makes `out` an empty folder. OutputError when it holds anything that is not of a comparison, or may not go."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        entries = sorted(out.iterdir())
        if entries and not overwrite:
            raise OutputError(
                "the folder is not empty.", where=str(out), remedy="Choose another with --out, or give --overwrite."
            )
        runs = [entry for entry in entries if _is_run(entry)]
        files = [entry for entry in entries if entry.is_file()]
        known = {run.name for run in runs} | {f"{run.name}.log" for run in runs}
        known |= {name for kept in (_REPORT, _PICTURE) for name in (kept, f".{kept}.partial")}
        others = [entry.name for entry in entries if entry.name not in known]
        if others:
            raise OutputError(
                f"the folder holds {others[0]}, which is not of a comparison.",
                where=str(out),
                remedy="Choose another with --out; --overwrite replaces comparisons only.",
            )
        for run in runs:
            # Refuses a folder that holds anything but a run, and empties it.
            folder.prepare(run, overwrite=True)
            shutil.rmtree(run)
        for file in files:
            file.unlink()
        probe = out / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}.", where=str(out), remedy="Choose another with --out."
        ) from error
