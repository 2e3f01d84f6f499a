"""An engine's training state as named slices, in the names torch's own state dicts use.

`model.NAME` is a parameter's master; `optim.state.NAME.KEY` what the optimizer keeps of it (exp_avg, exp_avg_sq,
momentum_buffer, and for low-kahan compensation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from samestep.checkpoint.manifest import StoredTensor
from samestep.dtypes import dtype_name
from samestep.engines.protocol import Engine, Shard

_MASTER = "model."
_STATE = "optim.state."


def state_of(engine: Engine) -> list[Shard]:
    """Everything this rank holds of the training: views of the live tensors, not copies."""
    masters = engine.masters()
    found = [replace(shard, name=master_key(shard.name)) for shard in masters]
    for shard in masters:
        for key, values in engine.moments(shard.name).items():
            if key != "step":
                found.append(replace(shard, name=state_key(shard.name, key), values=values.view(-1)))
    return found


def kept_by(engine: Engine, shards: Sequence[Shard]) -> list[Shard]:
    """The shards that this rank writes: of equal copies, one does."""
    return [shard for shard in shards if shard.values.numel()] if engine.replica.index == 0 else []


def stored(shards: Sequence[Shard]) -> dict[str, StoredTensor]:
    """Shape and dtype of every tensor, by name."""
    return {shard.name: StoredTensor(shape=list(shard.shape), dtype=dtype_name(shard.values.dtype)) for shard in shards}


def optimizer_keys(tensors: Sequence[str]) -> list[str]:
    """What the optimizer kept of a parameter, from the names in a checkpoint."""
    return sorted({name.rpartition(".")[2] for name in tensors if name.startswith(_STATE)})


def master_key(name: str) -> str:
    """The name of a parameter's master in a checkpoint."""
    return _MASTER + name


def state_key(name: str, key: str) -> str:
    """The name, in a checkpoint, of what the optimizer keeps of a parameter under `key`."""
    return f"{_STATE}{name}.{key}"


def master_names(tensors: Sequence[str]) -> set[str]:
    """The parameters that have a master in a checkpoint."""
    return {name.removeprefix(_MASTER) for name in tensors if name.startswith(_MASTER)}
