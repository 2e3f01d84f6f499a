"""`samestep compare`: one recipe on several engines, or runs that have ended side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.cli.options import (
    DebugOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    RanksOption,
    SetOption,
    engine_name,
    known_name,
    load_recipe,
    names,
    output_folder,
    precision_name,
    print_json,
)


def _engine_names(value: str | None) -> str | None:
    return None if value is None else ",".join(names(value, engine_name))


def _precision_names(value: str | None) -> str | None:
    return None if value is None else ",".join(names(value, precision_name))


def _variant_names(value: str | None) -> str | None:
    return None if value is None else ",".join(names(value, _check_variant))


def _check_variant(text: str) -> None:
    engine, plus, precision = text.partition("+")
    if not plus:
        raise typer.BadParameter(f"{text!r} is not ENGINE+REGIME, such as fsdp+mixed")
    engine_name(engine)
    precision_name(precision)


EnginesOption = Annotated[
    str | None, typer.Option(metavar="A,B", callback=_engine_names, help="Engines to run, e.g. fsdp,zero3.")
]
PrecisionsOption = Annotated[
    str | None,
    typer.Option(
        metavar="X,Y",
        callback=_precision_names,
        help="Regimes to run every engine under, e.g. mixed,low; by default the recipe's own.",
    ),
]
VariantsOption = Annotated[
    str | None,
    typer.Option(
        metavar="A+X,B+Y",
        callback=_variant_names,
        help="Instead of --engines and --precisions: just these, e.g. fsdp+mixed,zero3+mixed,fsdp+low.",
    ),
]
KeepMastersOption = Annotated[
    bool,
    typer.Option("--keep-masters", help="Keep each run's masters.safetensors, as large as the model, once compared."),
]
NoPictureOption = Annotated[bool, typer.Option("--no-picture", help="Draw no compare.png; needs no matplotlib.")]
SourcesArgument = Annotated[
    list[Path], typer.Argument(metavar="RECIPE | RUN_A RUN_B...", help="A recipe to run, or runs and logs to compare.")
]
VaryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--vary", metavar="FIELD=A,B", help="Run every value of a field, e.g. train.optimizer.lr=1e-6,1e-5; repeatable."
    ),
]
SeedsOption = Annotated[str | None, typer.Option(metavar="0,1,2", help="Run everything with each of these seeds.")]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with a comparison that was interrupted; runs that are done stay.")
]
DevicesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--devices",
        metavar="0,1",
        help="Run variants side by side: one at a time on each set of devices; repeatable, e.g. --devices 0,1 "
        "--devices 2,3.",
    ),
]
UnderTestOption = Annotated[
    list[str] | None,
    typer.Option(
        "--under-test", metavar="FIELD", help="Of finished runs: a field that may differ, e.g. precision; repeatable."
    ),
]
AllowUnequalOption = Annotated[
    bool, typer.Option("--allow-unequal", help="Compare finished runs although they did not do the same work.")
]
ColumnsOption = Annotated[
    str | None,
    typer.Option(metavar="step=A,loss=B", help="Of logs: names of the columns (step, loss, grad_norm, lr, tokens)."),
]


def compare(
    sources: SourcesArgument,
    engines: EnginesOption = None,
    precisions: PrecisionsOption = None,
    variants: VariantsOption = None,
    vary: VaryOption = None,
    seeds: SeedsOption = None,
    overrides: SetOption = None,
    ranks: RanksOption = None,
    devices: DevicesOption = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    under_test: UnderTestOption = None,
    allow_unequal: AllowUnequalOption = False,
    columns: ColumnsOption = None,
    keep_masters: KeepMastersOption = False,
    no_picture: NoPictureOption = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run RECIPE on several engines, one after the other, and compare their steps; or compare runs that have ended and
    logs of other tools (CSV, JSONL, trainer_state.json, TensorBoard).

    Results go to runs/NAME-compare, or --out: compare.html, compare.json, compare.png, and a run folder and a log for
    each variant. The exit code is 1 when engines under one regime differ: in any bit on the CPU, by more than a stated
    tolerance on other devices.
    """
    of_recipe = {"--engines": engines, "--precisions": precisions, "--variants": variants, "--vary": vary}
    of_recipe |= {"--seeds": seeds, "--set": overrides, "--ranks": ranks, "--devices": devices, "--resume": resume}
    of_recipe |= {"--keep-masters": keep_masters}
    of_runs = {"--under-test": under_test, "--allow-unequal": allow_unequal, "--columns": columns}
    options: dict[str, Any] = {"overwrite": overwrite, "picture": not no_picture, "json_output": json_output}
    if len(sources) > 1:
        _refuse(of_recipe, "is for a recipe, not for runs that have ended")
        report = _compare_finished(sources, under_test, columns, allow_unequal, out, **options)
    else:
        _refuse(of_runs, "is for two or more runs that have ended")
        if resume and overwrite:
            raise typer.BadParameter("give one of them", param_hint="--resume, --overwrite")
        options |= {"resume": resume, "keep_masters": keep_masters, "device_sets": devices or ()}
        report = _run_variants(sources[0], (engines, precisions, variants), vary, seeds, overrides, ranks, out, options)
    if json_output:
        print_json(report)
    if not report["ok"]:
        raise typer.Exit(1)


