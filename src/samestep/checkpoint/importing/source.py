"""What a reader finds in a foreign checkpoint: tensors by name, not read yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor of a foreign checkpoint. `read` gives it whole, on the CPU; nobody keeps it afterwards."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A foreign checkpoint.

    `weights` are the most precise copy of every weight that it has (masters, where there are masters), `copies` rounded
    ones that must agree with them. Optimizer state is known by name (`states`: parameter, then torch's key) or by
    position (`groups`: an optimizer's parameter groups, with the state of each of their parameters), never both.
    `updates` are all update counts that the optimizer names, `step` the trainer's own count. `settings` are the
    optimizer's parameter groups without their parameters. `left` says what is not brought in.
    """

    kind: str
    weights: Mapping[str, Stored]
    copies: Mapping[str, Stored] = field(default_factory=dict)
    states: Mapping[str, Mapping[str, Stored]] = field(default_factory=dict)
    groups: Sequence[Sequence[Mapping[str, Stored]]] = ()
    updates: frozenset[int] = frozenset()
    step: int | None = None
    ranks: int = 1
    settings: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    left: Sequence[str] = ()


def stored(tensor: torch.Tensor) -> Stored:
    """A tensor that is there already, or that a file is mapped to."""
    return Stored(shape=tuple(tensor.shape), dtype=tensor.dtype, read=lambda: tensor.detach())


def count(value: Any) -> int | None:
    """A number of updates, however an optimizer keeps it; None when it is none."""
    if torch.is_tensor(value):
        value = value.item() if value.numel() == 1 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        return None
    return int(value)
