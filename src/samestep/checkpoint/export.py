"""The trained model as a folder that transformers loads, the same bytes from every engine.

The trained masters are written over the weights that the run loaded. So frozen weights, buffers, ties and the dtype of
every tensor are what they were when loaded, whatever the engine did with them. A tensor is read, rounded and written
before the next one is; only a model of which nobody knows what its files hold is loaded whole for it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from samestep import models
from samestep.checkpoint.base_model import BaseModel, open_base, state_of, unwrapped
from samestep.checkpoint.dropped import Dropped
from samestep.checkpoint.frozen import digest, frozen_sha256
from samestep.checkpoint.gather import gather_masters
from samestep.checkpoint.merging import changes, refuse_tied
from samestep.checkpoint.weight_writer import Layout, WeightWriter, bytes_of
from samestep.dtypes import DTYPES
from samestep.engines.protocol import Engine
from samestep.errors import ModelError, OutputError
from samestep.recipe.schema import Model as ModelRecipe
from samestep.rounding import Stream, stochastic_to_bfloat16
from samestep.world import World

FILE_BYTES = 5 * 10**9
"""Tensors of one file of an export, by default."""

Put = Callable[[str, torch.Tensor], None]
"""Takes the name and the master of a trained parameter."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How a model is exported.

    `dtype` is a name of precision.export_dtype; `merge` merges adapters into the model's weights; `random` gives the
    stream of a stochastic rounding by the parameter's name, None rounds to nearest. Where `dropped` counts what the
    export throws away, `adapters` are the adapters that the run began with.
    """

    model: ModelRecipe
    seed: int
    dtype: str
    merge: bool = False
    random: Callable[[str], Stream] | None = None
    max_bytes: int = FILE_BYTES
    dropped: Dropped | None = None
    adapters: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def dtype_of(self, loaded: torch.dtype) -> torch.dtype:
        return DTYPES[self.dtype] if self.dtype != "loaded" and loaded.is_floating_point else loaded

    def rounded(self, name: str, master: torch.Tensor, loaded: torch.dtype) -> torch.Tensor:
        """What is exported of a master."""
        target = torch.empty_like(master, dtype=self.dtype_of(loaded))
        round_into(target, master, self.random(name) if self.random else None)
        return target


class Target(Protocol):
    """A model that is going to be exported. `shapes` has every parameter of the model that trained, by name."""

    shapes: dict[str, tuple[int, ...]]

    def frozen_sha256(self) -> str | None:
        """The digest of the frozen weights that go into the export; None without any."""
        ...

    def into(self, folder: Path) -> contextlib.AbstractContextManager[Put]:
        """Writes the model into an empty folder: gives a function that takes the trained parameters, in any order; the
        end of the context writes the rest. Raises OSError and ModelError."""
        ...


def open_target(wanted: Wanted) -> Target:
    """Where the trained parameters go. Raises ModelError when the model cannot be loaded any more."""
    base = open_base(wanted.model)
    return _Whole(wanted) if base is None else _Streamed(base, wanted)


class _Streamed:
    """Out of the files of the stored model, into those of the exported one."""

    def __init__(self, base: BaseModel, wanted: Wanted) -> None:
        self._base, self._wanted = base, wanted
        self._merges = wanted.merge and base.adapted is not None
        if self._merges:
            assert base.adapted is not None
            refuse_tied(base.adapted)
        self.shapes = _shapes(base.adapted or base.skeleton)

    def frozen_sha256(self) -> str | None:
        base = self._base
        if base.adapted is not None and not self._merges:
            return None
        model = base.adapted or models.load_meta_model(self._wanted.model)
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        return digest({n: partial(base.read, n if base.adapted is None else unwrapped(n)) for n in frozen})

    @contextlib.contextmanager
    def into(self, folder: Path) -> Generator[Put]:
        base, wanted = self._base, self._wanted
        adapters: dict[str, torch.Tensor] = {}
        if base.adapted is not None and not self._merges:
            yield adapters.__setitem__
            self._save_adapters(adapters, folder)
            return
        state = state_of(base.skeleton)
        parameters = dict(base.skeleton.named_parameters())
        layouts = {
            name: Layout(dtype=wanted.dtype_of(base.dtype) if name in parameters else t.dtype, shape=tuple(t.shape))
            for name, t in state.items()
        }
        left = set(layouts)
        with WeightWriter(folder, layouts, max_bytes=wanted.max_bytes) as writer:

            def put(name: str, master: torch.Tensor) -> None:
                if models.is_adapter(name):
                    adapters[name] = master
                    return
                stored = unwrapped(name) if base.adapted is not None else name
                exported = wanted.rounded(name, master, base.dtype)
                if wanted.dropped is not None:
                    wanted.dropped.add(loaded=base.read(stored), trained=master, exported=exported)
                writer.write(stored, exported)
                left.discard(stored)

            yield put
            for name, change in changes(base.adapted, adapters) if base.adapted is not None else ():
                loaded = base.read(unwrapped(name))
                writer.write(unwrapped(name), _merged(wanted, unwrapped(name), loaded, change))
                left.discard(unwrapped(name))
            for name in sorted(left):
                writer.write(name, base.read(name).to(layouts[name].dtype))
        models.as_stored(base.skeleton, wanted.model, wanted.dtype_of(base.dtype)).save_pretrained(folder)
        if (generation := base.generation_config()) is not None:
            generation.save_pretrained(folder)

    def _save_adapters(self, adapters: Mapping[str, torch.Tensor], folder: Path) -> None:
        exported = {}
        for name, master in adapters.items():
            exported[name] = self._wanted.rounded(name, master, self._base.dtype)
            _count(self._wanted, name, self._wanted.adapters.get(name), master, exported[name])
        _save_adapters(self._base.adapted, folder, path=self._wanted.model.path, adapters=exported)


class _Whole:
    """Through the model itself, in memory once."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._model: Any = models.load_model(wanted.model, seed=wanted.seed)
        self._merges = wanted.merge and wanted.model.lora is not None
        if self._merges:
            refuse_tied(self._model)
        self.shapes = _shapes(self._model)

    def frozen_sha256(self) -> str | None:
        return frozen_sha256(self._model)

    @contextlib.contextmanager
    def into(self, folder: Path) -> Generator[Put]:
        model, wanted = self._model, self._wanted
        parameters = dict(model.named_parameters())
        left = set(parameters)
        adapters: dict[str, torch.Tensor] = {}

        def put(name: str, master: torch.Tensor) -> None:
            if self._merges and models.is_adapter(name):
                adapters[name] = master
                return
            loaded = parameters[name].data
            exported = wanted.rounded(name, master, loaded.dtype)
            _count(wanted, name, loaded, master, exported)
            parameters[name].data = exported
            left.discard(name)

        yield put
        for name, change in changes(model, adapters) if self._merges else ():
            parameters[name].data = _merged(wanted, unwrapped(name), parameters[name].data, change)
            left.discard(name)
        for name in left:
            parameters[name].data = parameters[name].data.to(wanted.dtype_of(parameters[name].dtype))
        if self._merges:
            model = model.unload()
        if isinstance(model, PreTrainedModel):
            models.as_stored(model, wanted.model, model.dtype)
            model.save_pretrained(folder, max_shard_size=wanted.max_bytes)
        else:
            _save_adapters(model, folder, path=wanted.model.path)


