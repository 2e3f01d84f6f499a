"""`samestep plan`: what a recipe will do, without doing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from samestep.planning.cluster.description import Cluster
    from samestep.recipe import Recipe


def _predict(recipe: Recipe, cluster: Cluster, json_output: bool) -> None:
    """Prints the prediction for a cluster; exits with 1 where the recipe does not fit its devices."""
    from samestep.planning.cluster.prediction import predict

    report = predict(recipe, cluster)
    if json_output:
        print_json(report)
    else:
        from rich.console import Console

        from samestep.planning.cluster.show import show

        show(report, Console())
    if not report["memory"]["fits"]:
        raise typer.Exit(1)


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
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|FIELD=VALUE",
            help="Predict step time, MFU and cost on this cluster: a YAML file, or e.g. nodes=16; repeatable.",
        ),
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what RECIPE will do: dtypes, memory per rank, and updates that rounding will make vanish.

    Nothing is trained and no accelerator is needed. Memory is shown for every engine and regime side by side.
    With --cluster, how long a step takes on devices that need not be there (exit code 1 where it does not fit).
    """
    if cluster:
        if ranks is not None:
            raise typer.BadParameter("the cluster has its number of devices; leave --ranks out", param_hint="--cluster")
        if device_memory is not None:
            raise typer.BadParameter("give --cluster memory=SIZE instead of --device-memory", param_hint="--cluster")
        from samestep.planning.cluster.description import load

        described = load(cluster)
        _predict(load_recipe(recipe, overrides, engine, precision, described.ranks), described, json_output)
        return
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
