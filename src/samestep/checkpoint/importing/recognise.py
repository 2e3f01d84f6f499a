"""Which tool made a checkpoint, from the files that are there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from samestep.checkpoint import manifest
from samestep.checkpoint.importing import sharded, torch_states, universal, zero
from samestep.checkpoint.importing.source import Source
from samestep.checkpoint.metadata import NAME as METADATA
from samestep.errors import CheckpointError

KINDS = ("deepspeed", "deepspeed-universal", "fsdp-full", "fsdp-sharded", "accelerate", "trainer", "torch")

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
_LOCAL = re.compile(r"pytorch_model_fsdp(_\d+)?_rank\d+\.bin")
_SECOND = re.compile(r"(model|pytorch_model|optimizer|pytorch_model_fsdp)_[1-9]\d*(\.bin|\.safetensors)?")
# Opened by nobody here: pickles of random states, schedulers and arguments.
_OTHERS = {
    "scheduler": "the learning rate schedule",
    "random_states": "the random states",
    "rng_state": "the random states",
    "scaler": "the loss scale",
    "sampler": "the data position",
    "dl_state_dict": "the data position",
    "training_args": "the trainer's arguments",
    "custom_checkpoint": "registered objects",
}


def read(path: Path, kind: str | None = None) -> Source:
    """The checkpoint of another tool at `path`, a folder or a file.

    With `kind`, one of KINDS, it is read as that. Raises CheckpointError when it is none, or could be several.
    """
    try:
        opener = _only(path, kind)
        source = opener()
        left, step = [*source.left, *_others(path)], _trainer_step(path)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(error.filename or path)) from error
    except CheckpointError as error:
        if error.where is None:
            raise CheckpointError(error.what, where=str(path), remedy=error.remedy) from error
        raise
    return replace(source, left=left, step=source.step if step is None else step)


def _only(path: Path, kind: str | None) -> Callable[[], Source]:
    """The one reader for a path."""
    if (path / manifest.NAME).is_file():
        raise CheckpointError("is a checkpoint of samestep already", remedy="Give it to --resume-from.")
    if not path.exists():
        raise CheckpointError("is not there")
    found = {name: opener for name, opener in candidates(path).items() if kind in (None, name)}
    if not found:
        raise CheckpointError(
            f"is no checkpoint of {'a kind that can be imported' if kind is None else f'the kind {kind}'}",
            remedy="Give the folder that holds the optimizer's state: global_stepN of DeepSpeed, checkpoint-N of a "
            "Trainer, what accelerate's save_state wrote, a folder of torch's distributed checkpoint format.",
        )
    if len(found) > 1:
        raise CheckpointError(f"can be read as {' and as '.join(found)}", remedy="Say which with --kind.")
    return next(iter(found.values()))


def candidates(path: Path) -> dict[str, Callable[[], Source]]:
    """Everything that the files of `path` can be read as. Raises CheckpointError where several checkpoints are."""
    if path.is_file():
        return {"torch": lambda: _single(path)}
    folder = _chain(path)[-1]
    _refuse_several(folder)
    found: dict[str, Callable[[], Source]] = {}
    if any(folder.glob(zero.OPTIMIZER_FILES)):
        found["deepspeed"] = lambda: zero.read(folder)
    if (folder / universal.FOLDER / "optimizer_state.pt").is_file():
        found["deepspeed-universal"] = lambda: universal.read(folder)
    model, optimizer = folder / "pytorch_model_fsdp_0", folder / "optimizer_0"
    if (model / METADATA).is_file() and (optimizer / METADATA).is_file():
        found["fsdp-sharded"] = lambda: sharded.read("accelerate FSDP, sharded", model, optimizer)
    elif (folder / METADATA).is_file():
        found["fsdp-sharded"] = lambda: sharded.read("torch distributed checkpoint", folder)
    weights = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
    whole = folder / "pytorch_model_fsdp.bin"
    if whole.is_file() and (folder / "optimizer.bin").is_file():
        found["fsdp-full"] = lambda: _pair("accelerate FSDP, full", whole, folder / "optimizer.bin")
    for kind, name, optimizer_file in (
        ("accelerate", "accelerate", "optimizer.bin"),
        ("trainer", "transformers Trainer", "optimizer.pt"),
    ):
        if weights and (folder / optimizer_file).is_file():
            found[kind] = _opener(name, weights, folder / optimizer_file)
    if not found and not weights:
        found |= _two_files(folder)
    return found


def _opener(name: str, weights: list[Path], optimizer: Path) -> Callable[[], Source]:
    def opener() -> Source:
        if len(weights) > 1:
            raise CheckpointError(
                f"has weights in {' and in '.join(path.name for path in weights)}",
                where=str(optimizer.parent),
                remedy="Leave the file with the weights that go with the optimizer's state.",
            )
        return _pair(name, weights[0], optimizer)

    return opener


def _two_files(folder: Path) -> dict[str, Callable[[], Source]]:
    """A script's own pair: model.pt and optimizer.pt, or optim.pt."""
    pairs = [
        (model, optimizer)
        for model in (folder / f"model{end}" for end in (".pt", ".pth", ".bin"))
        for optimizer in (folder / f"{name}{model.suffix}" for name in ("optimizer", "optim"))
        if model.is_file() and optimizer.is_file()
    ]
    return {"torch": lambda: _pair("torch", *pairs[0])} if len(pairs) == 1 else {}


