"""Writes tensors into a checkpoint as they are read, one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from samestep.checkpoint.importing.source import Stored
from samestep.checkpoint.writer import Part, Planner, Writer
from samestep.errors import OutputError, SamestepError


def write(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """Writes the tensors by name into an existing folder, in this one process; holds one of them at a time.

    Raises OutputError when it cannot write, and whatever reading a tensor raises.
    """
    planner = Planner(
        Part(
            name=name,
            shape=stored.shape,
            dtype=stored.dtype,
            offsets=(0,) * len(stored.shape),
            sizes=stored.shape,
            read=stored.read,
        )
        for name, stored in tensors.items()
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it was meant to be
            dcp.save({}, storage_writer=Writer(folder), planner=planner, no_dist=True)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        if isinstance(cause, SamestepError):
            raise cause from error
        why = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        raise OutputError(f"cannot be written: {why}", where=str(folder)) from error
