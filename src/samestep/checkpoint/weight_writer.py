"""safetensors files that are written one tensor at a time, in any order, from names, dtypes and shapes alone.

The files have the bytes that safetensors' own writer gives them, and the names and the index that transformers looks
for: `model.safetensors`, or `model-00001-of-00003.safetensors` and so on with `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE = 1 << 26
"""Bytes that are handed to the system at once."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Dtype and shape of a tensor that is going to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a tensor goes: an open file and the byte at which it begins."""

    file: int
    start: int
    layout: Layout


class WeightWriter:
    """Writes tensors into a folder. `max_bytes` bounds a file's tensors, but for one that is larger by itself; None
    means one file. Everything raises OSError when it cannot be written."""

    def __init__(
        self, folder: Path, tensors: Mapping[str, Layout], *, stem: str = "model", max_bytes: int | None = None
    ) -> None:
        self._folder, self._stem = folder, stem
        self._places: dict[str, _Place] = {}
        self._files: list[int] = []
        shards = _shards(tensors, max_bytes)
        self._names = [f"{stem}.safetensors"]
        if len(shards) > 1:
            self._names = [f"{stem}-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
        try:
            for name, shard in zip(self._names, shards, strict=True):
                self._open(folder / name, shard)
            if len(shards) > 1:
                self._write_index(shards)
        except OSError:
            self._close()
            raise
        self._missing = set(tensors)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor of the dtype and shape that was announced for this name."""
        place = self._places[name]
        if tensor.dtype != place.layout.dtype or tuple(tensor.shape) != place.layout.shape:
            raise ValueError(f"{name} was to be {place.layout}, but is {tensor.dtype} {tuple(tensor.shape)}")
        content = bytes_of(tensor)
        start = place.start
        while content:
            written = os.pwrite(place.file, content[:_PIECE], start)
            content, start = content[written:], start + written
        self._missing.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._missing:
                raise ValueError(f"{min(self._missing)} was announced and never written")
            for file in self._files if kind is None else ():
                os.fsync(file)
        finally:
            self._close()

    def _open(self, path: Path, shard: Mapping[str, Layout]) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._files.append(file)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, layout in sorted(shard.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            begin, end = end, end + layout.nbytes
            header[name] = {"dtype": _NAMES[layout.dtype], "shape": list(layout.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        os.pwrite(file, len(text).to_bytes(8, "little") + text, 0)
        os.truncate(file, 8 + len(text) + end)
        for name, layout in shard.items():
            entry = header[name]
            assert isinstance(entry, dict)
            self._places[name] = _Place(file=file, start=8 + len(text) + entry["data_offsets"][0], layout=layout)

    def _write_index(self, shards: list[dict[str, Layout]]) -> None:
        everything = {name: layout for shard in shards for name, layout in shard.items()}
        sizes = {
            "total_parameters": sum(math.prod(layout.shape) for layout in everything.values()),
            "total_size": sum(layout.nbytes for layout in everything.values()),
        }
        where = {name: file for file, shard in zip(self._names, shards, strict=True) for name in shard}
        text = json.dumps({"metadata": sizes, "weight_map": where}, indent=2, sort_keys=True) + "\n"
        (self._folder / f"{self._stem}.safetensors.index.json").write_text(text, encoding="utf-8")

    def _close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, in order; not a copy of those of a contiguous one on the CPU."""
    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _shards(tensors: Mapping[str, Layout], max_bytes: int | None) -> list[dict[str, Layout]]:
    """The tensors of each file: filled in the given order, but a tensor that is too large gets a file of its own."""
    shards: list[dict[str, Layout]] = []
    current: dict[str, Layout] = {}
    filled = 0
    for name, layout in tensors.items():
        if max_bytes is not None and layout.nbytes > max_bytes:
            shards.append({name: layout})
            continue
        if max_bytes is not None and filled + layout.nbytes > max_bytes:
            shards.append(current)
            current, filled = {}, 0
        current[name] = layout
        filled += layout.nbytes
    return [*shards, current] if current or not shards else shards
