"""What a format of another tool is written from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.state import optimizer_keys, state_key
from samestep.checkpoint.tensors import whole_tensors


@dataclass(frozen=True, kw_only=True)
class Group:
    """A parameter group of the run's optimizer: its settings as torch's optimizer has them, and its parameters."""

    settings: Mapping[str, Any]
    names: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint with what its recipe says of it.

    `others` is the part of the model's state dict that a checkpoint has not: frozen weights and buffers. `ties` are
    further names of parameters. `compute` is the dtype that masters are rounded to.
    """

    folder: Path
    manifest: Manifest
    groups: Sequence[Group]
    others: Mapping[str, torch.Tensor]
    ties: Mapping[str, str]
    compute: torch.dtype

    @property
    def keys(self) -> list[str]:
        """What torch's optimizers keep of a parameter; the compensation of low-kahan is none of it."""
        return [key for key in optimizer_keys(list(self.manifest.tensors)) if key != "compensation"]

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Tensors of the checkpoint by their names in it, one after the other."""
        yield from (tensor for _, tensor in whole_tensors(self.folder, {n: self.manifest.tensors[n] for n in names}))

    def moments(self, name: str) -> list[str]:
        """The names, in the checkpoint, of what `keys` are of a parameter."""
        return [state_key(name, key) for key in self.keys]

    @property
    def left(self) -> list[str]:
        """What the formats of others have no place for."""
        lost = any(name.endswith(".compensation") for name in self.manifest.tensors)
        return ["the compensation of low-kahan"] if lost else []
