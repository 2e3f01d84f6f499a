"""A small checkpoint made in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from samestep.checkpoint import store
from samestep.checkpoint.manifest import Manifest, stored_file
from samestep.checkpoint.state import stored
from samestep.checkpoint.tensors import write_tensors
from samestep.engines.protocol import Shard


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of several dtypes and numbers of dimensions."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.w": torch.randn(5, 7, generator=generator),
        "model.b": torch.randn(3, generator=generator).bfloat16(),
        "optim.state.w.exp_avg": torch.randn(5, 7, generator=generator),
        "optim.state.b.exp_avg": torch.randn(3, generator=generator).bfloat16(),
    }


def shards(whole: dict[str, torch.Tensor]) -> list[Shard]:
    return [Shard(name=name, shape=tuple(t.shape), start=0, values=t.reshape(-1)) for name, t in whole.items()]


def manifest(step: int, whole: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(
        step=step,
        updates=step,
        engine="fsdp",
        ranks=2,
        regime="mixed",
        rows_per_step=4,
        data_sha256="0" * 64,
        loss_scale=None,
        moved=["w"],
        tensors=stored(shards(whole)),
        recipe={},
        plan={},
        versions={"torch": torch.__version__},
    )


def save(checkpoints: Path, step: int, whole: dict[str, torch.Tensor] | None = None, *, keep: int = 2) -> Path:
    """Writes a checkpoint as a run does; its folder."""
    whole = whole or tensors(step)
    partial = store.begin(checkpoints, step)
    write_tensors(partial, shards(whole))
    files = {path.name: stored_file(path) for path in partial.iterdir()}
    return store.publish(partial, replace(manifest(step, whole), files=files), keep=keep)
