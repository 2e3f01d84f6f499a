"""`samestep compare`: one recipe on several engines."""

from __future__ import annotations

from typing import Annotated

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


def _engine_names(value: str) -> str:
    return ",".join(names(value, engine_name))


def _precision_names(value: str | None) -> str | None:
    return None if value is None else ",".join(names(value, precision_name))


def compare(
    recipe: RecipeArgument,
    engines: Annotated[
        str, typer.Option(metavar="A,B", callback=_engine_names, help="Engines to run, e.g. fsdp,zero3.")
    ],
    precisions: Annotated[
        str | None,
        typer.Option(
            metavar="X,Y",
            callback=_precision_names,
            help="Regimes to run every engine under, e.g. mixed,low; by default the recipe's own.",
        ),
    ] = None,
    overrides: SetOption = None,
    ranks: RanksOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run RECIPE on several engines and compare their steps.

    Results go to runs/NAME-compare, or --out. The exit code is 1 when engines under one regime differ.
    """
    listed = engines.split(",")
    checked = load_recipe(recipe, overrides, listed[0] if len(listed) == 1 else None, None, ranks)
    folder = output_folder(out, f"{checked.name}-compare")
    from samestep.compare.run import compare as run

    regimes = precisions.split(",") if precisions else [checked.precision.regime]
    report = run(checked, listed, regimes, folder, json_output=json_output, overwrite=overwrite)
    if json_output:
        print_json(report)
    if not report["ok"]:
        raise typer.Exit(1)
