"""Dtypes of single roles that a recipe wants to be others than its regime's: which can be, and why the rest cannot."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from samestep.dtypes import DTYPES, dtype_name
from samestep.errors import PrecisionError
from samestep.recipe.schema import Precision

_WAY_OUT = {
    "master": "fp32 masters: full, mixed. bf16 masters: low, low-stochastic, low-kahan, and mixed-fp8 with fp8.master.",
    "compute": "full computes in float32, all other regimes in precision.low_dtype.",
    "gradient": "Gradients are accumulated and clipped in the master's dtype; what crosses the ranks is `reduce`.",
    "moments": "The optimizer works in the master's dtype: choose the regime by its master.",
    "output": "Logits are in the compute dtype, the loss is float32 on every engine.",
}


def refuse(precision: Precision, fixed: Mapping[str, torch.dtype], buffers: Mapping[str, torch.dtype]) -> None:
    """Raises PrecisionError for a role that is wanted otherwise than it can be.

    `fixed` has the dtypes that the regime settles by role, `buffers` those of the model's floating-point buffers.
    """
    for role, has in fixed.items():
        wanted = getattr(precision.overrides, role)
        if wanted is not None and DTYPES[wanted] != has:
            raise PrecisionError(
                f"the {role} dtype is {dtype_name(has)} under {precision.regime}, not {wanted}",
                where=f"precision.overrides.{role}",
                remedy=_WAY_OUT[role],
            )
    wanted = precision.overrides.buffer
    for name, has in buffers.items():
        if wanted is not None and DTYPES[wanted] != has:
            raise PrecisionError(
                f"buffer {name} is {dtype_name(has)}, not {wanted}: buffers keep what the model gave them",
                where="precision.overrides.buffer",
                remedy="Leave it out. Rotary frequencies in 16 bits are wrong by whole turns at long positions.",
            )


def frozen_dtype(precision: Precision, compute: torch.dtype, *, casts_frozen: bool) -> torch.dtype | None:
    """The dtype that frozen parameters are cast to; None where they keep theirs. `casts_frozen` is for engines that
    hold them in the compute dtype. Raises PrecisionError when such an engine is to hold another."""
    wanted = precision.overrides.frozen
    if wanted is None:
        return compute if casts_frozen else None
    if casts_frozen and DTYPES[wanted] != compute:
        raise PrecisionError(
            f"this engine holds frozen parameters in the compute dtype ({dtype_name(compute)}), not {wanted}",
            where="precision.overrides.frozen",
            remedy="Leave it out, or use fsdp.",
        )
    return DTYPES[wanted]
