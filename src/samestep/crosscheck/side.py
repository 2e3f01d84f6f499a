"""The order of a cross-check, and what one side of it was seen to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Tool = Literal["samestep", "deepspeed", "accelerate"]
RANKS = 2
STEPS = 5
ROW_TOKENS = 16
MODEL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": ROW_TOKENS,
}
"""Small enough for seconds on two CPU ranks, with a layer of every kind that Llama has."""
LAYER = "LlamaDecoderLayer"
"""The class of its layers."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One side to run: `recipe` says the model, the batches and the script's part on both sides."""

    tool: Tool
    recipe: dict[str, Any]
    config: dict[str, Any]
    """The configuration of another tool."""
    report: str
    """The file for the `Observed` of the main rank."""
    rates: list[float] | None = None
    """Learning rates instead of the recipe's, where the side's script sets them."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What a side did, by live values. A dtype is a name such as "float32"; None was not to be seen."""

    master: str | None
    moments: str | None
    compute: str | None
    reduce: str | None
    gradient: str | None
    optimizer: dict[str, Any]
    """What the optimizer was built with, but for the rate."""
    clip: float | None
    """The largest norm; None for no clipping."""
    accumulation: int
    rates: list[float]
    """The learning rate of each step."""
    losses: list[float]
    """The loss of each step, over all ranks and micro-batches."""
    updates: int
    """Steps that moved the weights."""
