"""Jobs that look at a model while it is loaded onto ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

from samestep import world
from samestep.engines import build, loading, torch_native
from samestep.recipe.schema import Recipe


def held_while_loading(recipe: dict[str, Any]) -> dict[str, int]:
    """Bytes of parameters on this rank: of the whole model, at the most while it is loaded and cut, and in the end."""
    checked, here = Recipe.model_validate(recipe), world.start(timeout_seconds=60)
    model = loading.load_model(checked, here)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    seen = [_bytes(model)]
    real = torch_native.fully_shard

    def watched(module: nn.Module, **settings: Any) -> Any:
        seen.append(_bytes(model))
        return real(module, **settings)

    with mock.patch.object(torch_native, "fully_shard", watched):
        engine = build.build(checked, model, build.resolve_plan(checked, model), here)
    try:
        return {"whole": whole, "most": max(seen), "end": _bytes(model)}
    finally:
        engine.close()


def _bytes(model: nn.Module) -> int:
    tensors = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return sum(t.untyped_storage().nbytes() for t in tensors if not t.is_meta)


def buffers(recipe: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The buffers of this rank's model once the engine is built."""
    checked, here = Recipe.model_validate(recipe), world.start(timeout_seconds=60)
    model = loading.load_model(checked, here)
    engine = build.build(checked, model, build.resolve_plan(checked, model), here)
    try:
        return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    finally:
        engine.close()
