"""The run folder: where everything a run leaves is written, completely or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from samestep.errors import OutputError, SamestepError

# What an earlier run left and --overwrite clears. Nothing else in the folder is ever deleted.
_OURS = (
    "recipe.yaml",
    "precision.json",
    "data.json",
    "steps.jsonl",
    "evaluations.jsonl",
    "summary.json",
    "masters.safetensors",
    "checkpoints",
    "export",
    "tensorboard",
)
_PROBE = ".probe"
_LOCK = ".lock"


def _partial(name: str) -> str:
    """Where a file or folder is written before it takes its place."""
    return f".{name}.partial"


# What a run that was killed while it wrote may leave.
_LEFTOVERS = (_PROBE, _LOCK, *map(_partial, _OURS))


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One line of steps.jsonl. Losses and norms are global; seconds are wall-clock on the main rank; rates count
    tokens without padding; shares are None where they were not measured, numbers None where they are not finite."""

    step: int
    epoch: int
    loss: float | None
    grad_norm: float | None
    grad_norm_clipped: float | None
    lr: float
    label_tokens: int
    tokens: int
    step_seconds: float
    tokens_per_second_per_device: float
    mfu: float | None
    peak_memory_bytes: int
    lost_update_share: float | None
    unseen_update_share: float | None
    lost_update_length: float | None
    unseen_update_length: float | None
    tensors_never_moved: int | None
    loss_scale: float | None
    skipped: bool


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


@contextlib.contextmanager
def held(folder: Path, *, overwrite: bool, again: bool = False) -> Generator[None]:
    """Makes an empty run folder, which no other process of this machine gets while this one has it; with `again`, opens
    one in which a run goes on.

    A folder that is empty in the end, because nothing began, is taken away. Raises OutputError as `prepare` does.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / _LOCK, "w", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise _cannot_write(folder, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(
                "another run is writing to this folder.", where=str(folder), remedy="Choose another with --out."
            ) from error
        try:
            if again:
                reopen(folder)
            else:
                prepare(folder, overwrite=overwrite)
            yield
        finally:
            (folder / _LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()  # only where it is empty


def prepare(folder: Path, *, overwrite: bool) -> None:
    """Makes an empty run folder. Raises OutputError when it cannot, or when it holds a run and must not lose it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = [name for name in _OURS if (folder / name).exists()]
        others = [entry.name for entry in folder.iterdir() if entry.name not in (*_OURS, *_LEFTOVERS)]
        found += [name for name in _LEFTOVERS if name != _LOCK and (folder / name).exists()]
    except OSError as error:
        raise _cannot_write(folder, error) from error
    if (found or others) and not overwrite:
        raise OutputError(
            "the folder is not empty.", where=str(folder), remedy="Choose another with --out, or give --overwrite."
        )
    if others:
        raise OutputError(
            f"the folder holds {others[0]}, which is not of a run.",
            where=str(folder),
            remedy="Choose another with --out; --overwrite replaces runs only.",
        )
    try:
        _clear(folder, found)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def reopen(folder: Path) -> None:
    """Makes a run folder ready to go on in: takes away what says that the run has ended. Raises OutputError."""
    try:
        _clear(folder, ["summary.json", *(name for name in _LEFTOVERS if name != _LOCK)])
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _clear(folder: Path, names: Iterable[str]) -> None:
    """Deletes what is there of these, and sees that the folder can be written. Raises OSError."""
    for name in names:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    probe(folder)


def probe(folder: Path) -> None:
    """Sees that files can be written into a folder. Raises OSError."""
    file = folder / _PROBE
    file.write_bytes(b"")
    file.unlink()


def keep_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """Cuts a .jsonl file of a run that goes on after `step` back to the lines up to that step, and returns them; a line
    that was not finished goes too. Raises OutputError."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, ValueError) as error:
        raise _cannot_write(path, error) from error
    kept = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record["step"] > step:
            break
        kept.append(record)
    if kept or text:
        write_text(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept))
    return kept


def keep_steps(path: Path, step: int) -> StepRecord | None:
    """`keep_lines` for steps.jsonl; the first step, if it is there."""
    kept = keep_lines(path, step)
    return StepRecord(**kept[0]) if kept else None


def write_text(path: Path, text: str) -> None:
    """Writes a file completely or not at all. Raises OutputError."""
    partial = path.with_name(_partial(path.name))
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def write_json(path: Path, content: Any) -> None:
    """Writes JSON completely or not at all; floats read back to the same bits. Raises OutputError."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Has `fill` write into a temporary folder that then takes the place `path`. Raises OutputError."""
    partial = path.with_name(_partial(path.name))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        if path.exists():
            shutil.rmtree(path)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class JsonLines:
    """A growing .jsonl file; every line is on its way to the disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise _cannot_write(path, error) from error

    def write(self, record: StepRecord | dict[str, Any]) -> None:
        content = record if isinstance(record, dict) else asdict(record)
        try:
            self._file.write(json.dumps(content, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise _cannot_write(self._path, error) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file. Raises OutputError when it is not there or not one object a line."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot be read: {error}", where=str(path)) from error


def _cannot_write(path: Path, error: Exception) -> SamestepError:
    why = getattr(error, "strerror", None) or error
    return OutputError(f"cannot be written: {why}.", where=str(path), remedy="Choose another place with --out.")
