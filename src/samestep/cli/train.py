"""`samestep train`: one run."""

from __future__ import annotations

from pathlib import Path
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
from samestep.errors import SamestepError


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
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in the run folder, from its newest complete checkpoint.")
    ] = False,
    resume_from: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Go on from a checkpoint, or the newest one of a run, in a new run folder."),
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Go on even if the recipe is not the one of the checkpoint.")
    ] = False,
    stop_after: Annotated[
        int | None, typer.Option(min=1, metavar="STEP", help="End after this step of the run, with a checkpoint.")
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a model as RECIPE says.

    Starts the recipe's ranks itself, or is one of them when torchrun started it. Results go to runs/NAME, or --out.
    Ctrl-C or SIGTERM ends the run after its step, leaves a checkpoint, exports what was trained; the exit code is 130.
    """
    _refuse(resume, resume_from, overwrite, allow_changes)
    checked = load_recipe(recipe, overrides, engine, precision, ranks)
    folder = output_folder(out, checked.name)
    from samestep.training.launch import train as run

    summary = run(
        checked,
        folder,
        port=port,
        json_output=json_output,
        overwrite=overwrite,
        resume=resume,
        resume_from=resume_from,
        allow_changes=allow_changes,
        stop_after=stop_after,
    )
    # Under torchrun only the main rank has a summary.
    if json_output and summary is not None:
        print_json(summary)
    if summary is not None and summary["status"] == "interrupted":
        raise typer.Exit(130)


def _refuse(resume: bool, resume_from: Path | None, overwrite: bool, allow_changes: bool) -> None:
    """Raises SamestepError for options that contradict each other."""
    if resume and resume_from is not None:
        raise SamestepError("two places to go on from", where="--resume and --resume-from", remedy="Give one.")
    if resume and overwrite:
        raise SamestepError(
            "--overwrite would delete the checkpoint to go on from", where="--resume", remedy="Leave one out."
        )
    if allow_changes and not resume and resume_from is None:
        raise SamestepError(
            "there is nothing to go on from", where="--allow-changes", remedy="Give --resume or --resume-from with it."
        )
