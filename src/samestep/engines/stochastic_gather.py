"""FSDP's all-gather with a stochastic cast: fp32 shards are rounded to bf16 before they leave the rank.

Rounding happens on the shard, so all ranks compute with the same weights. FSDP calls `fsdp_pre_all_gather` and
`fsdp_post_all_gather` of a shard's tensor where it has them; here they are put on the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samestep.rounding import stochastic_to_bfloat16, stream


def install(managed: Any, *, name: str, seed: int, version: Callable[[], int]) -> None:
    """Makes one of FSDP's parameters (FSDPParam) round itself with the stream of (seed, version(), name, "cast")."""
    shard: Any = managed._sharded_local_tensor
    padded = managed.padded_sharded_param_size
    whole_size, whole_stride = managed._orig_size, managed._contiguous_orig_stride
    mesh = managed.mesh_info.shard_process_group
    row = torch.Size(padded[1:]).numel() if len(padded) else 1
    start = mesh.rank() * (padded[0] if len(padded) else 1) * row

    def before_gather(_mesh: object) -> tuple[tuple[torch.Tensor, ...], None]:
        rounded = torch.zeros(padded, dtype=torch.bfloat16, device=shard.device)
        random = stream(seed, version(), name, "cast")
        stochastic_to_bfloat16(shard.view(-1), random, start=start, out=rounded.view(-1)[: shard.numel()])
        return (rounded,), None

    def after_gather(
        outputs: tuple[torch.Tensor, ...], _metadata: None, _dtype: object, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        if out is not None:
            return None  # it is a view of `outputs`, which were gathered into
        (flat,) = outputs
        return torch.as_strided(flat, whole_size, whole_stride, 0), (flat,)

    shard.fsdp_pre_all_gather = before_gather
    shard.fsdp_post_all_gather = after_gather
