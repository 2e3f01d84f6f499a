"""Adapters merged into the weights they adapt, one layer at a time, as peft itself computes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from samestep.errors import ModelError
from samestep.models import is_adapter


def refuse_tied(adapted: nn.Module) -> None:
    """Raises ModelError when adapters are on one use of a tied weight only: merged, it would no longer be tied."""
    uses: dict[int, list[str]] = {}
    for name, parameter in adapted.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    for names in uses.values():
        if len(names) > 1 and any(".base_layer." in name for name in names):
            raise ModelError(
                f"{' and '.join(names)} are one tied weight, into which the adapters of one cannot be merged",
                where="model.lora.target_modules",
                remedy="Leave its name out, or export the adapters alone.",
            )


def changes(adapted: nn.Module, adapters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in the adapted model of every weight that has adapters, and what they add to it, fp32 in its shape.

    `adapters` are those that trained, by name; the adapted model gets them. Its own weights may be on the meta device.
    """
    frozen = {name: p.data for name, p in adapted.named_parameters() if is_adapter(name) and name not in adapters}
    for name, values in (frozen | dict(adapters)).items():
        path, _, last = name.rpartition(".")
        adapted.get_submodule(path)._parameters[last] = nn.Parameter(values.float(), requires_grad=False)
    for path, module in adapted.named_modules():
        layer: Any = module
        if f"{path}.base_layer.weight" in _names(path, module):
            yield f"{path}.base_layer.weight", layer.get_delta_weight(layer.active_adapters[0])


def _names(path: str, module: nn.Module) -> set[str]:
    base = getattr(module, "base_layer", None)
    return {f"{path}.base_layer.{name}" for name in base._parameters} if isinstance(base, nn.Module) else set()
