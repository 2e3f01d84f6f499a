"""`samestep migrate`: configurations of other tools as recipes, and the other way round."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli.options import DebugOption, JsonOption, SetOption, known_name, print_json

if TYPE_CHECKING:
    from samestep.crosscheck.check import Compared
    from samestep.migrate import Migration, Source
    from samestep.migrate.reading import Reading
    from samestep.migrate.rows import Entry


def target_name(value: str | None) -> str | None:
    """`value` when it is the name of a target; a usage error otherwise."""
    from samestep.migrate import TARGETS

    return known_name(value, TARGETS)


def kind_name(value: str | None) -> str | None:
    """`value` when it is the name of a kind of configuration; a usage error otherwise."""
    from samestep.migrate import KINDS

    return known_name(value, KINDS)


def migrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration: YAML, JSON or TOML.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="TARGET", callback=target_name, help="samestep, deepspeed, accelerate-fsdp or accelerate-deepspeed."
        ),
    ] = "samestep",
    kind: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="KIND",
            callback=kind_name,
            help="deepspeed, accelerate, transformers, fsdp-config, torchtitan or samestep; otherwise recognised.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The file to write.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file when it exists.")] = False,
    overrides: SetOption = None,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Go on although the target cannot say everything.")
    ] = False,
    lint: Annotated[bool, typer.Option("--lint", help="Only show what is wrong with FILE.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Run both on a tiny model and two CPU ranks, and compare what they did.")
    ] = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Turn the configuration of one tool into that of another, and say what becomes of every field.

    Nothing is dropped silently: what the target cannot say is refused without --allow-lossy. What FILE does not say,
    such as the model, is asked for in a terminal and given with --set elsewhere, e.g. --set model.path=PATH.
    """
    from samestep.migrate import migrate as run
    from samestep.migrate import read, read_as, recognise
    from samestep.migrate.given import given_values

    if out is not None:
        _require_place(out, overwrite, file)
    source = read(file)
    given = given_values(overrides or ())
    known_kind = recognise(source, kind, _choose)
    reading = read_as(known_kind, source, given)
    if lint:
        _lint(source, reading, json_output)
        return
    result = run(source, reading, to, given)
    if out is not None and result.missing and sys.stdin.isatty():
        given |= _ask(result.missing)
        result = run(source, reading := read_as(known_kind, source, given), to, given)
    refused = bool(result.impossible) and not allow_lossy
    compared = _compare(source, reading, result, given) if check and not refused else []
    _report(source, result, compared, json_output=json_output, with_text=out is None and not check)
    _refuse(source, result, allow_lossy, out)
    if any(row.verdict == "different" for row in compared):
        raise typer.Exit(1)
    if out is not None:
        _write(out, result, json_output)


def _write(out: Path, result: Migration, json_output: bool) -> None:
    from samestep.cli.init import write_atomically

    write_atomically(out, result.text)
    typer.echo(f"Wrote {out}.", err=json_output)


def _compare(source: Source, reading: Reading, result: Migration, given: dict[str, Any]) -> list[Compared]:
    from samestep.crosscheck.check import check

    return check(source, reading, result, given)


def _report(source: Source, result: Migration, compared: list[Compared], *, json_output: bool, with_text: bool) -> None:
    if json_output:
        print_json(result.as_json() | ({"check": [vars(row) for row in compared]} if compared else {}))
    else:
        _show(source, result, with_text=with_text)
        _show_check(compared)


def _show_check(compared: list[Compared]) -> None:
    if compared:
        typer.echo("\nRun on two CPU ranks:")
    for row in compared:
        typer.echo(f"  {row.verdict:<10} {row.quantity}: {row.source} in the source, {row.target} in the target")


def _choose(question: str, kinds: list[str]) -> str | None:
    if not sys.stdin.isatty():
        return None
    from rich.prompt import Prompt

    return Prompt.ask(question, choices=kinds)


def _ask(missing: tuple[str, ...]) -> dict[str, Any]:
    from rich.prompt import Prompt

    from samestep.migrate.given import given_values

    return given_values([f"{path}={Prompt.ask(path)}" for path in missing])


def _require_place(out: Path, overwrite: bool, file: Path) -> None:
    from samestep.errors import OutputError

    if not out.parent.is_dir():
        raise OutputError("is not a folder.", where=str(out.parent), remedy="Create it first.")
    if out.exists() and not out.is_file():
        raise OutputError("is not an ordinary file.", where=str(out), remedy="Choose another name.")
    if out.exists() and file.exists() and out.samefile(file):
        raise OutputError("is the file that is migrated.", where=str(out), remedy="Choose another name.")
    if out.exists() and not overwrite:
        raise OutputError(
            "exists already.", where=str(out), remedy="Choose another name, or --overwrite to replace it."
        )


def _refuse(source: Source, result: Migration, allow_lossy: bool, out: Path | None) -> None:
    from samestep.migrate import MigrationError

    if result.impossible and not allow_lossy:
        lines = [f"{entry.path}: {entry.rule}" for entry in result.impossible]
        what = f"{result.target} cannot say this; change it, or go on without it with --allow-lossy:"
        raise MigrationError(what, where=str(source.path), details=lines)
    if result.missing and out is not None:
        flags = " ".join(f"--set {path}=..." for path in result.missing)
        raise MigrationError("does not say everything.", where=str(source.path), remedy=f"Give also: {flags}")


def _lint(source: Source, reading: Reading, json_output: bool) -> None:
    faults = [finding for finding in reading.findings if finding.severity != "note"]
    if json_output:
        problems = [vars(finding) for finding in reading.findings]
        print_json({"source": {"path": str(source.path), "kind": reading.kind}, "problems": problems})
    else:
        for finding in reading.findings:
            place = f"{source.path}:{finding.line}" if finding.line else f"{source.path}"
            typer.echo(f"{place}: {finding.severity}: {finding.path}: {finding.what}")
        if not reading.findings:
            typer.echo(f"{source.path}: a sound {reading.kind} configuration of {len(reading.leaves)} fields")
    if faults:
        raise typer.Exit(1)


def _show(source: Source, result: Migration, *, with_text: bool) -> None:
    typer.echo(f"{source.path} ({result.kind}) to {result.target}: {len(result.fields)} fields")
    for entry in result.fields:
        _show_entry(entry)
    if result.defaults:
        typer.echo("\nDefaults that had to be said:")
        for entry in result.defaults:
            _show_entry(entry)
    if result.problems:
        typer.echo("\nProblems:")
        for finding in result.problems:
            place = f"line {finding.line}: " if finding.line else ""
            typer.echo(f"  {finding.severity}: {place}{finding.path}: {finding.what}")
    if result.left:
        typer.echo(f"\nNot said, so samestep's defaults: {', '.join(result.left)}")
    if result.missing:
        typer.echo(f"\nTo be given: {' '.join(f'--set {path}=...' for path in result.missing)}")
    if with_text:
        typer.echo(f"\n{result.text}", nl=False)


def _show_entry(entry: Entry) -> None:
    there = "" if entry.target_path is None else f" -> {entry.target_path}"
    if entry.target_path is not None and "," not in entry.target_path:
        there += f": {entry.target_value}"
    value = "" if entry.value is None else f": {entry.value}"
    typer.echo(f"  {entry.status:<11} {entry.path}{value}{there}\n              {entry.rule}")
