"""Writes a rank's part of a distributed checkpoint, one tensor after the other, from what is only named before."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


@dataclass(frozen=True, kw_only=True)
class Part:
    """A box, at `offsets` and of `sizes`, of a named tensor of `shape`; `read` gives its values when it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]


class Planner(SavePlanner):
    """Has DCP write these parts, whatever its state dict says."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = {(part.name, part.offsets): part for part in parts}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass  # the parts say it all

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(part) for part in self._parts.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # No hints of where a box stands among its tensor's: with thousands of ranks they cost the coordinator a copy of
        # every item, and boxes are found by their offsets.
        return create_default_global_save_plan(all_plans, rewrite_index_hints=False)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._parts[write_item.index.fqn, tuple(write_item.index.offset or ())].read()


@functools.cache
def _properties(dtype: torch.dtype) -> TensorProperties:
    """One object for all tensors of a dtype: the coordinator holds the items of every rank."""
    return TensorProperties(dtype=dtype)


def _item(part: Part) -> WriteItem:
    offsets = torch.Size(part.offsets)
    return WriteItem(
        index=MetadataIndex(part.name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, torch.Size(part.sizes)),
            properties=_properties(part.dtype),
            size=torch.Size(part.shape),
        ),
    )


class Writer(FileSystemWriter):
    """DCP's writer into a folder, with at most one tensor copied at a time.

    torch's own keeps every tensor that it has written until the file is whole: for slices of larger tensors, and for
    tensors of an accelerator, these are copies, and together a second state.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, overwrite=False)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix = plan.storage_data
        assert isinstance(prefix, _StoragePrefix)
        name = f"{prefix.prefix}0{DEFAULT_SUFFIX}"
        results = []
        with open(Path(self.path) / name, "wb") as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                tensor = tensor.detach().cpu()
                if tensor.untyped_storage().size() != tensor.nbytes:
                    tensor = tensor.clone()  # or the whole of what it is a slice of would be written
                begin = file.tell()
                torch.save(tensor, file)
                length = file.tell() - begin
                place = _StorageInfo(name, begin, length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
            file.flush()
            os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future
