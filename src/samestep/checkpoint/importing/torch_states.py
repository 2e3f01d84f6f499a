"""State dicts that torch.save or safetensors wrote whole: of DDP, of FSDP gathered on one rank, of a Trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from samestep.checkpoint.importing import pickles
from samestep.checkpoint.importing.source import Stored, count, stored
from samestep.errors import CheckpointError

_MODELS = ("model", "model_state_dict", "state_dict", "module", "model_state")
_SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """An optimizer's state dict: by name or by position, see `source.Source`."""

    states: Mapping[str, Mapping[str, Stored]] = field(default_factory=dict)
    groups: Sequence[Sequence[Mapping[str, Stored]]] = ()
    updates: frozenset[int] = frozenset()
    settings: Sequence[Mapping[str, Any]] = ()
    left: Sequence[str] = ()


def weights(path: Path) -> dict[str, Stored]:
    """The tensors of a weights file (safetensors or torch.save), or of the index of several. Raises CheckpointError."""
    if path.name.endswith(".index.json"):
        try:
            names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError("cannot be read as an index of weights", where=str(path)) from error
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise CheckpointError("points outside of its folder", where=str(path))
        return {key: value for name in names for key, value in weights(path.parent / name).items()}
    if path.suffix == ".safetensors":
        return _safetensors(path)
    return _tensors(pickles.load_dict(path))


def _safetensors(path: Path) -> dict[str, Stored]:
    try:
        content = safe_open(str(path), framework="pt")
        names = list(content.keys())
        return {name: _lazy(path, content, name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot be read: {str(error).splitlines()[0]}", where=str(path)) from error


def _lazy(path: Path, content: Any, name: str) -> Stored:
    piece = content.get_slice(name)
    dtype = _SAFETENSORS.get(piece.get_dtype())
    if dtype is None:
        raise CheckpointError(f"has {name} in {piece.get_dtype()}, which is no dtype of weights", where=str(path))
    return Stored(shape=tuple(piece.get_shape()), dtype=dtype, read=lambda: content.get_tensor(name))


def _tensors(content: Mapping[Any, Any]) -> dict[str, Stored]:
    return {name: stored(value) for name, value in content.items() if isinstance(name, str) and torch.is_tensor(value)}


def optimizer(path: Path) -> OptimizerState:
    """The optimizer's state dict in a torch.save file. Raises CheckpointError."""
    return _optimizer(pickles.load_dict(path), path)


def whole(path: Path) -> tuple[dict[str, Stored], OptimizerState, list[str]]:
    """Model, optimizer and the names of the rest of one torch.save file that has both, by the names that scripts use.
    Raises CheckpointError when it has not one of each."""
    content = pickles.load_dict(path)
    models = [name for name in content if name in _MODELS and isinstance(content[name], dict)]
    optimizers = [
        name for name, value in content.items() if isinstance(value, dict) and {"state", "param_groups"} <= value.keys()
    ]
    if len(models) != 1 or len(optimizers) != 1:
        raise CheckpointError(
            f"has {_listed(models)} for a model's state dict and {_listed(optimizers)} for an optimizer's",
            where=str(path),
            remedy=f"There must be one model, called {', '.join(_MODELS[:-1])} or {_MODELS[-1]}, and one optimizer.",
        )
    rest = [f"{name}, in {path.name}" for name in content if name not in (*models, *optimizers)]
    return _tensors(content[models[0]]), _optimizer(content[optimizers[0]], path), rest


def _listed(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names)) or "nothing"


def _optimizer(content: Mapping[str, Any], path: Path) -> OptimizerState:
    try:
        state, groups = content["state"], content["param_groups"]
        settings = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
        members = [_members(group) for group in groups]
        updates = frozenset(number for entry in state.values() if (number := count(entry.get("step"))) is not None)
        tensors = {key: dict(_state(entry)) for key, entry in state.items()}
        _refuse_shared(state, path)
        known = [key for group in members for key, _ in group]
        if strange := next((key for key in state if key not in known), None):
            raise CheckpointError(f"has state of {strange!r}, which is in no parameter group", where=str(path))
        if all(name is not None for group in members for _, name in group):
            named = {name: tensors.get(key, {}) for group in members for key, name in group if name is not None}
            return OptimizerState(states=named, updates=updates, settings=settings)
        by_position = [[tensors.get(key, {}) for key, _ in group] for group in members]
        return OptimizerState(groups=by_position, updates=updates, settings=settings)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"is no state dict of one torch optimizer: {error}",
            where=str(path),
            remedy="It needs `state` and `param_groups`, as optimizer.state_dict() gives them.",
        ) from error


def _refuse_shared(state: Mapping[Any, Mapping[str, Any]], path: Path) -> None:
    """torch 2.13's first FSDP, gathering full states on the CPU, leaves one tensor under the names of both moments."""
    for key, entry in state.items():
        seen: dict[int, str] = {}
        for name, value in entry.items():
            if (
                torch.is_tensor(value)
                and value.numel() > 1
                and (other := seen.setdefault(value.data_ptr(), name)) != name
            ):
                raise CheckpointError(
                    f"has one tensor for {other} and {name} of {key}: its state was lost when it was gathered",
                    where=str(path),
                    remedy="Save sharded state dicts through torch.distributed.checkpoint instead.",
                )


def _members(group: Mapping[str, Any]) -> list[tuple[Any, str | None]]:
    """Keys of a group's parameters in `state`, and their names where the file says them."""
    keys = list(group["params"])
    if all(isinstance(key, str) for key in keys):
        return [(key, key) for key in keys]
    names = group.get("param_names") or [None] * len(keys)
    return list(zip(keys, names, strict=True))


def _state(entry: Mapping[str, Any]) -> Iterator[tuple[str, Stored]]:
    for key, value in entry.items():
        if key != "step" and value is not None:
            yield key, stored(torch.as_tensor(value))
