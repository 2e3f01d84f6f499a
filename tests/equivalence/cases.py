"""The models, data and recipes that the equivalence tests train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.data import Examples

ENGINES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
SHARDED = ENGINES[1:]
VOCABULARY = 515

# Grouped-query attention, tied embeddings, and sizes that no number of ranks divides. Rotary embeddings need an even
# size of the heads, so the rows of q, k and v are even: 54 and 18, which four ranks do not divide.
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 45,
    "intermediate_size": 73,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}


def save_model(
    folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 1, broken_token: int | None = None, **changes: Any
) -> str:
    """Writes a small Llama with fresh weights into a folder. `changes` are to its config. The embedding of the
    `broken_token` is infinite: whoever reads it gets no finite loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = LLAMA | changes
    torch.manual_seed(seed)
    config = AutoConfig.for_model(settings["model_type"], **{k: v for k, v in settings.items() if k != "model_type"})
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms at 1 and biases at 0 would hide faults
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
        parameter.data = parameter.data.to(dtype)
    if broken_token is not None:
        model.get_input_embeddings().weight.data[broken_token] = torch.inf
    model.config.dtype = dtype
    model.save_pretrained(folder)
    return str(folder)


def make_examples(rows: int, *, seed: int = 0, longest: int = 17, packed: bool = False) -> Examples:
    """Rows of 4 to `longest` tokens: a first token, then a walk over the vocabulary in a stride that the row keeps, so
    that there is something to learn. About two thirds of the tokens count. Packed rows hold three documents."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(4, longest + 1, size=rows * (3 if packed else 1))
    tokens, counts = [], []
    for length in lengths:
        first, stride = generator.integers(1, VOCABULARY), generator.integers(1, 4)
        tokens.append((first + stride * np.arange(length)) % (VOCABULARY - 1) + 1)
        counts.append(np.arange(length) > length // 3)
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    return Examples(
        tokens=np.concatenate(tokens).astype(np.int32),
        counts=np.concatenate(counts),
        row_starts=starts[::3] if packed else starts,
        document_starts=starts if packed else None,
    )


def make_recipe(engine: str, model: str, *, regime: str = "mixed", steps: int = 4, **changes: Any) -> dict[str, Any]:
    """A recipe as plain data. `changes` are fields by dotted name with __ for the dot: train__accumulation=3."""
    recipe: dict[str, Any] = {
        "model": {"path": model},
        "data": {"path": "unused.jsonl"},
        "precision": {"regime": regime, "max_lost_update_share": None},
        "engine": {"name": engine, "ranks": 2},
        "train": {
            "steps": steps,
            "micro_batch": 2,
            "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
            "schedule": {"name": "linear", "warmup_steps": 2},
            "max_grad_norm": 2.5,
        },
    }
    if engine == "zero3":
        recipe["engine"]["persistent_elements"] = 1  # by default it would not shard models as small as this
    for name, value in changes.items():
        section = recipe
        *path, last = name.split("__")
        for key in path:
            section = section.setdefault(key, {})
        section[last] = value
    return recipe
