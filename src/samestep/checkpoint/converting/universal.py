"""A DeepSpeed universal checkpoint, as DeepSpeed 0.19 loads it at any number of ranks with load_universal."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.converting.contents import Contents
from samestep.checkpoint.state import master_key

_VERSION = "0.19.8"
"""The DeepSpeed whose format this is."""


def write(contents: Contents, folder: Path) -> None:
    """Writes `latest_universal` and the folder of the step that it names.

    A parameter's files are written one after the other. The model's file holds the model in the compute dtype, at once:
    DeepSpeed has one file for it. Raises OSError.
    """
    manifest = contents.manifest
    tag = f"global_step{manifest.step}"
    place = folder / tag
    step = torch.tensor(float(manifest.updates))
    module = dict(contents.others)
    for group in contents.groups:
        for name in group.names:
            parameter = place / "zero" / name
            parameter.mkdir(parents=True)
            wanted = [master_key(name), *contents.moments(name)]
            for key, tensor in zip(["fp32", *contents.keys], contents.tensors(wanted), strict=True):
                torch.save({"param": tensor.float()}, parameter / f"{key}.pt")
                if key == "fp32":
                    module[name] = tensor.to(contents.compute)
            torch.save(step, parameter / "step.pt")
    module |= {tie: module[name] for tie, name in contents.ties.items()}
    torch.save(_optimizer(contents, step), place / "zero" / "optimizer_state.pt")
    model = _model(contents, module)
    torch.save(model, place / "mp_rank_00_model_states.pt")
    # Stage 3 looks for its model file under another name, and takes no weights from it.
    torch.save({**model, "module": {}}, place / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(tag, encoding="utf-8")


def _optimizer(contents: Contents, step: torch.Tensor) -> dict[str, Any]:
    groups = [{**group.settings, "params": [index]} for index, group in enumerate(contents.groups)]
    # Stage 3 takes the settings of the first group for all of them. What differs is left out: then the run's own stay.
    first, *others = groups
    common = {key: value for key, value in first.items() if all(group[key] == value for group in others)}
    return {
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [{**common, "params": [0]}]},
        "ds_version": _VERSION,
    }


def _model(contents: Contents, module: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    manifest = contents.manifest
    shapes = [
        OrderedDict((name, torch.Size(manifest.tensors[master_key(name)].shape)) for name in group.names)
        for group in contents.groups
    ]
    return {
        "module": dict(module),
        "buffer_names": [],
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(contents.ties),
        "lr_scheduler": None,
        "skipped_steps": manifest.step - manifest.updates,
        "global_steps": manifest.step,
        "global_samples": manifest.step * manifest.rows_per_step,
        "dp_world_size": manifest.ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
    }
