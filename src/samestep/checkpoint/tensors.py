"""Slices of named tensors to and from torch's distributed checkpoint format (DCP).

No rank holds a whole tensor for it: each writes the boxes of its own slices, and reads what overlaps with them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from samestep.checkpoint.boxes import Box, boxes
from samestep.checkpoint.manifest import StoredTensor
from samestep.checkpoint.metadata import read_metadata
from samestep.checkpoint.writer import Part, Planner, Writer
from samestep.engines.protocol import Shard
from samestep.errors import CheckpointError, OutputError

_BATCH_BYTES = 1 << 26


def write_tensors(folder: Path, shards: Sequence[Shard], group: dist.ProcessGroup | None = None) -> None:
    """Writes this rank's shards, by name, into an existing folder; all ranks of the group must call it together.

    Every element must come from one rank only. Raises OutputError, on all ranks, when one cannot write.
    """
    planner = Planner(
        _part(shard, box) for shard in shards for box in boxes(shard.shape, shard.start, shard.values.numel())
    )
    try:
        dcp.save({}, storage_writer=Writer(folder), planner=planner, process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        why = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        raise OutputError(f"rank {rank} cannot write its part: {why}", where=str(folder)) from error


def read_tensors(folder: Path, shards: Sequence[Shard], *, alone: bool = False) -> None:
    """Fills this rank's shards from a checkpoint folder; all ranks must call it together unless `alone`.

    Shards may overlap between ranks. Raises CheckpointError when a tensor is missing, or has another shape or dtype.
    """
    reader, planner = _Reader(folder), _LoadPlanner(folder, shards)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it was meant to be
            dcp.load({}, storage_reader=reader, planner=planner, no_dist=alone)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, CheckpointError):
            raise cause from error
        why = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise CheckpointError(
            f"rank {rank} cannot read it: {why}", where=str(folder), remedy="See `samestep checkpoint verify`."
        ) from error


def whole_tensors(folder: Path, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of the given tensors of a checkpoint, on the CPU, in their order. Needs no ranks. Reads as many at
    once as fit into 64 MiB, but at least one. Raises CheckpointError."""
    batch: list[Shard] = []
    for name, stored in tensors.items():
        whole = torch.empty(torch.Size(stored.shape).numel(), dtype=getattr(torch, stored.dtype))
        if batch and sum(shard.values.nbytes for shard in batch) + whole.nbytes > _BATCH_BYTES:
            yield from _read(folder, batch)
            batch = []
        batch.append(Shard(name=name, shape=tuple(stored.shape), start=0, values=whole))
    yield from _read(folder, batch)


def _read(folder: Path, batch: list[Shard]) -> Iterator[tuple[str, torch.Tensor]]:
    if batch:
        read_tensors(folder, batch, alone=True)
    for shard in batch:
        yield shard.name, shard.values.view(shard.shape)


class _LoadPlanner(LoadPlanner):
    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        self._folder = folder
        self._shards = shards
        self._views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items = []
        for shard in self._shards:
            stored = self._metadata.state_dict_metadata.get(shard.name)
            self._check(shard, stored)
            assert isinstance(stored, TensorStorageMetadata)
            cut = boxes(shard.shape, shard.start, shard.values.numel())
            for box in cut:
                self._views[shard.name, box.offsets] = _view(shard, box)
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in cut]
            found = create_read_items_for_chunk_list(shard.name, stored, chunks)
            if sum(item.lengths.numel() for item in found) != shard.values.numel():
                raise CheckpointError(f"{shard.name} is not complete", where=str(self._folder))
            items += found
        return LoadPlan(items)

    def _check(self, shard: Shard, stored: object) -> None:
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(
                f"holds no tensor {shard.name}", where=str(self._folder), remedy="It belongs to another model or run."
            )
        if tuple(stored.size) != shard.shape or stored.properties.dtype != shard.values.dtype:
            raise CheckpointError(
                f"{shard.name} is {stored.properties.dtype} {list(stored.size)}, but the run's is "
                f"{shard.values.dtype} {list(shard.shape)}",
                where=str(self._folder),
                remedy="Take the model and the regime that the checkpoint was made with.",
            )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor", where=str(self._folder))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self._views[read_item.dest_index.fqn, tuple(read_item.dest_index.offset or ())]
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dimension, offset, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass  # the view is the shard's own memory


class _Reader(FileSystemReader):
    """DCP's reader, with the metadata read as what comes from outside is read."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _part(shard: Shard, box: Box) -> Part:
    return Part(
        name=shard.name,
        shape=shard.shape,
        dtype=shard.values.dtype,
        offsets=box.offsets,
        sizes=box.sizes,
        read=partial(_view, shard, box),
    )


def _view(shard: Shard, box: Box) -> torch.Tensor:
    return shard.values[box.begin : box.begin + box.numel].view(box.sizes)
