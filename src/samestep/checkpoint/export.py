"""The trained model as a folder that transformers loads, the same bytes from every engine.

The main rank loads the model once more as the run did and writes the trained masters over it. So frozen weights,
buffers, ties and the dtype of every tensor are what they were when loaded, whatever the engine did with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from samestep.checkpoint.gather import gather_masters
from samestep.dtypes import DTYPES
from samestep.engines.protocol import Engine
from samestep.rounding import Stream, stochastic_to_bfloat16
from samestep.world import World


def gather_weights(
    engine: Engine,
    world: World,
    *,
    into: dict[str, torch.Tensor],
    random: Callable[[str], Stream] | None = None,
    masters: Path | None = None,
    counted: Callable[[str, torch.Tensor], None] | None = None,
) -> str | None:
    """Copies every trained master over the tensor of its name in `into` (main rank), in that tensor's dtype.

    Rounds to nearest, or with `random`, which gives a parameter's stream by its name, stochastically to bf16. With
    `masters`, also writes them as they are to that safetensors file. `counted` is called with every name and master
    after that. Returns the sha256 of all names and masters (main rank), equal for equal weights.
    """
    digest = hashlib.sha256()
    kept: dict[str, torch.Tensor] = {}
    for name, whole in gather_masters(engine, world):
        if whole is None:
            continue
        digest.update(name.encode())
        digest.update(whole.contiguous().view(torch.uint8).numpy().tobytes())
        if name in into:
            round_into(into[name], whole, random(name) if random else None)
            if counted is not None:
                counted(name, whole)
        if masters is not None:
            kept[name] = whole
    if world.is_main and masters is not None:
        save_file(kept, masters)
    return digest.hexdigest() if world.is_main else None


def round_into(target: torch.Tensor, master: torch.Tensor, random: Stream | None, *, start: int = 0) -> None:
    """Writes a master over a tensor of the same shape, as an export does: to nearest, or to bf16 with a stream of
    random numbers stochastically. `start` is the index of the first element in its parameter."""
    if random is not None and target.dtype == torch.bfloat16 and master.dtype == torch.float32:
        target.copy_(stochastic_to_bfloat16(master.reshape(-1), random, start=start).view_as(master))
    else:
        target.copy_(master)


def keep_what_is_exported(
    engine: Engine, dtypes: Mapping[str, torch.dtype], random: Callable[[str], Stream] | None
) -> None:
    """Rounds this rank's masters to what an export has of them, to see how the exported model does. No way back."""
    for shard in engine.masters():
        exported = torch.empty_like(shard.values, dtype=dtypes[shard.name])
        round_into(exported, shard.values, random(shard.name) if random else None, start=shard.start)
        shard.values.copy_(exported)
    engine.refresh()


def cast_for_export(model: nn.Module, dtype: str) -> None:
    """Casts a model's parameters to the recipe's precision.export_dtype, before the masters are written over them."""
    if dtype != "loaded":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(DTYPES[dtype])
        model.config.dtype = DTYPES[dtype]  # type: ignore[union-attr]


def write_export(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Saves model, config and tokenizer into `folder`."""
    save: Callable[..., None] = model.save_pretrained  # type: ignore[assignment]
    save(folder)
    tokenizer.save_pretrained(folder)
