"""`samestep compare`: one recipe on several engines."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from samestep.cli.options import (
    DebugOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    RanksOption,
    RecipeArgument,
    SetOption,
    engine_name,
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


def compare(
    recipe: RecipeArgument,
    engines: EnginesOption = None,
    precisions: PrecisionsOption = None,
    variants: VariantsOption = None,
    overrides: SetOption = None,
    ranks: RanksOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    keep_masters: KeepMastersOption = False,
    no_picture: NoPictureOption = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run RECIPE on several engines, one after the other, and compare their steps.

    Results go to runs/NAME-compare, or --out: compare.json, compare.png, and a run folder and a log for each variant.
    The exit code is 1 when engines under one regime differ: in any bit on the CPU, by more than a stated tolerance on
    other devices.
    """
    if (engines is None) == (variants is None) or (variants is not None and precisions is not None):
        raise typer.BadParameter("give --engines (and --precisions), or --variants", param_hint="--engines, --variants")
    pairs = [tuple(text.split("+")) for text in variants.split(",")] if variants else []
    listed = engines.split(",") if engines else [pairs[0][0]]
    # The recipe's own engine does not run, so its faults do not count.
    checked = load_recipe(recipe, overrides, listed[0], None, ranks)
    folder = output_folder(out, f"{checked.name}-compare")
    options: dict[str, Any] = {
        "json_output": json_output,
        "overwrite": overwrite,
        "keep_masters": keep_masters,
        "picture": not no_picture,
    }
    from samestep.compare import run

    if variants:
        from samestep.compare.variants import variant

        report = run.compare_variants(checked, [variant(*pair) for pair in pairs], folder, **options)
    else:
        regimes = precisions.split(",") if precisions else [checked.precision.regime]
        report = run.compare(checked, listed, regimes, folder, **options)
    if json_output:
        print_json(report)
    if not report["ok"]:
        raise typer.Exit(1)
