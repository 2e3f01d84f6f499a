"""manifest.json: what a checkpoint is, and a digest of every file in it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from samestep.errors import CheckpointError

NAME = "manifest.json"
VERSION = 1
"""Of the format. A reader knows all versions up to its own."""

_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file of a checkpoint folder, beside the manifest."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint; `dtype` without `torch.`."""

    shape: list[int]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything of a checkpoint but its tensors.

    `step` counts the run's steps, `updates` those of them that changed the weights (a step may be skipped). The random
    numbers of a run are functions of its seed and of the step, and so is the order of its data; nothing else is needed.
    """

    step: int
    updates: int
    engine: str
    ranks: int
    regime: str
    rows_per_step: int
    data_sha256: str
    loss_scale: dict[str, Any] | None
    moved: list[str]
    tensors: dict[str, StoredTensor]
    recipe: dict[str, Any]
    plan: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, StoredFile] = field(default_factory=dict)


def encoded(manifest: Manifest) -> str:
    """The manifest as JSON text that carries its own digest."""
    content: dict[str, Any] = {"format": "samestep", "version": VERSION, **asdict(manifest)}
    return json.dumps({**content, "sha256": _digest(content)}, indent=2, allow_nan=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError when it is not there, damaged or too new."""
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            "is not a checkpoint of samestep: it has no manifest.json", where=str(folder), remedy="Give its folder."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be read: {_first_line(error)}", where=str(path)) from error
    if not isinstance(content, dict) or content.get("format") != "samestep":
        raise CheckpointError("is not a manifest of samestep", where=str(path))
    if not isinstance(content.get("version"), int) or content["version"] > VERSION:
        raise CheckpointError(
            f"has format version {content.get('version')}, but this samestep reads up to {VERSION}",
            where=str(path),
            remedy="Update samestep.",
        )
    digest = content.pop("sha256", None)
    if digest != _digest(content):
        raise CheckpointError("is damaged: its own digest does not fit", where=str(path))
    try:
        known = {f.name: content[f.name] for f in fields(Manifest)}
        known["tensors"] = {name: StoredTensor(**tensor) for name, tensor in known["tensors"].items()}
        known["files"] = {name: StoredFile(**file) for name, file in known["files"].items()}
        return Manifest(**known)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"lacks {_first_line(error)}", where=str(path)) from error


def stored_file(path: Path) -> StoredFile:
    """Size and digest of a file. Raises OSError."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return StoredFile(bytes=size, sha256=digest.hexdigest())


def damages(folder: Path, manifest: Manifest, *, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, a sentence each; empty when all are as they were written.

    With `parts`, looks at every `parts`th file only, from file `part` on, so that ranks can share the work.
    """
    found = []
    for name in sorted(manifest.files)[part::parts]:
        try:
            stored = stored_file(folder / name)
        except OSError as error:
            found.append(f"{name}: {error.strerror or error}")
            continue
        wanted = manifest.files[name]
        if stored.bytes != wanted.bytes:
            found.append(f"{name}: has {stored.bytes:,} bytes, but {wanted.bytes:,} were written")
        elif stored.sha256 != wanted.sha256:
            found.append(f"{name}: other contents than were written (digest)")
    return found


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
