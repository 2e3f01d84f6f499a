"""`samestep schema`: the JSON Schema of the recipe."""

from __future__ import annotations

from samestep.cli.options import DebugOption, print_json


def schema(debug: DebugOption = False) -> None:
    """Print the JSON Schema of the recipe, for editors."""
    from samestep.recipe import json_schema

    print_json(json_schema())
