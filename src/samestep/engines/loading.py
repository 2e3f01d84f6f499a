"""Models that the main rank holds whole and the others do not: they get one shard unit at a time, and keep their part.

A rank of `fsdp` or `hsdp` other than the main one starts from names and shapes on the meta device. So a machine holds
one copy of the model while it is loaded, not one for every rank. Parameters, buffers (persistent or not) and tensors
that modules keep as plain attributes all come from the main rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from samestep import models
from samestep.errors import ModelError
from samestep.recipe.schema import Recipe
from samestep.world import World, gather_numbers

_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def load_model(recipe: Recipe, world: World) -> nn.Module:
    """The recipe's model: whole, or on the ranks that get their part from the main one, on the meta device.

    Names, shapes and dtypes are equal on all ranks. Raises ModelError.
    """
    if recipe.engine.name not in ("fsdp", "hsdp") or world.size == 1:
        return models.load_model(recipe.model, seed=recipe.train.seed)
    if world.is_main:
        model = models.load_model(recipe.model, seed=recipe.train.seed)
    else:
        model = models.load_meta_model(recipe.model, attention=recipe.model.attention)
    _agree(model, world)
    return model


def _agree(model: nn.Module, world: World) -> None:
    """Gives the tensors of this rank's model the dtypes that the main rank found in the files."""
    tensors = [*model.parameters(), *(tensor for *_, tensor in _others(model))]
    mine = torch.tensor([[_DTYPES.index(t.dtype), t.numel()] for t in tensors], dtype=torch.int64)
    count = torch.tensor([len(tensors)])
    dist.broadcast(count, src=0)
    theirs = mine if world.is_main else torch.empty(int(count), 2, dtype=torch.int64)
    dist.broadcast(theirs, src=0)
    if theirs.shape != mine.shape or not torch.equal(theirs[:, 1], mine[:, 1]):
        raise ModelError(
            "the model on the main rank has other tensors than its config says",
            where="model.path",
            remedy="Use the engine ddp or a zero engine, where every rank loads the model itself.",
        )
    for tensor, (dtype, _) in zip(tensors, theirs.tolist(), strict=True):
        if tensor.dtype != _DTYPES[dtype]:
            tensor.data = tensor.data.to(_DTYPES[dtype])


def is_hollow(model: nn.Module) -> bool:
    """Whether some parameter of the model is not there on this rank."""
    return any(parameter.is_meta for parameter in model.parameters())


class Filler:
    """Fills the tensors of a model that are on the meta device with the main rank's, as they are asked for.

    Every rank must ask for the same parameters in the same order. Does nothing where every rank loaded the model.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        hollow = is_hollow(model)
        self._needed = any(row[0] for row in gather_numbers([float(hollow)], world))
        self._owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        if not self._needed:
            return
        if hollow:
            for module in model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        self._owners.setdefault(parameter, []).append((module, name))
        for module, name, tensor in _others(model):
            self._set(module, name, _received(tensor))

    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes these parameters whole on this rank. Tied ones stay tied."""
        if not self._needed:
            return
        for parameter in list(parameters):
            whole = _received(parameter.data)
            if parameter.is_meta:
                made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                for module, name in self._owners[parameter]:
                    module._parameters[name] = made

    @staticmethod
    def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        if name in module._buffers:
            module._buffers[name] = tensor
        else:
            setattr(module, name, tensor)


def _received(tensor: torch.Tensor) -> torch.Tensor:
    """The main rank's tensor on the CPU of every rank."""
    whole = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.contiguous()
    dist.broadcast(whole, src=0)
    return whole


def _others(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Buffers, and tensors that modules keep as plain attributes."""
    for module in model.modules():
        named = [*module._buffers.items(), *vars(module).items()]
        yield from ((module, name, t) for name, t in named if isinstance(t, torch.Tensor))
