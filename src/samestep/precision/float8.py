"""Which linear layers compute in float8, why the others do not, and which ones are seen to do it in a live run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from samestep.errors import PrecisionError
from samestep.recipe.schema import Float8

MULTIPLE = 16
"""Float8 hardware takes matrices whose sizes are multiples of this. Emulation leaves out the same layers."""


@dataclass(frozen=True, kw_only=True)
class Float8Layers:
    """Names of the layers that compute in float8; and of all others that multiply by a weight, each with the reason."""

    names: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


NO_LAYERS = Float8Layers()


def choose(recipe: Float8, model: nn.Module, *, ignored_modules: Sequence[str] = ()) -> Float8Layers:
    """The layers of a model (on any device, also meta) that the recipe wants in float8."""
    names: list[str] = []
    left_out: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not _multiplies(module):
            continue
        reason = _reason(name, module, recipe.skip, ignored_modules)
        if reason is None:
            names.append(name)
        else:
            left_out[name] = reason
    return Float8Layers(names=tuple(names), left_out=left_out)


def _multiplies(module: nn.Module) -> bool:
    """Whether a module has matrices of its own. An embedding has, but only looks rows up."""
    return not isinstance(module, nn.Embedding) and any(p.dim() > 1 for p in module.parameters(recurse=False))


def _reason(name: str, module: nn.Module, skip: Sequence[str], ignored_modules: Sequence[str]) -> str | None:
    """Why a module stays out of float8; None when it does not."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} is not a torch.nn.Linear"
    if not module.weight.is_floating_point():
        return "its weight is quantised"
    for pattern in skip:
        if fnmatchcase(name, pattern):
            return f"precision.fp8.skip: {pattern}"
    parts = name.split(".")
    if any(part.startswith("lora_") for part in parts):
        return "an adapter"
    paths = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    if any(fnmatchcase(path, pattern) for path in paths for pattern in ignored_modules):
        return "engine.ignored_modules"
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return f"its sizes are no multiples of {MULTIPLE}"
    return None


def check(recipe: Float8, layers: Float8Layers) -> None:
    """Raises PrecisionError for a pattern without a layer, and when no layer at all is in float8."""
    known = [*layers.names, *layers.left_out]
    default = Float8().skip
    for pattern in recipe.skip:
        # The default names the heads of several families of models, of which a model has one at most.
        if pattern not in default and not any(fnmatchcase(name, pattern) for name in known):
            raise PrecisionError(
                f"no layer matches {pattern!r}",
                where="precision.fp8.skip",
                remedy=f"Names look like {', '.join(known[:3])}.",
            )
    if not layers.names:
        reasons = "; ".join(f"{reason} ({name})" for reason, name in _first_of_each(layers.left_out).items())
        raise PrecisionError(
            f"no layer of this model can compute in float8: {reasons or 'it has no linear layer'}",
            where="precision.regime",
            remedy="Use precision.regime: mixed.",
        )


def _first_of_each(left_out: Mapping[str, str]) -> dict[str, str]:
    """A layer's name for every reason."""
    found: dict[str, str] = {}
    for name, reason in left_out.items():
        found.setdefault(reason, name)
    return found


def watch(model: nn.Module, seen: set[str]) -> list[RemovableHandle]:
    """Collects in `seen` the names of linear layers in whose forward pass a float8 tensor is made. Returns the hooks.

    A layer with torch's own forward cannot make one and is not looked into, so its arithmetic is left alone.
    """
    hooks = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or _is_plain(module):
            continue
        mode = _Float8Seen(lambda name=name: seen.add(name))
        # Innermost of all hooks: what engines do around a layer is not the layer's own arithmetic. Recomputation ends
        # a forward pass by an exception, which must not leave the mode behind.
        hooks.append(module.register_forward_pre_hook(mode.enter))
        hooks.append(module.register_forward_hook(mode.leave, prepend=True, always_call=True))
    return hooks


def _is_plain(module: nn.Linear) -> bool:
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


class _Float8Seen(TorchDispatchMode):
    """Calls back when an operation makes a tensor of a float8 dtype."""

    def __init__(self, found: Callable[[], None]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(torch.is_tensor(t) and t.is_floating_point() and t.itemsize == 1 for t in tree_leaves(result)):
            self._found()
        return result

    def enter(self, _module: nn.Module, _inputs: object) -> None:
        self.__enter__()

    def leave(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        self.__exit__(None, None, None)
