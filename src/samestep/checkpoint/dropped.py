"""What an export in a narrower dtype throws away of a training."""

from __future__ import annotations

from typing import Any

import torch

_CHUNK = 1 << 20


class Dropped:
    """Compares trained weights with what was loaded and with what is exported. *Dropped* is a change that the export
    does not have: the exported number is the one that the loaded weight would have been exported as.
    """

    def __init__(self) -> None:
        self._moved = 0
        self._dropped = 0
        self._squared = 0.0
        self._arrived = 0.0

    def add(self, *, loaded: torch.Tensor, trained: torch.Tensor, exported: torch.Tensor) -> None:
        """Counts one parameter: three tensors of one shape, each in its own dtype."""
        triples = zip(*(t.reshape(-1).split(_CHUNK) for t in (loaded, trained, exported)), strict=True)
        for before, after, written in triples:
            change = after.double() - before.double()
            moved, same = change != 0, written == before.to(written.dtype)
            self._moved += int(moved.sum())
            self._dropped += int((moved & same).sum())
            self._squared += float(change.dot(change))
            self._arrived += float(change.dot(written.double() - before.double()))

    @property
    def share(self) -> float:
        """The share of the trained weights that moved and whose export has not."""
        return self._dropped / self._moved if self._moved else 0.0

    @property
    def length(self) -> float:
        """The share of the training's length, along its own direction, that the export does not have."""
        return 1 - self._arrived / self._squared if self._squared else 0.0

    def described(self) -> dict[str, Any]:
        return {"dropped_share": self.share, "dropped_length": self.length}
