"""DeepSpeed's checkpoint folders built by hand, for any number of ranks, from values that are known.

The layout is that of DeepSpeed 0.14.0 as its sources describe it: ZeRO-1/2 flatten a group, pad it to a multiple of
twice the ranks and cut it in equal parts; ZeRO-3 cuts every parameter. What later versions add makes no difference.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Values = Mapping[str, Mapping[str, torch.Tensor]]
"""By parameter: fp32, exp_avg, exp_avg_sq."""
KEYS = ("fp32", "exp_avg", "exp_avg_sq")


def build(
    folder: Path,
    stage: int,
    values: Values,
    groups: Sequence[Sequence[str]],
    *,
    ranks: int,
    frozen: Mapping[str, torch.Tensor] | None = None,
    step: Any = 7,
    **model: Any,
) -> Path:
    """Writes global_step9 and `latest`; the folder of the step."""
    place = folder / "global_step9"
    place.mkdir(parents=True)
    (folder / "latest").write_text("global_step9")
    frozen = frozen or {}
    module = {name: tensors["fp32"].bfloat16() for name, tensors in values.items()} | dict(frozen)
    shared = {
        "buffer_names": [],
        "param_shapes": [OrderedDict((n, values[n]["fp32"].shape) for n in group) for group in groups],
        "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()} or None,
        "shared_params": {},
        "lr_scheduler": None,
        "skipped_steps": 2,
        "global_steps": 9,
        "global_samples": 36,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.14.0",
        **model,
    }
    for rank in range(ranks):
        flats = {key: [_part(stage, values, group, key, rank, ranks) for group in groups] for key in KEYS}
        torch.save(
            {"optimizer_state_dict": _optimizer(stage, flats, step, ranks), "ds_version": "0.14.0"},
            place / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        if stage == 3:
            parts = {name: _cut(tensor, rank, ranks) for name, tensor in frozen.items()}
            empty = {name: torch.empty(0) for name in module}
            content = {"module": empty, "frozen_param_fragments": parts or None, **shared}
            torch.save(content, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage < 3:
        torch.save(
            {"module": module, "frozen_param_fragments": dict(frozen), **shared}, place / "mp_rank_00_model_states.pt"
        )
    return place


def _cut(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of one tensor, padded to be as long as the others'."""
    part = math.ceil(tensor.numel() / ranks)
    padded = torch.cat([tensor.reshape(-1), torch.full((part * ranks - tensor.numel(),), 99.0, dtype=tensor.dtype)])
    return padded[rank * part : (rank + 1) * part].clone()


def _part(stage: int, values: Values, group: Sequence[str], key: str, rank: int, ranks: int) -> torch.Tensor:
    tensors = [values[name][key] for name in group]
    if stage == 3:
        return torch.cat([_cut(tensor, rank, ranks) for tensor in tensors])
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    size = math.ceil(flat.numel() / (2 * ranks)) * 2
    begin = rank * size
    if key == "fp32":  # saved without padding
        return flat[begin : begin + size].clone()
    padded = torch.cat([flat, torch.zeros(size * ranks - flat.numel())])
    return padded[begin : begin + size].clone()


def _optimizer(stage: int, flats: Mapping[str, list[torch.Tensor]], step: Any, ranks: int) -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    count = len(flats["fp32"])
    inner = {
        "state": {i: {"step": step, **{key: flats[key][i] for key in KEYS[1:]}} for i in range(count)},
        "param_groups": [
            {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [i]} for i in range(count)
        ],
    }
    state: dict[str, Any] = {
        "loss_scaler": LossScaler(scale=1.0),
        "dynamic_loss_scale": False,
        "overflow": False,
        "zero_stage": ZeroStageEnum(stage),
        "partition_count": ranks,
    }
    if stage == 3:
        return state | {"optimizer_state_dict": inner, "fp32_flat_groups": flats["fp32"]}
    return state | {
        "base_optimizer_state": inner,
        "single_partition_of_fp32_groups": flats["fp32"],
        "param_slice_mappings": [OrderedDict(x=fragment_address(numel=1, start=0)) for _ in range(count)],
        "ds_version": "0.14.0",
        "clip_grad": 1.0,
    }
