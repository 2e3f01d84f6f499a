"""Reads the `.metadata` file of a distributed checkpoint, which is a pickle, without trusting it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

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
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def read_metadata(folder: Path) -> Metadata:
    """The DCP metadata of a checkpoint folder.

    Raises CheckpointError when the file is damaged, asks for anything but the classes that describe tensors, or points
    to a file outside of the folder.
    """
    path = folder / NAME
    try:
        with open(path, "rb") as file:
            metadata = _Unpickler(file).load()
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
