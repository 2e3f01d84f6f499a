"""manifest.json: what a checkpoint is, and a digest of every file in it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from samestep.errors import CheckpointError
from samestep.recipe.schema import Recipe

NAME = "manifest.json"
VERSION = 1
"""Of the format. A reader knows all versions up to its own."""

DTYPES = {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}
"""Names of the dtypes that a checkpoint's tensors may have."""

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
    `frozen_sha256` is None without frozen weights, and where they are not known.
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
    frozen_sha256: str | None = None
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
    version = content.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"has format version {version}, but this samestep reads versions up to {VERSION}",
            where=str(path),
            remedy="Update samestep.",
        )
    digest = content.pop("sha256", None)
    try:
        fits = digest == _digest(content)
    except (ValueError, RecursionError):  # numbers that are none
        fits = False
    if not fits:
        raise CheckpointError("is damaged: its own digest does not fit", where=str(path))
    try:
        manifest = TypeAdapter(Manifest).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"cannot be used: {field}: {first['msg']}", where=str(path)) from error
    _refuse_strange(manifest, path)
    return manifest


def _refuse_strange(manifest: Manifest, path: Path) -> None:
    """Raises CheckpointError for a tensor that cannot be and for a file outside of the folder: a digest can be made by
    anybody."""
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in DTYPES or any(size < 0 for size in tensor.shape):
            raise CheckpointError(f"has no such tensor: {name} is {tensor.dtype} {tensor.shape}", where=str(path))
    for name in manifest.files:
        if Path(name).name != name:
            raise CheckpointError(f"points outside of its folder, to {name!r}", where=str(path))


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


def intact_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all as they were written. Raises CheckpointError for any other."""
    manifest = read_manifest(folder)
    if found := damages(folder, manifest):
        raise CheckpointError(f"is damaged: {found[0]}", where=str(folder), remedy="Take another checkpoint.")
    return manifest


def stored_recipe(folder: Path, manifest: Manifest) -> Recipe:
    """The resolved recipe of a checkpoint's run. Raises CheckpointError when this version cannot read it."""
    try:
        return Recipe.model_validate(manifest.recipe)
    except ValueError as error:
        raise CheckpointError(
            "holds a recipe that this version does not know",
            where=str(folder),
            remedy="Use the version of samestep that wrote it.",
        ) from error


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
