"""DeepSpeed's universal checkpoints: a folder per parameter, in it a file for the master and for each moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.importing import pickles
from samestep.checkpoint.importing.source import Source, Stored, count
from samestep.errors import CheckpointError

FOLDER = "zero"


def read(folder: Path) -> Source:
    """What a converted folder `global_stepN` holds. One file is opened at a time. Raises CheckpointError."""
    parameters = sorted(path.parent for path in (folder / FOLDER).rglob("fp32.pt"))
    weights = {path.name: _stored(path / "fp32.pt") for path in parameters}
    states = {path.name: dict(_states(path)) for path in parameters}
    state = pickles.load_dict(folder / FOLDER / "optimizer_state.pt")
    models = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    if not models:
        raise CheckpointError("has no model_states.pt", where=str(folder), remedy="Give the whole converted folder.")
    model = pickles.load_dict(models[0])
    updates = {number for path in parameters if (number := _step(path)) is not None} | set(_updates(state))
    settings = state.get("param_groups") or []
    return Source(
        kind="DeepSpeed universal",
        weights=weights,
        states={name: entry for name, entry in states.items() if entry},
        updates=frozenset(updates),
        step=count(model.get("global_steps")),
        ranks=count(model.get("dp_world_size")) or 1,
        settings=[{key: value for key, value in group.items() if key != "params"} for group in settings],
        versions={"deepspeed": str(model.get("ds_version", "unknown"))},
        left=["the learning rate schedule"] if model.get("lr_scheduler") else [],
    )


def _states(path: Path) -> Iterator[tuple[str, Stored]]:
    for file in sorted(path.glob("*.pt")):
        if file.stem not in ("fp32", "step"):
            yield file.stem, _stored(file)


def _stored(path: Path) -> Stored:
    tensor = _tensor(path)
    return Stored(shape=tuple(tensor.shape), dtype=tensor.dtype, read=lambda: _tensor(path))


def _tensor(path: Path) -> torch.Tensor:
    content = pickles.load(path)
    tensor = content.get("param") if isinstance(content, dict) else content
    if not torch.is_tensor(tensor):
        raise CheckpointError("holds no tensor", where=str(path))
    return tensor


def _step(path: Path) -> int | None:
    return count(pickles.load(path / "step.pt")) if (path / "step.pt").is_file() else None


def _updates(state: Mapping[str, Any]) -> Iterator[int]:
    """Stage 3 keeps the count in the optimizer's own state dict, fused optimizers in its groups."""
    inner = state.get("optimizer_state_dict") or {}
    counted = [entry.get("step") for entry in inner.get("state", {}).values()]
    counted += [group.get("step") for group in state.get("param_groups") or []]
    yield from (number for value in counted if (number := count(value)) is not None)
