"""`samestep plan`: what a recipe will do, without doing it."""

from __future__ import annotations

from typing import Annotated

import typer

from samestep.cli.options import (
    DebugOption,
    EngineOption,
    JsonOption,
    PrecisionOption,
    RanksOption,
    RecipeArgument,
    SetOption,
    load_recipe,
    print_json,
)


def plan(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    engine: EngineOption = None,
    precision: PrecisionOption = None,
    ranks: RanksOption = None,
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of one device, e.g. 80GB: marks what fits into it."),
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what RECIPE will do: dtypes, memory per rank, and updates that rounding will make vanish.

    Nothing is trained and no accelerator is needed. Memory is shown for every engine and regime side by side.
    """
    checked = load_recipe(recipe, overrides, engine, precision, ranks)
    from samestep.planning.sizes import parse_size

    try:
        size = None if device_memory is None else parse_size(device_memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device-memory") from error
    from samestep.planning.report import plan as report_of

    report = report_of(checked, device_memory=size)
    if json_output:
        print_json(report)
        return
    from rich.console import Console

    from samestep.planning.tables import show

    show(report, Console())
