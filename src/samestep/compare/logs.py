"""Loss curves from other tools' logs: CSV, JSONL, transformers' trainer_state.json, TensorBoard. No torch.

Every reader gives steps as steps.jsonl has them, with the quantities that the log has and no others; None stands for a
value that is not finite.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from samestep.errors import DataError

# Names under which tools write a quantity, the likeliest first.
KNOWN: dict[str, tuple[str, ...]] = {
    "step": ("step", "global_step", "iteration", "iter", "trainer/global_step", "_step"),
    "loss": ("loss", "train_loss", "train/loss", "training_loss", "lm loss", "loss/train", "Train/loss"),
    "grad_norm": ("grad_norm", "train/grad_norm", "gradient_norm", "grad-norm", "global_grad_norm", "gnorm"),
    "lr": ("lr", "learning_rate", "train/learning_rate", "learning-rate"),
    "tokens": ("tokens",),
    "label_tokens": ("label_tokens",),
    "lost_update_share": ("lost_update_share",),
    "unseen_update_share": ("unseen_update_share",),
    "peak_memory_bytes": ("peak_memory_bytes",),
}
_NEEDED = ("step", "loss")
_WAYS = "Name it with --columns, such as --columns step=iteration,loss=train_nll."
_LARGEST_FILE = 1 << 30


def read_log(path: Path, columns: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The steps in a log, in the order of their numbers. `columns` are names in the file, by quantity.

    Raises DataError when it cannot be read, has no such columns, no steps, or one step twice with other values.
    """
    columns = dict(columns or {})
    reader = _reader(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError("is no file.", where=str(path), remedy="Give a log that is a file.")
    try:
        if path.is_file() and path.stat().st_size > _LARGEST_FILE:
            raise DataError("is larger than 1 GiB.", where=str(path), remedy="Give a log of the losses alone.")
        rows = reader(path, columns)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"cannot be read: {why}.", where=str(path)) from error
    return _in_order(path, rows)


def is_event_file(path: Path) -> bool:
    return ".tfevents." in path.name


