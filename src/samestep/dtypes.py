"""Names of dtypes in recipes and results, and the torch dtypes they mean."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as recipes write it: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
