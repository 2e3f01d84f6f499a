"""DeepSpeed's own checkpoints of ZeRO-1, 2 and 3: a folder of one or two files per rank.

Masters and moments are flat partitions, one per parameter group (stage 3: per sub-group) and rank. The names, shapes
and order of what lies in them are in the model files. Read from DeepSpeed 0.14 to 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from samestep.checkpoint.importing import pickles
from samestep.checkpoint.importing.source import Source, Stored, count, stored
from samestep.errors import CheckpointError

OPTIMIZER_FILES = "*_optim_states.pt"
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")

# What DeepSpeed itself puts into a model file and nobody misses; everything else is named as left behind.
_KNOWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config",
    "ds_version", "num_experts", "universal_checkpoint_info", "sparse_tensor_module_names", "ds_autoep_layers",
    "autoep_layers", "checkpoint_parallel_dimensions",
}  # fmt: skip


class _Piece(NamedTuple):
    """Elements [start, start + numel) of a rank's flat tensor."""

    rank: int
    start: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """One parameter, in flat group `group`, made of `pieces` in the order of its elements."""

    name: str
    shape: tuple[int, ...]
    group: int
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """One rank's flat tensors by group, and the rest of its optimizer file."""

    masters: Sequence[torch.Tensor]
    states: Sequence[Mapping[str, Any]]
    settings: Sequence[Mapping[str, Any]]
    rest: Mapping[str, Any]


