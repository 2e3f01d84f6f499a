"""Options that several commands share, and how they change a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

if TYPE_CHECKING:
    from samestep.recipe import Recipe


def engine_name(value: str | None) -> str | None:
    """`value` when it is the name of an engine; a usage error with the nearest name otherwise."""
    from samestep.recipe.schema import EngineName

    return known_name(value, get_args(EngineName))


def precision_name(value: str | None) -> str | None:
    """`value` when it is the name of a regime; a usage error with the nearest name otherwise."""
    from samestep.recipe.schema import RegimeName

    return known_name(value, get_args(RegimeName))


def names(value: str, checked: Any) -> list[str]:
    """The names in "a,b", each `checked`; a usage error for an empty list or a name given twice."""
    listed = [name.strip() for name in value.split(",") if name.strip()]
    if not listed:
        raise typer.BadParameter("give at least one name")
    for name in listed:
        checked(name)
        if listed.count(name) > 1:
            raise typer.BadParameter(f"{name} is given twice")
    return listed


def load_recipe(
    path: Path, overrides: Sequence[str] | None, engine: str | None, precision: str | None, ranks: int | None
) -> Recipe:
    """The recipe file with the command line's overrides; --engine, --precision and --ranks win over --set."""
    from samestep.recipe import load

    given = {"engine.name": engine, "precision.regime": precision, "engine.ranks": ranks}
    short = [f"{field}={value}" for field, value in given.items() if value is not None]
    return load(path, [*(overrides or ()), *short])


def output_folder(out: Path | None, name: str) -> Path:
    """Where a run goes: `out`, or runs/NAME, under the current folder. OutputError when a file is in the way."""
    from samestep.errors import OutputError

    folder = Path.cwd() / (out or Path("runs") / name)
    try:
        nearest = next(place for place in (folder, *folder.parents) if place.exists())
    except OSError as error:
        raise OutputError(f"{error.strerror}.", where=str(folder), remedy="Choose another --out.") from None
    if not nearest.is_dir():
        raise OutputError("is a file, not a folder.", where=str(nearest), remedy="Choose another --out.")
    return folder


def print_json(value: Mapping[str, Any]) -> None:
    """Print `value` as JSON on standard output."""
    typer.echo(json.dumps(dict(value), indent=2))


def known_name(value: str | None, known: Sequence[str]) -> str | None:
    """`value` when it is None or one of `known`; a usage error with the nearest name otherwise."""
    from samestep.recipe.suggest import did_you_mean

    if value is not None and value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}{did_you_mean(value, known)}")
    return value


RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Set a field of the recipe, e.g. train.steps=10; repeatable."),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", callback=engine_name, help="Set engine.name: single, ddp, fsdp, hsdp, zero1, zero2 or zero3."
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        callback=precision_name,
        help="Set precision.regime: full, mixed, mixed-stochastic, low, low-stochastic, low-kahan or mixed-fp8.",
    ),
]
RanksOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="Set engine.ranks.")]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where the results go.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the results of an earlier run in the same folder.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