def _pair(name: str, model: Path, optimizer: Path) -> Source:
    return _source(name, torch_states.weights(model), torch_states.optimizer(optimizer))


def _single(path: Path) -> Source:
    weights, optimizer, rest = torch_states.whole(path)
    source = _source("torch", weights, optimizer)
    return replace(source, left=[*source.left, *rest])


def _source(name: str, weights: Mapping[str, torch_states.Stored], optimizer: torch_states.OptimizerState) -> Source:
    return Source(
        kind=name,
        weights=weights,
        states=optimizer.states,
        groups=optimizer.groups,
        updates=optimizer.updates,
        settings=optimizer.settings,
    )


def _chain(path: Path) -> list[Path]:
    """The folders down to the one that the files are in: where `latest` points to, a Trainer's only checkpoint-N."""
    tags = {_tag(path / name) for name in ("latest", "latest_universal") if (path / name).is_file()}
    inside = sorted(entry for entry in path.glob("checkpoint-*") if entry.is_dir())
    places = [path / tag for tag in sorted(tags)] or inside
    if len(places) > 1:
        raise CheckpointError(
            f"holds several checkpoints: {', '.join(place.name for place in places)}",
            where=str(path),
            remedy="Give the folder of one of them.",
        )
    if tags:
        return [path, places[0]]
    return [path, *_chain(places[0])] if places else [path]


def _tag(path: Path) -> str:
    try:
        name = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise CheckpointError("cannot be read", where=str(path)) from error
    if Path(name).name != name or not (path.parent / name).is_dir():
        raise CheckpointError(f"names {name!r}, and there is no such folder beside it", where=str(path))
    return name


def _refuse_several(folder: Path) -> None:
    for entry in folder.iterdir():
        if _LOCAL.fullmatch(entry.name):
            raise CheckpointError(
                f"has {entry.name}: what each FSDP rank saved for itself cannot be read without its ranks",
                where=str(folder),
                remedy="Save with FULL_STATE_DICT, or with SHARDED_STATE_DICT through torch.distributed.checkpoint.",
            )
        if _SECOND.fullmatch(entry.name):
            raise CheckpointError(
                f"holds several models or optimizers: {entry.name}",
                where=str(folder),
                remedy="Save the one that the recipe trains.",
            )


def _others(path: Path) -> list[str]:
    """Files beside the state whose contents are not brought in."""
    if path.is_file():
        return []
    found: dict[str, list[str]] = {}
    for entry in sorted(entry for folder in _chain(path) for entry in folder.iterdir()):
        for start, what in _OTHERS.items():
            if entry.name.startswith(start):
                found.setdefault(what, []).append(entry.name)
    return [f"{what} ({', '.join(sorted(set(names))[:3])})" for what, names in found.items()]


def _trainer_step(path: Path) -> int | None:
    """The step count of a Trainer, which is there whatever engine saved beside it."""
    for folder in _chain(path) if path.is_dir() else ():
        state = folder / "trainer_state.json"
        if state.is_file():
            try:
                step = json.loads(state.read_text(encoding="utf-8"))["global_step"]
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise CheckpointError("cannot be read", where=str(state)) from error
            return step if isinstance(step, int) else None
    return None
