"""What every command prints: sentences for people."""

from __future__ import annotations

from rich.console import Console


def say(console: Console, text: str) -> None:
    """Prints a sentence as it is, in lines that the terminal breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