def _merged(wanted: Wanted, name: str, loaded: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """A weight with its adapters merged in: added in fp32, rounded once."""
    trained = loaded.float() + change
    exported = wanted.rounded(name, trained, loaded.dtype)
    _count(wanted, name, loaded, trained, exported)
    return exported


def _count(
    wanted: Wanted, name: str, loaded: torch.Tensor | None, trained: torch.Tensor, exported: torch.Tensor
) -> None:
    if wanted.dropped is not None and loaded is not None:
        wanted.dropped.add(loaded=loaded, trained=trained, exported=exported)


def _save_adapters(
    adapted: Any, folder: Path, *, path: str | None, adapters: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Adapters alone, in peft's format: those of the model itself, or the given ones."""
    for config in adapted.peft_config.values():
        config.base_model_name_or_path = path
    adapted.save_pretrained(folder, state_dict=None if adapters is None else dict(adapters))


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def gather_weights(engine: Engine, world: World, *, put: Put | None = None, masters: Path | None = None) -> str | None:
    """Gives every master to `put` (main rank), and with `masters` also writes them as they are to that safetensors
    file; every rank must call it. Returns the sha256 of all names and masters (main rank), equal for equal weights.

    What fails on the main rank is raised when all ranks have sent what they hold. Raises OSError and ModelError.
    """
    digest = hashlib.sha256()
    failure: Exception | None = None
    with contextlib.ExitStack() as files:
        writer = None
        if world.is_main and masters is not None:
            layouts = {s.name: Layout(dtype=s.values.dtype, shape=s.shape) for s in engine.masters()}
            writer = files.enter_context(WeightWriter(masters.parent, layouts, stem=masters.stem))
        for name, whole in gather_masters(engine, world):
            if whole is None or failure is not None:
                continue
            digest.update(name.encode())
            digest.update(bytes_of(whole))
            try:
                if put is not None:
                    put(name, whole)
                if writer is not None:
                    writer.write(name, whole)
            except (OSError, OutputError, ModelError) as error:
                failure = error
        if failure is not None:
            raise failure
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
