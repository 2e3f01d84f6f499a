"""What an earlier, killed comparison left: which runs are whole, which can go on, which must start anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from samestep.compare.fields import UNCOUNTED_SECTIONS, differences
from samestep.compare.outcome import read_recipe
from samestep.compare.variants import Variant
from samestep.errors import OutputError
from samestep.recipe import Recipe
from samestep.training import folder

State = Literal["absent", "whole", "checkpoint", "broken"]

REQUESTS = "variants.json"
# What a run fills in where the recipe leaves it open.
_FILLED = {"engine.unit_classes", "engine.shard_ranks", "precision.export_rounding", "train.steps", "train.epochs"}


def remember(out: Path, variants: Sequence[Variant], checked: Sequence[Recipe]) -> None:
    """Writes what was asked for beside what an earlier call asked for. Raises OutputError."""
    requests = _requests(out) if (out / REQUESTS).exists() else {}
    requests |= {each.name: recipe.model_dump(mode="json") for each, recipe in zip(variants, checked, strict=True)}
    folder.write_json(out / REQUESTS, requests)


def states(out: Path, variants: Sequence[Variant], checked: Sequence[Recipe]) -> list[State]:
    """What is there of each variant. OutputError when `out` holds no comparison, or a run of another recipe under a
    variant's name."""
    if not (out / REQUESTS).exists():
        raise OutputError(
            "there is no comparison to go on with.", where=str(out), remedy="Start without --resume, or give its --out."
        )
    requests = _requests(out)
    return [_state(out / each.name, each, recipe, requests) for each, recipe in zip(variants, checked, strict=True)]


def finished(out: Path, variants: Sequence[Variant], states: Sequence[State]) -> dict[str, Any] | None:
    """The report of these very variants, when all their runs are whole and compared. Their masters may be gone, so it
    could not be made again."""
    try:
        report = json.loads((out / "compare.json").read_text(encoding="utf-8"))
        names = [each["name"] for each in report["variants"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = all(state == "whole" for state in states)
    return report if whole and names == [each.name for each in variants] else None


def _state(run: Path, each: Variant, recipe: Recipe, requests: dict[str, Any]) -> State:
    if not run.is_dir() or not any(run.iterdir()):
        return "absent"
    wanted = recipe.model_dump(mode="json")
    asked = [d for d in differences(requests.get(each.name, {}), wanted) if not _uncounted(d.field)]
    if asked:
        raise _of_another(run, each, str(asked[0]))
    held = read_recipe(run)
    if held is None:
        return "broken"  # killed before the recipe was written, which is the first thing that a run writes
    changed = [
        d
        for d in differences(wanted, held.model_dump(mode="json"))
        if not _uncounted(d.field) and not (d.a is None and d.field in _FILLED) and not _epochs(d.field, wanted)
    ]
    if changed:
        raise _of_another(run, each, str(changed[0]))
    steps = held.train.steps or 0
    if _is_whole(run, steps):
        return "whole"
    return "checkpoint" if _goes_on(run, steps) else "broken"


def _is_whole(run: Path, steps: int) -> bool:
    """Whether the run ended, and its records are those of all of its steps in order."""
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (run / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
        numbers = [line["step"] for line in lines]
        ended = summary["status"] == "completed" and bool(summary["weights_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return ended and numbers == list(range(1, steps + 1)) and (run / "precision.json").exists()


def _goes_on(run: Path, steps: int) -> bool:
    """Whether there is a complete checkpoint from before the last step."""
    from samestep.checkpoint import store

    found = store.complete(run / store.FOLDER)
    return bool(found) and found[-1].name != store.name_of(steps)


def _epochs(field: str, wanted: dict[str, Any]) -> bool:
    """A run writes the steps that its epochs come to."""
    return field == "train.epochs" and wanted["train"]["steps"] is None


def _uncounted(field: str) -> bool:
    return field.partition(".")[0] in UNCOUNTED_SECTIONS


def _requests(out: Path) -> dict[str, Any]:
    path = out / REQUESTS
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError(
            f"cannot be read: {error}.", where=str(path), remedy="Start anew with --overwrite."
        ) from error
    if not isinstance(content, dict):
        raise OutputError("does not hold an object.", where=str(path), remedy="Start anew with --overwrite.")
    return content


def _of_another(run: Path, each: Variant, why: str) -> OutputError:
    return OutputError(
        f"the run there is not of the variant {each.name}: {why}.",
        where=str(run),
        remedy="Choose another folder with --out, or start anew with --overwrite.",
    )
