"""Float8 matmuls: torchao's linear layers in place of torch's, on any engine. Imports torchao only when asked for.

A layer keeps its name, its parameters and its bf16 inputs and outputs. Inside, both operands of each of its three
matmuls (output, input gradient, weight gradient) are scaled by their largest value and rounded to float8.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import torch
from torch import nn

from samestep.errors import EngineError
from samestep.precision import float8 as layers_of
from samestep.precision.float8 import Float8Layers
from samestep.recipe.schema import Float8


def refuse(recipe: Float8, layers: Float8Layers, device: torch.device) -> None:
    """Raises EngineError when the device or the installation cannot do it, PrecisionError when the model cannot."""
    if not recipe.emulate and not _multiplies_float8(device):
        raise EngineError(
            f"this device ({device.type}) cannot multiply in float8",
            where="precision.regime",
            remedy="Use precision.regime: mixed, or precision.fp8.emulate: true to see the same roundings, slowly.",
        )
    _import_torchao()
    layers_of.check(recipe, layers)


def convert(model: nn.Module, layers: Float8Layers, recipe: Float8) -> None:
    """Makes the chosen layers of a model compute in float8, in place, with the same parameters."""
    torchao = _import_torchao()
    config = dataclasses.replace(
        torchao.Float8LinearConfig.from_recipe_name(recipe.scaling),
        emulate=recipe.emulate,
        # The weight gradient sums over tokens, whose number is seldom the multiple of 16 that hardware asks for.
        pad_inner_dim=True,
    )
    chosen = set(layers.names)
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)
    for name in layers.names:
        layer = model.get_submodule(name)
        layer.forward = functools.partial(_forward, layer)


def _forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """torchao's layer on an input [..., in_features], by our matmul."""
    output = _Matmul.apply(input, layer.weight, layer)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


class _Context:
    """What torchao's function sees as autograd's context."""

    def __init__(self, layer: Any) -> None:
        self.linear_mm_config, self.config = layer.linear_mm_config, layer.config
        self.saved_tensors: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


class _Matmul(torch.autograd.Function):
    """torchao's three matmuls, with the parameter itself kept for the backward pass.

    torchao keeps a transposed view of it. Under ZeRO-3 the view holds on to the gathered weight when DeepSpeed drops
    it, so that the whole model would stay gathered from the forward pass to the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.layer = layer
        context = _Context(layer)
        return _torchao_function().forward(context, input, weight.t(), context.linear_mm_config, context.config)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, weight = ctx.saved_tensors
        context = _Context(ctx.layer)
        context.save_for_backward(input, weight.t())
        of_input, of_weight_t, *_ = _torchao_function().backward(context, *gradients)
        return of_input, of_weight_t.t(), None


def _torchao_function() -> Any:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    return matmul_with_hp_or_float8_args


def _multiplies_float8(device: torch.device) -> bool:
    """Whether torch has float8 matmuls for this device that are more than an emulation."""
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx95"))
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _import_torchao() -> types.ModuleType:
    try:
        import torchao.float8
    except ImportError as error:
        raise EngineError(
            "mixed-fp8 needs torchao, which is not installed",
            where="precision.regime",
            remedy="Install samestep[fp8], or use precision.regime: mixed.",
        ) from error
    return torchao.float8
