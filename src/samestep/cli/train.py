"""`samestep train`: one run."""

from __future__ import annotations

from typing import Annotated

import typer

from samestep.cli.options import (
    DebugOption,
    EngineOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    PrecisionOption,
    RanksOption,
    RecipeArgument,
    SetOption,
    load_recipe,
    output_folder,
    print_json,
)


def train(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    engine: EngineOption = None,
    precision: PrecisionOption = None,
    ranks: RanksOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="PORT", help="Port at which the ranks meet; by default a free one."),
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a model as RECIPE says.

    Starts the recipe's ranks itself, or is one of them when torchrun started it. Results go to runs/NAME, or --out.
    Ctrl-C or SIGTERM ends the run after its step, exports what was trained, and the exit code is 130.
    """
    checked = load_recipe(recipe, overrides, engine, precision, ranks)
    folder = output_folder(out, checked.name)
    from samestep.training.launch import train as run

    summary = run(checked, folder, port=port, json_output=json_output, overwrite=overwrite)
    # Under torchrun only the main rank has a summary.
    if json_output and summary is not None:
        print_json(summary)
    if summary is not None and summary["status"] == "interrupted":
        raise typer.Exit(130)
