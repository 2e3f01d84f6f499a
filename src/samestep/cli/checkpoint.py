"""`samestep checkpoint`: look into checkpoints, check them, compare them, and make models of them."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.cli import exchange
from samestep.cli.options import DebugOption, JsonOption, OverwriteOption, print_json

app = typer.Typer(
    help="Look into checkpoints, check them, compare them, and make models of them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("import")(exchange.import_checkpoint)
app.command("convert")(exchange.convert)

CheckpointArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint's folder, or a run's: then its newest complete one.")
]


@app.command("inspect")
def inspect(path: CheckpointArgument, json_output: JsonOption = False, debug: DebugOption = False) -> None:
    """Show what is inside: step, engine, tensors, files. Reads manifest.json only."""
    from samestep.checkpoint.manifest import read_manifest
    from samestep.checkpoint.store import newest

    folder = newest(path)
    manifest = read_manifest(folder)
    if json_output:
        print_json({"checkpoint": str(folder), **asdict(manifest)})
        return
    typer.echo(f"{folder}")
    typer.echo(f"step {manifest.step} ({manifest.updates} updates), {manifest.rows_per_step} rows a step")
    ranks = "rank" if manifest.ranks == 1 else "ranks"
    typer.echo(f"{manifest.engine} on {manifest.ranks} {ranks}, regime {manifest.regime}")
    typer.echo(", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    typer.echo(f"{'':<28}{'tensors':>9}{'elements':>16}  dtype")
    for kind, (count, elements, dtypes) in _kinds(manifest.tensors).items():
        typer.echo(f"{kind:<28}{count:>9,}{elements:>16,}  {' and '.join(sorted(dtypes))}")
    total = sum(file.bytes for file in manifest.files.values())
    typer.echo(f"{len(manifest.files)} files, {total:,} bytes")


@app.command("verify")
def verify(path: CheckpointArgument, json_output: JsonOption = False, debug: DebugOption = False) -> None:
    """Read every file and compare it with the digest that was written; exit code 1 when one is damaged."""
    from samestep.checkpoint.manifest import damages, read_manifest
    from samestep.checkpoint.store import newest

    folder = newest(path)
    manifest = read_manifest(folder)
    found = damages(folder, manifest)
    if json_output:
        print_json({"checkpoint": str(folder), "files": len(manifest.files), "damages": found, "ok": not found})
    elif found:
        typer.echo("\n".join(f"{folder}: {damage}" for damage in found))
    else:
        typer.echo(f"{folder}: all {len(manifest.files)} files are as they were written")
    if found:
        raise typer.Exit(1)


@app.command("diff")
def diff(
    first: CheckpointArgument, second: CheckpointArgument, json_output: JsonOption = False, debug: DebugOption = False
) -> None:
    """Compare two checkpoints by value, whatever engines wrote them; exit code 1 when a tensor differs."""
    from samestep.checkpoint.difference import differences
    from samestep.checkpoint.store import newest

    a, b = newest(first), newest(second)
    found = differences(a, b)
    if json_output:
        print_json(
            {"first": str(a), "second": str(b), "equal": not found, "differences": [asdict(item) for item in found]}
        )
    elif not found:
        typer.echo("equal: every tensor, bit for bit")
    for item in [] if json_output else found:
        gap = "not finite" if item.gap is None else f"{item.gap:.3g}"
        detail = "" if item.elements is None else f": {item.elements:,} elements, largest gap {gap}"
        typer.echo(f"{item.name}: {item.what}{detail}")
    if found:
        raise typer.Exit(1)


@app.command("export")
def export(
    path: CheckpointArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the model; made new.")],
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="loaded, float32, bfloat16 or float16; by default the recipe's.")
    ] = None,
    merge: Annotated[
        bool | None,
        typer.Option(
            "--merge/--no-merge", help="Merge adapters into the model's weights; by default as the recipe says."
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Most bytes of weights in a file, such as 500MB or 5GB.")
    ] = "5GB",
    overwrite: OverwriteOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a model that transformers loads of a checkpoint, without starting ranks.

    Frozen weights, config and tokenizer come from the model that the run was made from.
    """
    from samestep.cli.options import known_name
    from samestep.planning.sizes import parse_size

    known_name(dtype, ("loaded", "float32", "bfloat16", "float16"))
    try:
        max_bytes = parse_size(max_shard_size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-shard-size") from error

    from samestep.checkpoint.store import newest
    from samestep.training.exporting import export_checkpoint

    folder = newest(path)
    place = Path.cwd() / out
    export_checkpoint(folder, place, dtype=dtype, merge=merge, max_bytes=max_bytes, overwrite=overwrite)
    typer.echo(f"{folder} is a model now: {out}")


def _kinds(tensors: dict[str, Any]) -> dict[str, tuple[int, int, set[str]]]:
    """By kind of state: number of tensors, of elements, and dtypes."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for name, tensor in tensors.items():
        kind = "masters" if name.startswith("model.") else f"optimizer {name.rpartition('.')[2]}"
        groups[kind].append(tensor)
    return {
        kind: (len(group), sum(math.prod(t.shape) for t in group), {t.dtype for t in group})
        for kind, group in groups.items()
    }
