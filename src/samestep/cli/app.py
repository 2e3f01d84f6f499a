"""The commands of the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from samestep import __version__
from samestep.cli import bench, checkpoint, compare, env, init, migrate, plan, schema, train
from samestep.cli.options import DebugOption

app = typer.Typer(
    name="samestep",
    help="Train language models on FSDP, DeepSpeed ZeRO, DDP or one process, and get the same steps.",
    epilog="Every command has its own --help. Exit codes: 0 done, 1 bad verdict, 2 bad request.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("init")(init.init)
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("compare")(compare.compare)
app.command("bench")(bench.bench)
app.add_typer(checkpoint.app, name="checkpoint")
app.command("migrate")(migrate.migrate)
app.command("env")(env.env)
app.command("schema")(schema.schema)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"samestep {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
