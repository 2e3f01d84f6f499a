"""The weights that a run does not train: its checkpoints hold a digest of them, and the model has them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

from samestep.checkpoint.weight_writer import bytes_of
from samestep.dtypes import dtype_name
from samestep.errors import CheckpointError


def frozen_sha256(model: nn.Module) -> str | None:
    """The digest of the frozen parameters of a model that holds them whole, as it was loaded; None without any."""
    return digest({name: p.detach for name, p in model.named_parameters() if not p.requires_grad})


def digest(tensors: Mapping[str, Callable[[], torch.Tensor]]) -> str | None:
    """SHA-256 of all names, dtypes, shapes and values, whatever their order; None without any. One tensor is read at a
    time."""
    if not tensors:
        return None
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]()
        found.update(f"{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}".encode())
        found.update(bytes_of(tensor))
    return found.hexdigest()


def refuse_others(now: str | None, saved: str | None, where: str) -> None:
    """Raises CheckpointError when the frozen weights are not those of the run that saved; `saved` is None in
    checkpoints that do not say."""
    if saved is not None and now != saved:
        raise CheckpointError(
            "was made with other frozen weights than the recipe's model has now",
            where=where,
            remedy="Give the model that it was made with as model.path; checkpoints hold what is trained.",
        )
