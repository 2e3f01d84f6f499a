"""`samestep checkpoint import` and `convert`: to and from the checkpoints of other tools."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.options import (
    DebugOption,
    JsonOption,
    OverwriteOption,
    PrecisionOption,
    SetOption,
    known_name,
    load_recipe,
    print_json,
)

KindOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="What to read it as, where the files allow several: deepspeed, deepspeed-universal, fsdp-full, "
        "fsdp-sharded, accelerate, trainer or torch.",
    ),
]


def import_checkpoint(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A checkpoint of another tool: its folder or file.")],
    recipe: Annotated[Path, typer.Option("--recipe", metavar="RECIPE", help="The recipe that goes on with it.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the checkpoint; made new.")],
    overrides: SetOption = None,
    precision: PrecisionOption = None,
    kind: KindOption = None,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The step of the run that it is; by default its own count.")
    ] = None,
    order: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Names of the optimizer's parameters by position, one a line, where they are not clear.",
        ),
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a checkpoint of a recipe's run of what DeepSpeed, accelerate, a Trainer or a torch script saved.

    Weights, optimizer state and step come along, for any engine and number of ranks; the rest is listed. Go on with
    `samestep train RECIPE --resume-from DIR`.
    """
    from samestep.checkpoint.importing.recognise import KINDS
    from samestep.training.importing import import_checkpoint as run

    known_name(kind, KINDS)
    checked = load_recipe(recipe, overrides, None, precision, None)
    found = run(Path.cwd() / source, checked, Path.cwd() / out, kind=kind, step=step, order=order)
    if json_output:
        print_json({**asdict(found), "folder": str(found.folder)})
        return
    typer.echo(
        f"{found.kind}, {found.parameters} parameters, step {found.step} ({found.updates} updates): {found.folder}"
    )
    for title, lines in (("changed", found.changed), ("not brought in", found.left)):
        for line in lines:
            typer.echo(f"{title}: {line}")


def convert(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint's folder, or a run's: then its newest complete one.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="deepspeed-universal or torch.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the result; made new.")],
    overwrite: OverwriteOption = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a checkpoint of another tool of one of ours, without starting ranks.

    deepspeed-universal: what DeepSpeed loads with load_universal. torch: state.pt, the full state dicts of model and
    optimizer, which torch.load reads with weights_only.
    """
    from samestep.checkpoint.store import newest
    from samestep.training.converting import FORMATS
    from samestep.training.converting import convert as run

    known_name(to, list(FORMATS))
    folder = newest(path)
    left = run(folder, Path.cwd() / out, to=to, overwrite=overwrite)
    if json_output:
        print_json({"checkpoint": str(folder), "to": to, "out": str(out), "left": left})
        return
    typer.echo(f"{folder} is a {to} checkpoint now: {out}")
    for line in left:
        typer.echo(f"not written: {line}")
