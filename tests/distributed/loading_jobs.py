"""Jobs that look at a model while it is loaded onto ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

from samestep import models, world
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


def tied_gradient(recipe: dict[str, Any], rows: list[list[int]]) -> tuple[bool, list[tuple[int, torch.Tensor]]]:
    """Whether head and embedding are one parameter on this rank, and this rank's pieces (first element, values) of its
    gradient when every rank's loss is the sum over its own row, each token its own label."""
    checked, here = Recipe.model_validate(recipe), world.start(timeout_seconds=60)
    model = loading.load_model(checked, here)
    engine = build.build(checked, model, build.resolve_plan(checked, model), here)
    try:
        for turn in engine.turns(1):
            ids = torch.tensor([rows[turn.rank]])
            inputs = models.Inputs(input_ids=ids, labels=ids, position_ids=None, document_ids=None)
            engine.backward(models.loss_sum(engine.model, inputs, attention="sdpa")[0], turn, 1)
        pieces = zip(engine.masters(), engine.gradients(), strict=True)
        mine = [
            (shard.start, g.reshape(-1).clone()) for shard, g in pieces if shard.name == "model.embed_tokens.weight"
        ]
        held = dict(engine.module.named_parameters(remove_duplicate=False))
        return held["lm_head.weight"] is held["model.embed_tokens.weight"], mine
    finally:
        engine.close()
