"""A full torch state dict: one torch.save file, as torch.distributed.checkpoint.state_dict gathers one."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from samestep.checkpoint.converting.contents import Contents
from samestep.checkpoint.state import master_key

FILE = "state.pt"


def write(contents: Contents, folder: Path) -> None:
    """Writes {"model": ..., "optimizer": ...} with optimizer state by name into `folder`/state.pt.

    torch.save wants every tensor at once: they are mapped from scratch files beside it, not held, so that it needs the
    state's size on the disk a second time while it writes. Raises OSError.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    groups = [{**group.settings, "params": list(group.names)} for group in contents.groups]
    model, state = _state(contents, scratch)
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, folder / FILE)
    shutil.rmtree(scratch)


def _state(contents: Contents, scratch: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The model's state dict, and the optimizer's state by name."""
    model = dict(contents.others)
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name in (name for group in contents.groups for name in group.names):
        wanted = [master_key(name), *contents.moments(name)]
        mapped = [_mapped(scratch / f"{name}.{i}", tensor) for i, tensor in enumerate(contents.tensors(wanted))]
        model[name] = mapped[0]
        moments = dict(zip(contents.keys, mapped[1:], strict=True))
        # torch's SGD does not count.
        counted = {"step": torch.tensor(float(contents.manifest.updates))} if "exp_avg" in moments else {}
        state[name] = counted | moments
    return model | {tie: model[name] for tie, name in contents.ties.items()}, state


def _mapped(path: Path, tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, of memory that is a file's."""
    if not tensor.numel():
        return tensor
    held = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return held.copy_(tensor.reshape(-1)).view(tensor.shape)