def _reader(path: Path) -> Callable[[Path, dict[str, str]], list[dict[str, Any]]]:
    if path.is_dir() or is_event_file(path):
        return _tensorboard
    kinds = {".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _trainer_state}
    found = kinds.get(path.suffix.lower())
    if found is None:
        raise DataError(
            "is no log of a known kind.",
            where=str(path),
            remedy="Give a run folder, a .csv or .jsonl file, a trainer_state.json or a TensorBoard event file.",
        )
    return found


def _csv(path: Path, columns: dict[str, str]) -> list[dict[str, Any]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        header = [name.strip() for name in next(lines, [])]
        if not header:
            raise DataError("is empty.", where=str(path), remedy="Give a log with at least one step.")
        places = {quantity: header.index(name) for quantity, name in _chosen(path, header, columns).items()}
        rows = []
        for line in lines:
            if not any(cell.strip() for cell in line):
                continue
            cells = {q: line[at].strip() if at < len(line) else "" for q, at in places.items()}
            # Loggers that write several kinds of row leave the others' cells empty.
            if cells["step"] and cells["loss"]:
                rows.append(_row(f"{path}:{lines.line_num}", cells))
    return rows


def _jsonl(path: Path, columns: dict[str, str]) -> list[dict[str, Any]]:
    found: list[tuple[int, dict[str, Any]]] = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                found.append((number, _object(f"{path}:{number}", line)))
    return _from_objects(path, found, columns)


def _trainer_state(path: Path, columns: dict[str, str]) -> list[dict[str, Any]]:
    content = _object(str(path), path.read_text(encoding="utf-8-sig"))
    history = content.get("log_history")
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise DataError(
            "has no log_history; it is no trainer_state.json.",
            where=str(path),
            remedy="Give the trainer_state.json of a checkpoint, or a .jsonl file.",
        )
    return _from_objects(path, list(enumerate(history, start=1)), columns)


def _tensorboard(path: Path, columns: dict[str, str]) -> list[dict[str, Any]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise DataError(
            "reading TensorBoard files needs tensorboard, which is not installed.",
            where=str(path),
            remedy="Run: pip install 'samestep[trackers]'.",
        ) from error
    if path.is_dir() and not any(is_event_file(entry) for entry in path.iterdir()):
        raise DataError(
            "is neither a run of samestep nor a folder with TensorBoard event files.",
            where=str(path),
            remedy="Give the folder that holds steps.jsonl, or a log file.",
        )
    try:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        tags = list(events.Tags()["scalars"])  # type: ignore[arg-type]
    except Exception as error:  # whatever a damaged file makes the reader raise
        raise DataError(f"cannot be read as TensorBoard events: {error}.", where=str(path)) from error
    if not tags:
        # The reader stops without a word where a file is damaged.
        raise DataError("holds no scalar that can be read.", where=str(path), remedy="Give a whole event file.")
    names = _chosen(path, ["step", *tags], {**columns, "step": "step"})
    rows: dict[int, dict[str, Any]] = {}
    for quantity, tag in names.items():
        if quantity != "step":
            for event in events.Scalars(tag):
                # A later event of one step is of a run that went on from before it.
                rows.setdefault(event.step, {"step": event.step})[quantity] = event.value
    return [_row(f"{path}: step {step}", rows[step]) for step in sorted(rows) if "loss" in rows[step]]


def _from_objects(path: Path, found: list[tuple[int, dict[str, Any]]], columns: dict[str, str]) -> list[dict[str, Any]]:
    if not found:
        raise DataError("is empty.", where=str(path), remedy="Give a log with at least one step.")
    names = _chosen(path, list(dict.fromkeys(name for _, entry in found for name in entry)), columns)
    rows = []
    for number, entry in found:
        cells = {quantity: entry[name] for quantity, name in names.items() if name in entry}
        # Entries of evaluations and summaries have no loss of a step.
        if all(needed in cells for needed in _NEEDED):
            rows.append(_row(f"{path}:{number}", cells))
    return rows


def _chosen(path: Path, header: list[str], columns: Mapping[str, str]) -> dict[str, str]:
    """The name in the file of every quantity that it has. DataError when one that is needed or named is missing."""
    names = {}
    for quantity, known in KNOWN.items():
        given = columns.get(quantity)
        name = given if given is not None else next((name for name in known if name in header), None)
        if name in header:
            names[quantity] = str(name)
        elif given is not None or quantity in _NEEDED:
            shown = ", ".join(header[:12]) + (", ..." if len(header) > 12 else "")
            wanted = repr(given) if given is not None else f"for the {quantity}"
            raise DataError(f"has no column {wanted}; it has {shown}.", where=str(path), remedy=_WAYS)
    return names


def _row(where: str, cells: Mapping[str, Any]) -> dict[str, Any]:
    step = _number(where, "step", cells["step"])
    if step is None or step != int(step):
        raise DataError(f"the step {cells['step']!r} is not a whole number.", where=where, remedy=_WAYS)
    row: dict[str, Any] = {"step": int(step)}
    for quantity, value in cells.items():
        if quantity != "step" and value != "":
            row[quantity] = _number(where, quantity, value)
    return row


def _number(where: str, quantity: str, value: Any) -> float | None:
    """The value as a number; None for null, nan and infinities."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"the {quantity} {str(value)[:40]!r} is not a number.", where=where, remedy=_WAYS) from error
    return number if math.isfinite(number) else None


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON: {error}.", where=where, remedy="Give a complete file.") from error
    if not isinstance(content, dict):
        raise DataError("is not a JSON object.", where=where, remedy='Write one object a line: {"step": 1, "loss": 2}.')
    return content


def _in_order(path: Path, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        before = by_step.setdefault(row["step"], row)
        if before != row:
            raise DataError(
                f"has step {row['step']} twice, with other values.", where=str(path), remedy="Give the log of one run."
            )
    if not by_step:
        raise DataError("has no step with a loss.", where=str(path), remedy=_WAYS)
    return [by_step[step] for step in sorted(by_step)]
