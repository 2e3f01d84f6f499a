"""Sizes that keep the code readable. Each is a little above what the design asks for: a ceiling, not a goal."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LINES = 450
FUNCTION_LINES = 60
CLASS_LINES = 220
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def sources() -> list[Path]:
    return sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("examples/**/*.py")])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def too_long(tree: ast.AST) -> Iterator[str]:
    """Name every function and class of `tree` that is over its budget."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            budget = FUNCTION_LINES
        elif isinstance(node, ast.ClassDef):
            budget = CLASS_LINES
        else:
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > budget:
            yield f"{node.name} in line {node.lineno} has {lines} lines; the budget is {budget}"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    assert lines <= FILE_LINES, f"{name_of(path)} has {lines} lines; the budget is {FILE_LINES}"
    assert list(too_long(ast.parse(text))) == []


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_names_say_something(path: Path) -> None:
    assert VAGUE_NAMES.isdisjoint({path.stem, *path.relative_to(ROOT).parts})


def test_a_long_function_is_found() -> None:
    body = "    pass\n" * FUNCTION_LINES
    assert len(list(too_long(ast.parse(f"def long():\n{body}")))) == 1
    assert list(too_long(ast.parse("def short():\n    pass\n"))) == []
