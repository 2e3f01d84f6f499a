"""Other places for the curves: TensorBoard and trackio. Both are extras."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from samestep.errors import OutputError


class Tracker(Protocol):
    """Somewhere that scalars go."""

    def log(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path, _name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    """trackio keeps a local database of its own, outside of the run folder."""

    def __init__(self, _folder: Path, name: str) -> None:
        import trackio

        self._trackio = trackio
        with contextlib.redirect_stdout(sys.stderr):
            trackio.init(project="samestep", name=name, embed=False)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self._trackio.log(scalars, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()


_KINDS: dict[str, Callable[[Path, str], Tracker]] = {"tensorboard": _TensorBoard, "trackio": _Trackio}


def open_trackers(names: Sequence[str], folder: Path, run: str) -> list[Tracker]:
    """The recipe's trackers. Raises OutputError for one that is not installed."""
    opened = []
    for name in names:
        try:
            opened.append(_KINDS[name](folder, run))
        except ImportError as error:
            raise OutputError(
                f"{name} is not installed", where="log.trackers", remedy="Install samestep[trackers]."
            ) from error
    return opened
