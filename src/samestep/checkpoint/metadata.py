"""Reads the `.metadata` file of a distributed checkpoint, which is a pickle, without trusting it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.metadata import Metadata

from samestep.checkpoint.manifest import DTYPES
from samestep.errors import CheckpointError

NAME = ".metadata"

# Every class and function that torch 2.13 needs to write down which tensor lies where. None of them runs code.
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
}


class _Unpickler(pickle.Unpickler):
    """Finds what is allowed, and notes what it looked like: a pickle can set attributes of a class that it names."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._found: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and name in DTYPES):
            found = super().find_class(module, name)
            if (attributes := getattr(found, "__dict__", None)) is not None:
                self._found.setdefault((module, name), (found, dict(attributes)))
            return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")

    def read(self) -> Any:
        """The pickle's contents. Raises UnpicklingError for one that changes a class, which is undone."""
        try:
            return self.load()
        finally:
            if changed := [name for name, (found, before) in self._found.items() if _undone(found, before)]:
                raise pickle.UnpicklingError(f"changes {'.'.join(changed[0])}, which has no place in a checkpoint")


def _undone(found: Any, before: Mapping[str, Any]) -> bool:
    """Gives an object its attributes back; whether that was necessary."""
    now = dict(found.__dict__)
    changed = [name for name in {**before, **now} if now.get(name, _MISSING) is not before.get(name, _MISSING)]
    for name in changed:
        if name in before:
            setattr(found, name, before[name])
        else:
            delattr(found, name)
    return bool(changed)


_MISSING = object()


def read_metadata(folder: Path) -> Metadata:
    """The DCP metadata of a checkpoint folder.

    Raises CheckpointError when the file is damaged, asks for anything but the classes that describe tensors, or points
    to a file outside of the folder.
    """
    path = folder / NAME
    try:
        with open(path, "rb") as file:
            metadata = _Unpickler(file).read()
    except Exception as error:  # a damaged pickle fails in any way
        raise CheckpointError(
            f"cannot be read: {str(error) or type(error).__name__}",
            where=str(path),
            remedy="The checkpoint is damaged, or was made to do harm. Use another.",
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError("is no metadata of a checkpoint", where=str(path))
    for place in metadata.storage_data.values():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"points outside of its folder, to {name!r}", where=str(path))
    return metadata
