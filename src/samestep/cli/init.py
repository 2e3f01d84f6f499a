"""`samestep init`: a new recipe."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.cli.options import DebugOption, EngineOption, PrecisionOption, RanksOption, known_name

# Each question with its default; the answers are the arguments of `template_text`.
_QUESTIONS: dict[str, tuple[str, Any]] = {
    "model": ("Model (a folder or a hub id)", "HuggingFaceTB/SmolLM2-135M"),
    "data": ("Data (a .jsonl, .json, .csv or .parquet file, or a folder)", "data.jsonl"),
    "format": ("Format of a row", "alpaca"),
    "engine": ("Engine", "fsdp"),
    "precision": ("Precision regime", "mixed"),
    "ranks": ("Ranks", 2),
    "steps": ("Optimizer steps", 100),
    "lr": ("Learning rate", 1e-5),
}


def format_name(value: str | None) -> str | None:
    """`value` when it is the name of a data format; a usage error otherwise."""
    return known_name(value, _choices("format") or [])


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The recipe to write.")] = Path("recipe.yaml"),
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="A local folder or a hub id.")] = None,
    data: Annotated[str | None, typer.Option(metavar="PATH", help="A data file, or a folder of them.")] = None,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", callback=format_name, help="What a row is: alpaca, prompt_completion, messages or text."
        ),
    ] = None,
    engine: EngineOption = None,
    precision: PrecisionOption = None,
    ranks: RanksOption = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Optimizer steps.")] = None,
    lr: Annotated[float | None, typer.Option(min=0, metavar="RATE", help="Learning rate.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE when it exists.")] = False,
    debug: DebugOption = False,
) -> None:
    """Write a commented recipe to FILE.

    Asks for what no option gives when it runs in a terminal; takes the defaults otherwise.
    """
    from samestep.recipe import parse, template_text

    _require_place(file, force)
    answers: dict[str, Any] = {
        "model": model,
        "data": data,
        "format": format,
        "engine": engine,
        "precision": precision,
        "ranks": ranks,
        "steps": steps,
        "lr": lr,
    }
    asking = sys.stdin.isatty()
    for name, answer in answers.items():
        if answer is None:
            default = 1 if name == "ranks" and answers["engine"] == "single" else _QUESTIONS[name][1]
            answers[name] = _ask(name, default) if asking else default
    text = template_text(name=_run_name(file), **answers)
    parse(text, source=str(file))
    write_atomically(file, text)
    typer.echo(f"Wrote {file}. Look it over, then: samestep train {file}")


def write_atomically(file: Path, text: str) -> None:
    """Write `text` so that `file` is never half-written. OutputError when it cannot be written."""
    from samestep.errors import OutputError

    # Through a link, the file that it leads to is written.
    file = Path(os.path.realpath(file))
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp gives 0600; a recipe has the rights of any new file.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, file)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}.", where=str(file)) from None
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _require_place(file: Path, force: bool) -> None:
    from samestep.errors import OutputError

    if file.is_dir():
        raise OutputError("is a folder.", where=str(file), remedy=f"Give a file, such as {file / 'recipe.yaml'}.")
    if file.exists() and not file.is_file():
        raise OutputError("is not an ordinary file.", where=str(file), remedy="Choose another name.")
    if file.exists() and not force:
        raise OutputError("exists already.", where=str(file), remedy="Choose another name, or --force to replace it.")
    if not file.parent.is_dir():
        raise OutputError("is not a folder.", where=str(file.parent), remedy="Create it first.")


def _ask(name: str, default: Any) -> Any:
    from rich.prompt import FloatPrompt, IntPrompt, Prompt

    question = _QUESTIONS[name][0]
    if isinstance(default, int):
        return _ask_until_valid(IntPrompt, question, default, lambda value: value >= 1)
    if isinstance(default, float):
        return _ask_until_valid(FloatPrompt, question, default, lambda value: value >= 0)
    return Prompt.ask(question, default=default, choices=_choices(name))


def _ask_until_valid(prompt: Any, question: str, default: Any, valid: Any) -> Any:
    while not valid(value := prompt.ask(question, default=default)):
        typer.echo(f"{value} is out of range")
    return value


def _choices(name: str) -> list[str] | None:
    from samestep.recipe.fields import choices, field_at

    fields = {"format": ("data", "format"), "engine": ("engine", "name"), "precision": ("precision", "regime")}
    return choices(field_at(fields[name]).annotation) if name in fields else None


def _run_name(file: Path) -> str:
    """The name of the run: that of the file, when it says something."""
    name = file.stem
    return name if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) and name != "recipe" else "run"
