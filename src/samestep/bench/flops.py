"""Floating-point operations (FLOPs) of training a decoder-only transformer, in closed form.

A multiplication and an addition count as two. Only matrix products count: a weight that multiplies every token costs
2 FLOPs per token forwards, 2 for the gradient of its input and, unless it is frozen, 2 for its own. The attention of
one query costs, per key that it sees, 2 FLOPs per element of all heads for its score and 2 for its share of the sum of
values; the backward pass costs twice the forward pass. Grouped key-value heads are repeated, so query heads count.

Conventions, per token of a row of T tokens, for N parameters, W weights that multiply, L layers, H heads of size D:

| name | FLOPs per token |
|---|---|
| `6N` | 6 N |
| `6W + attention, full` | 6 W + 12 L H D T |
| `6W + attention, causal` | 6 W + 12 L H D (T + 1) / 2 |

- `6N` is of Kaplan et al. 2020 (arXiv:2001.08361, section 2.1); here N is all parameters, embeddings included.
- With attention: Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B). W in place of its N: looking up an
  embedding multiplies nothing, and the LM head does, tied or not.
- `causal` counts the pairs that a causal mask lets through; `full` also those that it hides, which a causal kernel
  never computes: MFU by `full` can exceed 1.

Hardware FLOPs add what is computed a second time; so do Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch import nn
from transformers.pytorch_utils import Conv1D

from samestep import models
from samestep.errors import ModelError

Mask = Literal["causal", "full"]
# What a config calls the numbers that only a mixture of experts, or latent attention, has.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OTHER_ATTENTION = ("kv_lora_rank", "qk_nope_head_dim")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention of one layer: `width` is heads times head size; `window` how many keys a query sees at most, its
    own included, None for all."""

    width: int
    window: int | None = None

    def keys(self, length: int, mask: Mask) -> float:
        """Keys that a query of a row of `length` tokens sees, on average."""
        if mask == "full":
            return float(length)
        window = min(self.window or length, length)
        # The first `window` queries see 1, 2, ... keys, the others `window`.
        return (window * (window + 1) / 2 + (length - window) * window) / length


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What the FLOPs of a decoder depend on.

    `parameters`: all of them, a tied embedding once. `weights`: elements of the matrices that multiply every token, the
    LM head (tied or not) included, an embedding's table not; `frozen_weights` of them get no gradient, `head_weights`
    are the LM head's.
    """

    parameters: int
    weights: int
    head_weights: int
    attention: tuple[Attention, ...]
    frozen_weights: int = 0

    @classmethod
    def llama(
        cls,
        *,
        layers: int,
        hidden: int,
        intermediate: int,
        heads: int,
        key_value_heads: int,
        vocabulary: int,
        head_dim: int | None = None,
        tied: bool = False,
    ) -> Self:
        """The closed form of Llama's family (Llama, Mistral, Granite): gated MLP, RMS norms, no biases."""
        size = head_dim or hidden // heads
        projections = hidden * size * (2 * heads + 2 * key_value_heads)
        blocks = layers * (projections + 3 * hidden * intermediate)
        table = vocabulary * hidden
        norms = (2 * layers + 1) * hidden
        return cls(
            parameters=blocks + norms + table * (1 if tied else 2),
            weights=blocks + table,
            head_weights=table,
            attention=(Attention(width=heads * size),) * layers,
        )

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """The numbers of a causal model of transformers; it may be on the meta device, whole, with adapters or without.

        Raises ModelError for what these closed forms do not fit: experts, latent or linear attention, convolutions.
        """
        config = models.config_of(model)
        _refuse_others(model, config)
        linear = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
        find: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = find()
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            weights=sum(module.weight.numel() for module in linear),
            head_weights=0 if head is None else head.weight.numel(),
            attention=_attention(config),
            frozen_weights=sum(module.weight.numel() for module in linear if not module.weight.requires_grad),
        )


def six_n(decoder: Decoder) -> float:
    """Model FLOPs per token by the convention `6N`."""
    return 6.0 * decoder.parameters


def forward_flops(decoder: Decoder, lengths: Sequence[int], mask: Mask) -> float:
    """FLOPs of the forward pass of rows of these lengths, in tokens."""
    return 2.0 * decoder.weights * sum(lengths) + _scores(decoder, lengths, mask)


def model_flops(decoder: Decoder, lengths: Sequence[int], mask: Mask) -> float:
    """FLOPs of the forward and backward pass of rows of these lengths: what the model needs, however it is computed.

    Frozen weights count 4 per token; that nothing is differentiated below the first trainable weight is left out.
    """
    weights = 6.0 * decoder.weights - 2.0 * decoder.frozen_weights
    return weights * sum(lengths) + 3 * _scores(decoder, lengths, mask)


def hardware_flops(decoder: Decoder, lengths: Sequence[int], mask: Mask, *, activation_checkpointing: bool) -> float:
    """`model_flops`, and with activation checkpointing one more forward pass of the blocks: of all but the LM head.

    Not in it: what a fused attention kernel computes again in its backward pass (a fifth matrix product), and the last
    product of a block, which torch's checkpoint leaves out of the second pass.
    """
    again = 0.0
    if activation_checkpointing:
        again = forward_flops(decoder, lengths, mask) - 2.0 * decoder.head_weights * sum(lengths)
    return model_flops(decoder, lengths, mask) + again


def mfu(flops_per_token: float, tokens_per_second_per_device: float, peak_flops: float | None) -> float | None:
    """The share of a device's peak that the FLOPs of its tokens are; None where the peak is not known."""
    if peak_flops is None:
        return None
    return flops_per_token * tokens_per_second_per_device / peak_flops


def _scores(decoder: Decoder, lengths: Sequence[int], mask: Mask) -> float:
    """FLOPs of scores and weighted sums in the forward pass of these rows."""
    pairs = sum(layer.width * layer.keys(length, mask) * length for layer in decoder.attention for length in lengths)
    return 4.0 * pairs


def _attention(config: Any) -> tuple[Attention, ...]:
    """The attention of every layer, by a config of transformers."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * (
        config.num_hidden_layers
    )
    windows = {"full_attention": None, "sliding_attention": window}
    if other := next((kind for kind in kinds if kind not in windows), None):
        raise _unknown(f"layers of the kind {other!r}")
    return tuple(Attention(width=heads * size, window=windows[kind]) for kind in kinds)


def _refuse_others(model: nn.Module, config: Any) -> None:
    if any(getattr(config, name, None) for name in _EXPERTS):
        raise _unknown("a mixture of experts")
    if any(getattr(config, name, None) for name in _OTHER_ATTENTION):
        raise _unknown("latent attention")
    if strange := next((name for name, parameter in model.named_parameters() if parameter.dim() > 2), None):
        raise _unknown(f"a weight that is no matrix ({strange})")


def _unknown(what: str) -> ModelError:
    return ModelError(
        f"the FLOPs of {what} are not known",
        where="model",
        remedy="They are known for dense decoders with full or sliding-window attention.",
    )
