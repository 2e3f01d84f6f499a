"""What a live run shows of its dtypes: in its optimizer, in its layers, and in what its ranks send each other."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import nn

from samestep.dtypes import dtype_name

_COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single", "reduce", "_reduce_scatter_base")


@contextlib.contextmanager
def watched_reductions(place: Any) -> Generator[set[torch.dtype]]:
    """Collects the dtypes of what the collectives of `place`, a module or a backend, sum over the ranks."""
    seen: set[torch.dtype] = set()
    inner = {name: getattr(place, name) for name in _COLLECTIVES if hasattr(place, name)}

    def watched(call: Any) -> Any:
        def collective(*given: Any, **options: Any) -> Any:
            # Norms and flags are single numbers; a gradient of this model never is.
            tensors = [value for value in (*given, *options.values()) if torch.is_tensor(value)]
            seen.update(tensor.dtype for tensor in tensors if tensor.numel() > 1 and tensor.is_floating_point())
            return call(*given, **options)

        return collective

    for name, call in inner.items():
        setattr(place, name, watched(call))
    try:
        yield seen
    finally:
        for name, call in inner.items():
            setattr(place, name, call)


def watch_compute(model: nn.Module) -> set[torch.dtype]:
    """Collects the dtypes that the linear layers of `model` compute in from now on."""
    seen: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    return seen


def masters(optimizer: Any) -> str | None:
    """The dtype of what `optimizer` updates."""
    return only(p.dtype for group in optimizer.param_groups for p in group["params"])


def moments(optimizer: Any) -> str | None:
    """The dtype of the state of `optimizer`."""
    return only(
        value.dtype
        for state in optimizer.state.values()
        for key, value in state.items()
        if torch.is_tensor(value) and value.numel() > 1 and key != "step"
    )


def hyperparameters(optimizer: Any) -> dict[str, Any]:
    """What `optimizer` was built with, the rate excepted."""
    groups = optimizer.param_groups
    decays = [group.get("weight_decay", 0.0) for group in groups]
    own = {name: groups[0][name] for name in ("betas", "eps", "momentum") if name in groups[0]}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
    return {**values, "weight_decay": max(decays), "decays": _share(decays)}


def _share(decays: list[float]) -> str:
    return "all" if all(decays) else "some" if any(decays) else "none"


def only(dtypes: Iterable[torch.dtype]) -> str | None:
    """The name of the one dtype; None when there are several or none."""
    found = set(dtypes)
    return dtype_name(found.pop()) if len(found) == 1 else None
