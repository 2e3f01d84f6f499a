"""Writes a rank's part of a distributed checkpoint, one tensor after the other."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


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
