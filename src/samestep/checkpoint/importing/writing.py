"""Writes tensors into a checkpoint as they are read, one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from samestep.checkpoint.importing.source import Stored
from samestep.errors import OutputError, SamestepError


def write(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """Writes the tensors by name into an existing folder, in this one process; holds one of them at a time.

    Raises OutputError when it cannot write, and whatever reading a tensor raises.
    """
    # A file of its own for each: torch keeps all tensors of a file until it is written.
    writer = FileSystemWriter(folder, single_file_per_rank=False, overwrite=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it was meant to be
            dcp.save({}, storage_writer=writer, planner=_Planner(tensors), no_dist=True)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        if isinstance(cause, SamestepError):
            raise cause from error
        why = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        raise OutputError(f"cannot be written: {why}", where=str(folder)) from error


class _Planner(SavePlanner):
    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._tensors = tensors

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass  # the tensors say it all

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(name, stored) for name, stored in self._tensors.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._tensors[write_item.index.fqn].read().contiguous()


def _item(name: str, stored: Stored) -> WriteItem:
    size = torch.Size(stored.shape)
    origin = torch.Size([0] * len(size))
    return WriteItem(
        index=MetadataIndex(name, origin),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(origin, size), properties=TensorProperties(dtype=stored.dtype), size=size
        ),
    )
