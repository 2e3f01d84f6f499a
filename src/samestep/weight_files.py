"""Weights in safetensors files: their names, dtypes and shapes, and samples, without loading a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from samestep.errors import ModelError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_WHOLE = 1 << 20
"""Elements of the largest tensor that is read whole."""
_BLOCKS = 16
"""Places of a larger tensor that are read."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One floating-point tensor in a file."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def folder_of(path: str) -> Path | None:
    """Where the files of a model are: its folder, or that of a hub model that is whole on this machine."""
    if Path(path).is_dir():
        return Path(path)
    try:
        found = cached_file(path, "config.json", local_files_only=True)
    except OSError:
        return None
    folder = Path(found).parent if found else None
    return folder if folder is not None and all(file.is_file() for file in _files(folder)) else None


def tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every floating-point tensor of a model's folder by name, from the files' headers; empty without safetensors.

    Raises ModelError for a damaged file.
    """
    found = {}
    for file in _files(folder):
        with _opened(file) as content:
            for name in content.keys():  # noqa: SIM118 - not a dict
                piece = content.get_slice(name)
                dtype = _DTYPES.get(piece.get_dtype())
                if dtype is not None:
                    found[name] = StoredTensor(file=file, name=name, dtype=dtype, shape=tuple(piece.get_shape()))
    return found


def whole_numbers(folder: Path) -> set[str]:
    """Names of the tensors of a model's folder that hold whole numbers; empty for what is no folder."""
    found = set()
    for file in _files(folder) if folder.is_dir() else ():
        with _opened(file) as content:
            names = content.keys()
            found.update(name for name in names if content.get_slice(name).get_dtype().startswith(("I", "U")))
    return found


def first_dtype(folder: Path) -> torch.dtype | None:
    """Dtype of the first tensor in a model's folder; None when it has no safetensors."""
    return next((tensor.dtype for tensor in tensors(folder).values()), None)


def samples(stored: list[StoredTensor], *, limit: int) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    """Up to about `limit` elements [n] of each tensor in its stored dtype: every k-th one, or, of a tensor too large
    to be read whole, of every k-th of some rows spread over it. Each file is opened once."""
    for file in sorted({tensor.file for tensor in stored}):
        with _opened(file) as content:
            for tensor in stored:
                if tensor.file == file:
                    values = _read(content, tensor)
                    yield tensor, values[:: max(1, -(-values.numel() // limit))].clone()


def read(stored: StoredTensor) -> torch.Tensor:
    """A whole tensor in its stored dtype, not to be written to: it is the file's own memory. Raises ModelError."""
    with _opened(stored.file) as content:
        return content.get_tensor(stored.name)


def _read(content: Any, tensor: StoredTensor) -> torch.Tensor:
    if torch.Size(tensor.shape).numel() <= _WHOLE:
        return content.get_tensor(tensor.name).reshape(-1)
    piece = content.get_slice(tensor.name)
    rows = tensor.shape[0]
    row = torch.Size(tensor.shape[1:]).numel()
    height = max(1, min(rows // _BLOCKS, _WHOLE // (_BLOCKS * row)))
    starts = [block * (rows - height) // (_BLOCKS - 1) for block in range(_BLOCKS)]
    return torch.cat([piece[start : start + height].reshape(-1) for start in sorted(set(starts))])


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError("cannot be read as an index of weights", where=str(index)) from error
        return [folder / name for name in names]
    return sorted(folder.glob("*.safetensors"))


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot be read: {str(error).splitlines()[0]}", where=str(file), remedy="Copy or download it again."
        ) from error
