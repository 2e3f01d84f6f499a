"""The trained model as a folder that transformers loads, the same bytes from every engine.

The main rank loads the model once more as the run did and writes the trained masters over it. So frozen weights,
buffers, ties and the dtype of every tensor are what they were when loaded, whatever the engine did with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from samestep.checkpoint.gather import gather_masters
from samestep.dtypes import DTYPES
from samestep.engines.protocol import Engine
from samestep.world import World


def gather_weights(
    engine: Engine, world: World, *, into: dict[str, torch.Tensor], masters: Path | None = None
) -> str | None:
    """Copies every trained master over the tensor of its name in `into` (main rank), in that tensor's dtype.

    With `masters`, also writes them as they are to that safetensors file. Returns the sha256 of all names and masters
    (main rank), equal for equal weights.
    """
    digest = hashlib.sha256()
    kept: dict[str, torch.Tensor] = {}
    for name, whole in gather_masters(engine, world):
        if whole is None:
            continue
        digest.update(name.encode())
        digest.update(whole.contiguous().view(torch.uint8).numpy().tobytes())
        if name in into:
            into[name].copy_(whole)
        if masters is not None:
            kept[name] = whole
    if world.is_main and masters is not None:
        save_file(kept, masters)
    return digest.hexdigest() if world.is_main else None


def write_export(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, *, dtype: str) -> None:
    """Saves model, config and tokenizer into `folder`; `dtype` is the recipe's precision.export_dtype."""
    if dtype != "loaded":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[dtype])
        model.config.dtype = DTYPES[dtype]  # type: ignore[union-attr]
    save: Callable[..., None] = model.save_pretrained  # type: ignore[assignment]
    save(folder)
    tokenizer.save_pretrained(folder)