def read(folder: Path) -> Source:
    """What a folder `global_stepN` holds. Every file is mapped, none is read. Raises CheckpointError."""
    ranks = [_rank(path) for path in _by_rank(folder, OPTIMIZER_FILES, _OPTIMIZER_FILE)]
    stage = int(ranks[0].rest.get("zero_stage", 1))  # ZeRO-1 with fp32 accumulation does not say
    paths = _by_rank(folder, "*_model_states.pt", _MODEL_FILE)
    models = [pickles.load_dict(path) for path in paths]
    model = models[0]
    if stage == 3 and len(models) != len(ranks):
        raise _refused(folder, f"has {len(models)} model files for {len(ranks)} ranks")
    try:
        _refuse_other_parallelism(folder, model, ranks)
        placed = list(_zero3(folder, model, ranks) if stage == 3 else _zero12(model, ranks))
        frozen = frozen_parts(models) if stage == 3 else _unplaced(model, placed)
        copies = {} if stage == 3 else {p.name: stored(model["module"][p.name]) for p in placed}
        return Source(
            kind=f"DeepSpeed ZeRO-{stage}",
            weights={p.name: _joined(p, [rank.masters for rank in ranks]) for p in placed} | frozen,
            copies=copies,
            states={p.name: dict(_states(p, ranks)) for p in placed},
            updates=frozenset(_updates(ranks)),
            step=count(model.get("global_steps")),
            ranks=len(ranks),
            settings=ranks[0].settings,
            versions={"deepspeed": str(model.get("ds_version", "unknown"))},
            left=[*_left(model, ranks[0].rest)],
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _refused(folder, f"has not the layout of a ZeRO-{stage} checkpoint: no {error}") from error


def _by_rank(folder: Path, pattern: str, name: re.Pattern[str]) -> list[Path]:
    """The files of all data-parallel ranks in their order."""
    found: dict[int, Path] = {}
    for path in folder.glob(pattern):
        match = name.fullmatch(path.name)
        if match is None or int(match[2]):
            raise _refused(
                folder, f"has {path.name}: tensor, pipeline and expert parallel checkpoints are not supported"
            )
        if int(match[1] or 0) in found:
            raise _refused(folder, f"has both {found[int(match[1] or 0)].name} and {path.name}")
        found[int(match[1] or 0)] = path
    for rank in range(max(found, default=0) + 1):
        if rank not in found:
            raise _refused(folder, f"lacks the file {pattern.removeprefix('*_')} of rank {rank}")
    return [found[rank] for rank in sorted(found)]


def _rank(path: Path) -> _Rank:
    try:
        state = pickles.load_dict(path)["optimizer_state_dict"]
        inner = state["optimizer_state_dict"] if "fp32_flat_groups" in state else state["base_optimizer_state"]
        groups, by_position = inner["param_groups"], inner["state"]
        masters = state.get("fp32_flat_groups") or state["single_partition_of_fp32_groups"]
        return _Rank(
            masters=masters,
            states=[by_position.get(position, {}) for position in range(len(masters))],
            settings=[{key: value for key, value in group.items() if key != "params"} for group in groups],
            rest=state,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"has not the layout of a ZeRO optimizer file: {error}",
            where=str(path),
            remedy="Elastic checkpoints and those with state on NVMe hold no whole state; save without either.",
        ) from error


def _refuse_other_parallelism(folder: Path, model: Mapping[str, Any], ranks: Sequence[_Rank]) -> None:
    if (
        model.get("mp_world_size", 1) != 1
        or any(folder.glob("layer_*"))
        or ranks[0].rest.get("ds_zero_partition_groups")
    ):
        raise _refused(folder, "is of a tensor, pipeline or expert parallel run, which is not supported")
    saved = model.get("dp_world_size", len(ranks))
    if saved != len(ranks):
        raise _refused(folder, f"was saved by {saved} ranks, but has files of {len(ranks)}")


def _zero12(model: Mapping[str, Any], ranks: Sequence[_Rank]) -> Iterator[_Placed]:
    """Parameters of a group lie one after the other, and the ranks have equal parts of the whole.

    DeepSpeed also notes for every rank where parameters lie; under round_robin_gradients those notes are wrong.
    That this layout is right shows in that masters round to the model's weights, the source's `copies`.
    """
    paddings = ranks[0].rest.get("param_alignment_paddings")
    for group, shapes in enumerate(model["param_shapes"]):
        part = max(rank.masters[group].numel() for rank in ranks)
        between = paddings[group] if paddings else [0] * len(shapes)
        offset = 0
        for (name, shape), padding in zip(shapes.items(), between, strict=True):
            numel = torch.Size(shape).numel()
            pieces = []
            for rank in range(len(ranks)):
                low, high = max(offset, rank * part), min(offset + numel, (rank + 1) * part)
                if low < high:
                    pieces.append(_Piece(rank, low - rank * part, high - low))
            yield _Placed(name=name, shape=tuple(shape), group=group, pieces=tuple(pieces))
            offset += numel + padding


def _zero3(folder: Path, model: Mapping[str, Any], ranks: Sequence[_Rank]) -> Iterator[_Placed]:
    """Every parameter is cut into equal parts, the last one padded; a rank has its parts of a sub-group in a row."""
    for group, shapes in enumerate(model["param_shapes"]):
        offset = 0
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            part = -(-numel // len(ranks))
            sizes = [max(0, min(part, numel - rank * part)) for rank in range(len(ranks))]
            pieces = tuple(_Piece(rank, offset, size) for rank, size in enumerate(sizes) if size)
            yield _Placed(name=name, shape=tuple(shape), group=group, pieces=pieces)
            offset += part
        if any(rank.masters[group].numel() != offset for rank in ranks):
            raise _refused(
                folder, f"has {offset} elements in sub-group {group} by its shapes, other numbers in its files"
            )


def _joined(place: _Placed, flats: Sequence[Sequence[torch.Tensor]]) -> Stored:
    """One parameter's part of flat tensors, given by rank and group."""

    def whole() -> torch.Tensor:
        parts = [flats[p.rank][place.group].view(-1)[p.start : p.start + p.numel] for p in place.pieces]
        return torch.cat(parts).view(place.shape).detach()

    for piece in place.pieces:
        held = flats[piece.rank][place.group].numel()
        if piece.start + piece.numel > held:
            raise CheckpointError(f"{place.name} does not lie in the {held} elements that rank {piece.rank} has")
    numel = sum(piece.numel for piece in place.pieces)
    if numel != torch.Size(place.shape).numel():
        raise CheckpointError(f"the ranks have {numel} elements of {place.name} {list(place.shape)}")
    return Stored(shape=place.shape, dtype=flats[0][place.group].dtype, read=whole)


def _states(place: _Placed, ranks: Sequence[_Rank]) -> Iterator[tuple[str, Stored]]:
    first = ranks[place.pieces[0].rank].states[place.group] if place.pieces else {}
    for key, value in first.items():
        if key != "step" and torch.is_tensor(value) and value.dim():
            yield key, _joined(place, [[state.get(key, _NOTHING) for state in rank.states] for rank in ranks])
        elif key != "step":
            yield key, stored(torch.as_tensor(value))


_NOTHING = torch.empty(0)


def _updates(ranks: Sequence[_Rank]) -> Iterator[int]:
    for rank in ranks:
        # Fused optimizers count once per parameter group.
        counted = [*(state.get("step") for state in rank.states), *(group.get("step") for group in rank.settings)]
        yield from (number for value in counted if (number := count(value)) is not None)


def _unplaced(model: Mapping[str, Any], placed: Sequence[_Placed]) -> dict[str, Stored]:
    """The weights that have no master: frozen ones. Buffers are not among them."""
    trained = {p.name for p in placed} | set(model.get("buffer_names") or ()) | set(model.get("shared_params") or ())
    return {
        name: stored(value) for name, value in model["module"].items() if name not in trained and torch.is_tensor(value)
    }


def frozen_parts(models: Sequence[Mapping[str, Any]]) -> dict[str, Stored]:
    """Frozen weights of stage 3, from the model files of all ranks: each has a part, the last one padded."""

    def joined(name: str, shape: tuple[int, ...]) -> Stored:
        parts = [model["frozen_param_fragments"][name] for model in models]

        def whole() -> torch.Tensor:
            return torch.cat([part.view(-1) for part in parts])[: torch.Size(shape).numel()].view(shape)

        return Stored(shape=shape, dtype=parts[0].dtype, read=whole)

    return {name: joined(name, tuple(shape)) for name, shape in (models[0].get("frozen_param_shapes") or {}).items()}


def _left(model: Mapping[str, Any], rest: Mapping[str, Any]) -> Iterator[str]:
    if buffers := model.get("buffer_names"):
        yield f"{len(buffers)} buffers: the recipe's model has its own"
    scaler = rest.get("loss_scaler")
    if scaler is not None and rest.get("dynamic_loss_scale"):
        scale = getattr(scaler, "cur_scale", "unknown")
        yield f"the loss scale, {scale}: the run starts with precision.loss_scale.initial"
    for name in model.keys() - _KNOWN:
        if model[name] is not None:
            yield f"{name}, in the model file"


def _refused(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(folder), remedy="Give a whole checkpoint of data parallel ZeRO ranks.")
