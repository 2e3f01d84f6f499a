"""DeepSpeed's universal checkpoints: a folder per parameter, in it a file for the master and for each moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.importing import pickles, zero
from samestep.checkpoint.importing.source import Source, Stored, count, stored
from samestep.errors import CheckpointError

FOLDER = "zero"


def read(folder: Path) -> Source:
    """What a converted folder `global_stepN` holds. One file of tensors is open at a time, besides the model files.

    Raises CheckpointError.
    """
    models = [pickles.load_dict(path) for path in sorted(folder.glob("*_model_states.pt"))]
    if not models:
        raise CheckpointError("has no model_states.pt", where=str(folder), remedy="Give the whole converted folder.")
    model = models[0]
    shapes = {name: tuple(shape) for group in model.get("param_shapes") or [] for name, shape in group.items()}
    weights, states, updates = {}, {}, set()
    for path in sorted(path.parent for path in (folder / FOLDER).rglob("fp32.pt")):
        shape = shapes.get(path.name)
        weights[path.name] = _stored(path / "fp32.pt", shape)
        states[path.name] = {
            file.stem: _stored(file, shape) for file in sorted(path.glob("*.pt")) if file.stem not in ("fp32", "step")
        }
        if (path / "step.pt").is_file():
            updates.add(count(pickles.load(path / "step.pt")))
        # Of what has no moments (frozen, a tie's other name, a buffer) the file is only a wider copy of the model's.
        if not states[path.name] and torch.is_tensor(model.get("module", {}).get(path.name)):
            weights[path.name] = stored(model["module"][path.name])
    if not any(torch.is_tensor(value) and value.numel() for value in model.get("module", {}).values()):
        weights |= zero.frozen_parts(models)
    state = pickles.load_dict(folder / FOLDER / "optimizer_state.pt")
    settings = state.get("param_groups") or []
    return Source(
        kind="DeepSpeed universal",
        weights=weights,
        states={name: entry for name, entry in states.items() if entry},
        updates=frozenset(updates | set(_updates(state))) - {None},
        step=count(model.get("global_steps")),
        ranks=count(model.get("dp_world_size")) or 1,
        settings=[{key: value for key, value in group.items() if key != "params"} for group in settings],
        versions={"deepspeed": str(model.get("ds_version", "unknown"))},
        left=["the learning rate schedule"] if model.get("lr_scheduler") else [],
    )


def _stored(path: Path, shape: tuple[int, ...] | None) -> Stored:
    """A parameter's file; stage 3's are flat."""
    tensor = _tensor(path, shape)
    return Stored(shape=tuple(tensor.shape), dtype=tensor.dtype, read=lambda: _tensor(path, shape))


def _tensor(path: Path, shape: tuple[int, ...] | None) -> torch.Tensor:
    content = pickles.load(path)
    tensor = content.get("param") if isinstance(content, dict) else content
    if not torch.is_tensor(tensor):
        raise CheckpointError("holds no tensor", where=str(path))
    tensor = tensor.detach()
    return tensor.view(shape) if shape is not None and tensor.numel() == torch.Size(shape).numel() else tensor


def _updates(state: Mapping[str, Any]) -> Iterator[int]:
    """Stage 3 keeps the count in the optimizer's own state dict, fused optimizers in its groups."""
    inner = state.get("optimizer_state_dict") or {}
    counted = [entry.get("step") for entry in inner.get("state", {}).values()]
    counted += [group.get("step") for group in state.get("param_groups") or []]
    yield from (number for value in counted if (number := count(value)) is not None)
