"""Sharded state dicts in torch's distributed checkpoint format (DCP): FSDP's, accelerate's, any script's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from samestep.checkpoint.importing.source import Source, Stored, count
from samestep.checkpoint.manifest import StoredTensor
from samestep.checkpoint.metadata import read_metadata
from samestep.checkpoint.tensors import whole_tensors
from samestep.dtypes import dtype_name
from samestep.errors import CheckpointError

_OPTIMIZER = re.compile(r"(.*?(?:^|\.))param_groups(?:\.|$)")


def read(kind: str, *folders: Path) -> Source:
    """What the folders hold together: a model's and an optimizer's state. Raises CheckpointError."""
    weights: dict[str, Stored] = {}
    states: dict[str, dict[str, Stored]] = {}
    updates: set[int] = set()
    left: list[str] = []
    ranks = 1
    for folder in folders:
        metadata = read_metadata(folder)
        ranks = max(ranks, _ranks(metadata))
        tensors = {
            key: _stored(folder, key, entry)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        prefix = _optimizer_prefix(folder, metadata)
        for key, tensor in tensors.items():
            if prefix is None or not key.startswith(f"{prefix}state."):
                if prefix is None or not key.startswith(f"{prefix}param_groups"):
                    weights[key] = tensor
                continue
            name, _, what = key.removeprefix(f"{prefix}state.").rpartition(".")
            if what != "step":
                states.setdefault(name, {})[what] = tensor
            elif (number := count(tensor.read())) is not None:
                updates.add(number)
        left += _left(metadata, prefix)
    return Source(
        kind=kind, weights=weights, states=states, updates=frozenset(updates), ranks=ranks, left=sorted(set(left))
    )


def _stored(folder: Path, key: str, entry: TensorStorageMetadata) -> Stored:
    described = StoredTensor(shape=list(entry.size), dtype=dtype_name(entry.properties.dtype))

    def whole() -> torch.Tensor:
        ((_, tensor),) = whole_tensors(folder, {key: described})
        return tensor

    return Stored(shape=tuple(entry.size), dtype=entry.properties.dtype, read=whole)


def _optimizer_prefix(folder: Path, metadata: Metadata) -> str | None:
    """What stands before `state.` and `param_groups` in the optimizer's keys; None where there is no optimizer."""
    found = {match[1] for key in metadata.state_dict_metadata if (match := _OPTIMIZER.match(key))}
    if len(found) > 1:
        raise CheckpointError(
            f"holds several optimizers: {' and '.join(sorted(found))}",
            where=str(folder),
            remedy="Save the one that trains the recipe's model.",
        )
    return next(iter(found), None)


def _ranks(metadata: Metadata) -> int:
    """The number of ranks that wrote it, by the names of their files."""
    found = {
        match[1] for place in metadata.storage_data.values() if (match := re.match(r"__(\d+)_", place.relative_path))
    }
    return max((int(rank) + 1 for rank in found), default=1)


def _left(metadata: Metadata, prefix: str | None) -> Iterator[str]:
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            of_optimizer = prefix is not None and key.startswith(f"{prefix}param_groups")
            yield "the optimizer's settings: the recipe's count" if of_optimizer else key
