"""Runs the variants one after the other and reports on them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from samestep.compare import kept
from samestep.compare import picture as pictures
from samestep.compare.publish import PAGE, PICTURE, REPORT, publish
from samestep.compare.report import make_report
from samestep.compare.schedule import refuse_device_sets, run_all
from samestep.compare.variants import Variant, recipes, variant
from samestep.console import say
from samestep.errors import EngineError, OutputError, PrecisionError
from samestep.recipe import Recipe
from samestep.training import folder


def compare(recipe: Recipe, engines: list[str], precisions: list[str], out: Path, **options: Any) -> dict[str, Any]:
    """Runs every engine under every regime, regime by regime; see `compare_variants`, also for the options."""
    variants = [variant(engine, precision) for precision in precisions for engine in engines]
    return compare_variants(recipe, variants, out, **options)


def compare_variants(
    recipe: Recipe,
    variants: Sequence[Variant],
    out: Path,
    *,
    json_output: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    keep_masters: bool = False,
    picture: bool = True,
    device_sets: Sequence[str] = (),
) -> dict[str, Any]:
    """Runs the variants of a recipe into folders of `out` and compares every two of one seed.

    They run one after the other, or side by side on `device_sets`, each of which ("0,1") is for one variant at a time.
    All variants are checked before the first one starts. Leaves out/NAME (the run) and out/NAME.log (what it printed)
    for each variant, compare.json, compare.html, and compare.png unless `picture` is false; returns the content of
    compare.json. `resume` goes on with a comparison that was killed: runs that are whole are taken as they are, those
    with a checkpoint go on from it, others start anew. The masters (masters.safetensors, as large as the model in its
    master dtype) are removed once they are compared, unless `keep_masters`. Prints progress on stderr and, unless
    `json_output`, a table on stdout. Raises SamestepError.
    """
    out = out.absolute()
    checked = recipes(recipe, variants)
    _check_process()
    refuse_device_sets(device_sets, checked)
    if picture:
        pictures.require_matplotlib()
    states: list[kept.State] = ["absent"] * len(variants)
    if resume:
        states = kept.states(out, variants, checked)
    else:
        _prepare(out, overwrite=overwrite)
    if resume and (report := kept.finished(out, variants, states)):
        say(Console(stderr=True), f"nothing is left to do: {out / REPORT}")
        return report
    _guard(variants, checked, states)
    kept.remember(out, variants, checked)
    try:
        outcomes = run_all(variants, checked, states, out, device_sets)
    except KeyboardInterrupt:
        say(Console(stderr=True), f"interrupted; what was done is in {out}: --resume goes on with it")
        raise
    report = make_report(recipe.name, outcomes, tested=_tested(variants))
    publish(report, outcomes, out, picture=picture, json_output=json_output)
    if not keep_masters:
        for outcome in outcomes:
            outcome.masters.unlink(missing_ok=True)
    return report


def _guard(variants: Sequence[Variant], checked: Sequence[Recipe], states: Sequence[kept.State]) -> None:
    """Has the guard refuse a variant before the first one starts, not when its turn comes."""
    for each, recipe, state in zip(variants, checked, states, strict=True):
        if state in ("absent", "broken") and recipe.precision.loses_updates:
            # It looks at the model itself; other comparisons need neither torch nor a model in this process.
            from samestep.training.guard import refuse_recipe

            try:
                refuse_recipe(recipe)
            except PrecisionError as error:
                raise PrecisionError(str(error), where=f"variant {each.name}") from error


def _tested(variants: Sequence[Variant]) -> list[str]:
    """Fields of the recipe in which variants of one seed may differ, since that is what is compared."""
    varied = [setting.partition("=")[0] for each in variants for setting in each.overrides]
    return list(dict.fromkeys(["engine.name", "precision.regime", *varied]))


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
                "the folder is not empty.",
                where=str(out),
                remedy="Choose another with --out, or give --overwrite, or --resume.",
            )
        runs = [entry for entry in entries if _is_run(entry)]
        files = [entry for entry in entries if entry.is_file()]
        known = {run.name for run in runs} | {f"{run.name}.log" for run in runs}
        known |= {name for ours in (REPORT, PICTURE, PAGE, kept.REQUESTS) for name in (ours, f".{ours}.partial")}
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
        folder.probe(out)
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}.", where=str(out), remedy="Choose another with --out."
        ) from error