def _refuse(options: dict[str, Any], why: str) -> None:
    """A usage error for the first of these options that was given."""
    if given := next((name for name, value in options.items() if value), None):
        raise typer.BadParameter(why, param_hint=given)


def _run_variants(
    recipe: Path,
    chosen: tuple[str | None, str | None, str | None],
    vary: list[str] | None,
    seeds: str | None,
    overrides: list[str] | None,
    ranks: int | None,
    out: Path | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    engines, precisions, variants = chosen
    if recipe.is_dir():
        raise typer.BadParameter("is a folder; give a recipe, or two runs", param_hint=str(recipe))
    several = engines is not None or variants is not None or vary or seeds
    if not several or (variants is not None and (engines is not None or precisions is not None)):
        raise typer.BadParameter(
            "give --engines (and --precisions), or --variants, --vary or --seeds", param_hint="--engines, --variants"
        )
    from samestep.compare import run
    from samestep.compare.sets import expand, varied

    settings = [varied(text) for text in vary or ()]
    numbers = _seed_numbers(seeds)
    listed = [tuple(text.split("+")) for text in variants.split(",")] if variants else []
    first_engine = engines.split(",")[0] if engines else listed[0][0] if listed else None
    # The recipe's own engine does not run when others are named, so its faults do not count.
    checked = load_recipe(recipe, overrides, first_engine, None, ranks)
    if not listed:
        regimes = precisions.split(",") if precisions else [checked.precision.regime]
        names_of_engines = engines.split(",") if engines else [checked.engine.name]
        listed = [(engine, regime) for regime in regimes for engine in names_of_engines]
    pairs = [(engine, regime) for engine, regime in listed]
    folder = output_folder(out, f"{checked.name}-compare")
    return run.compare_variants(checked, expand(pairs, settings, numbers), folder, **options)


def _compare_finished(
    sources: list[Path],
    under_test: list[str] | None,
    columns: str | None,
    allow_unequal: bool,
    out: Path | None,
    *,
    overwrite: bool,
    picture: bool,
    json_output: bool,
) -> dict[str, Any]:
    from samestep.compare import publish
    from samestep.compare.finished import compare_finished

    names_of_columns = _column_names(columns)
    folder = output_folder(out, "compare")
    if picture:
        from samestep.compare.picture import require_matplotlib

        require_matplotlib()
    report, outcomes = compare_finished(
        sources, tested=under_test or (), columns=names_of_columns, allow_unequal=allow_unequal
    )
    publish.check(folder, overwrite=overwrite)
    publish.publish(report, outcomes, folder, picture=picture, json_output=json_output)
    return report


def _seed_numbers(text: str | None) -> list[int]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers, such as 0,1,2", param_hint="--seeds")
    numbers = [int(part) for part in parts]
    if len(set(numbers)) < len(numbers):
        raise typer.BadParameter("a seed is given twice", param_hint="--seeds")
    return numbers


def _column_names(text: str | None) -> dict[str, str]:
    from samestep.compare.logs import KNOWN

    found: dict[str, str] = {}
    for part in (text or "").split(",") if text else ():
        quantity, equals, name = part.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"{part!r} is not QUANTITY=COLUMN", param_hint="--columns")
        known_name(quantity.strip(), list(KNOWN))
        found[quantity.strip()] = name.strip()
    return found
