"""The folder RUN/checkpoints: complete checkpoints under their names, everything else under another.

A checkpoint is written into `.step-N.partial`, flushed to the disk, and renamed; `latest`, a file with its name, moves
last. So whatever dies whenever, a folder called step-N is complete, and `latest` names one that is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from samestep.checkpoint import manifest as manifests
from samestep.checkpoint.manifest import Manifest
from samestep.errors import CheckpointError, OutputError

FOLDER = "checkpoints"
_LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})")
_REPLACED = ".replaced"
_UNFINISHED = re.compile(r"\.step-\d{8,}\.\w+")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def complete(checkpoints: Path) -> list[Path]:
    """The complete checkpoints in a run's folder of them, oldest first."""
    return [path for path in _published(checkpoints) if (path / manifests.NAME).is_file()]


def _published(checkpoints: Path) -> list[Path]:
    """Everything with a checkpoint's name, oldest first. It was complete when it got the name."""
    if not checkpoints.is_dir():
        return []
    found = [(int(match[1]), path) for path in checkpoints.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def newest(place: Path) -> Path:
    """The newest complete checkpoint of a run folder, of its folder of checkpoints, or `place` when it is one itself.

    Raises CheckpointError when there is none, and when the newest has lost its manifest.
    """
    where = str(place)
    try:
        if _UNFINISHED.fullmatch(place.name) and place.is_dir():
            raise CheckpointError(
                "was never finished, or is being written or deleted",
                where=where,
                remedy="Give the run's folder, for its newest complete checkpoint.",
            )
        if (place / manifests.NAME).is_file():
            return place
        if not place.is_dir():
            what = "is a file, not a folder" if place.exists() else "is not there"
            raise CheckpointError(what, where=where, remedy="Give the folder of a run or of a checkpoint.")
        for checkpoints in (place / FOLDER, place):
            _give_back(checkpoints)
        published = [place] if _NAME.fullmatch(place.name) else _published(place / FOLDER) or _published(place)
        if published and not (published[-1] / manifests.NAME).is_file():
            raise CheckpointError(
                f"is damaged: {manifests.NAME} is missing",
                where=str(published[-1]),
                remedy="Take another checkpoint, or delete this one.",
            )
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=where) from error
    if not published:
        raise CheckpointError(
            "has no complete checkpoint", where=where, remedy="Give another folder, or start the run without --resume."
        )
    return published[-1]


def begin(checkpoints: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of a step into. Raises OutputError."""
    partial = checkpoints / f".{name_of(step)}.partial"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        _give_back(checkpoints)
        for leftover in checkpoints.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=str(partial)) from error
    return partial


def abandon(partial: Path) -> None:
    """Takes away what was written of a checkpoint that failed."""
    shutil.rmtree(partial, ignore_errors=True)


def publish(partial: Path, manifest: Manifest, *, keep: int) -> Path:
    """Makes a written checkpoint the newest complete one, then deletes all but `keep` of them. Raises OutputError."""
    checkpoints = partial.parent
    final = checkpoints / name_of(manifest.step)
    try:
        _write_durably(partial / manifests.NAME, manifests.encoded(manifest))
        sync_folder(partial)
        if final.exists():  # the same step again, after a resume from before it
            replaced = checkpoints / f".{final.name}{_REPLACED}"
            os.rename(final, replaced)
            os.rename(partial, final)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(partial, final)
        sync_folder(checkpoints)
        pointer = checkpoints / f".{_LATEST}.partial"
        _write_durably(pointer, final.name + "\n")
        os.replace(pointer, checkpoints / _LATEST)
        sync_folder(checkpoints)
    except OSError as error:
        abandon(partial)
        raise OutputError(f"cannot be written: {error.strerror}", where=str(final)) from error
    _prune(checkpoints, final, keep)
    return final


def _give_back(checkpoints: Path) -> None:
    """Gives its name back to a checkpoint that was about to be replaced by another of its step, when that never came:
    between two renames there is neither."""
    for replaced in checkpoints.glob(f".step-*{_REPLACED}"):
        final = checkpoints / replaced.name.removeprefix(".").removesuffix(_REPLACED)
        if not final.exists():
            # Where nothing can be renamed, nothing can be lost either.
            with contextlib.suppress(OSError):
                os.rename(replaced, final)


def _prune(checkpoints: Path, final: Path, keep: int) -> None:
    """Deletes the oldest checkpoints, and those after `final`, which belong to a course that was left."""
    found = complete(checkpoints)
    place = found.index(final) + 1
    for old in [*found[: max(0, place - keep)], *found[place:]]:
        doomed = checkpoints / f".{old.name}.old"
        try:
            os.rename(old, doomed)  # what is half deleted must not look complete
        except OSError:
            continue
        shutil.rmtree(doomed, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Has the disk keep the names in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
