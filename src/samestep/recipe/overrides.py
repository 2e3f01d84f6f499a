"""Overrides of single fields, as `--set train.steps=10` gives them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from samestep.errors import Problem
from samestep.recipe.document import Document, dotted, parse_value


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """`document` with every "a.b=value" set, in order, so a later one wins. Faulty ones become problems."""
    data = copy.deepcopy(document.data)
    lines, overridden = dict(document.lines), dict(document.overridden)
    problems = list(document.problems)
    for text in overrides:
        name, equals, value_text = text.partition("=")
        name = name.strip()
        path = tuple(name.split("."))
        option = f"--set {name}"
        try:
            if not equals or not all(path):
                raise ValueError("expected FIELD=VALUE, such as train.steps=100")
            _set(data, path, parse_value(value_text))
        except ValueError as error:
            problems.append(Problem(field=option if name else "--set", what=str(error)))
            continue
        for places in (lines, overridden):
            for place in [place for place in places if place[: len(path)] == path]:
                del places[place]
        overridden[path] = option
        problems = [problem for problem in problems if problem.field != dotted(path)]
    return replace(document, data=data, lines=lines, overridden=overridden, problems=tuple(problems))


def _set(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    section = data
    for length, key in enumerate(path[:-1], start=1):
        inner = section.get(key)
        if inner is None:
            inner = section[key] = {}
        if not isinstance(inner, dict):
            place = dotted(path[:length])
            rest = dotted(path[length:])
            raise ValueError(f"{place} is a value here, not a section; set all of it: --set '{place}={{{rest}: ...}}'")
        section = inner
    section[path[-1]] = value
