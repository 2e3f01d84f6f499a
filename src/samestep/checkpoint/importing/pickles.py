"""Reads torch.save files of others without trusting them: tensors and plain data, and a few names as inert stand-ins.

torch's weights-only unpickler looks names up in an allow-list and imports nothing, so not even DeepSpeed is needed to
read its files, and none of its code runs.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import torch

from samestep.errors import CheckpointError


class FragmentAddress:
    """DeepSpeed's note of where a parameter lies in a flat partition: `start` and `numel`."""

    start: int
    numel: int


class Scaler:
    """DeepSpeed's loss scaler: its attributes, none of its methods."""


# By the name in the file. Nothing here does anything but hold what the file says.
_STAND_INS: list[Any] = [
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Scaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Scaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
_FORBIDDEN = re.compile(r"GLOBAL\s+([\w.]+)|blocked[^`]*`?([\w.]+)`?|Trying to (?:load|call)[^.]*?([\w.]+\.[\w.]+)")


def load(path: Path) -> Any:
    """The contents of a torch.save file; tensors are mapped to it, not read, where the file has torch's zip format.

    Raises CheckpointError when it is damaged or asks for anything but tensors and plain data.
    """
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle fails in any way
        if match := _FORBIDDEN.search(str(error)):
            name = next(filter(None, match.groups()))
            what = f"asks for {name.rstrip('.')}, which has no place in a checkpoint"
        else:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            what = f"cannot be read: {textwrap.shorten(line, 150, placeholder=' ...')}"
        raise CheckpointError(
            what,
            where=str(path),
            remedy="Only tensors and plain data are read from pickles. The file is damaged, was made to do harm, or "
            "holds objects of another program.",
        ) from error


def load_dict(path: Path) -> dict[str, Any]:
    """`load`, for a file that must hold a dictionary."""
    content = load(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"holds a {type(content).__name__}, not a dictionary", where=str(path))
    return content
