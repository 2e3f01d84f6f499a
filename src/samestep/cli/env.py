"""`samestep env`: what to paste into a bug report."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

import typer

from samestep.cli.options import DebugOption, JsonOption, print_json

_PACKAGES = (
    "samestep",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "deepspeed",
    "peft",
    "datasets",
    "pyarrow",
    "matplotlib",
    "tensorboard",
    "trackio",
    "pydantic",
    "ruamel.yaml",
    "rich",
    "typer",
)


def env(json_output: JsonOption = False, debug: DebugOption = False) -> None:
    """Show versions, devices and backends, for bug reports."""
    found = environment()
    if json_output:
        print_json(found)
        return
    for name, value in found.items():
        if isinstance(value, dict):
            typer.echo(f"{name}:")
            for inner, text in value.items():
                typer.echo(f"  {inner:<18}{_shown(text)}")
        else:
            typer.echo(f"{name + ':':<20}{_shown(value)}")


def environment() -> dict[str, Any]:
    """Versions, devices, backends, cores and memory of this machine; null for what is not there."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": _cores(),
        "memory_gib": _memory_gib(),
        "packages": {name: _version(name) for name in _PACKAGES},
        **_torch_facts(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
        import torch.distributed as distributed
    except Exception as error:
        return {"torch_problem": f"{type(error).__name__}: {error}"}
    if not distributed.is_available():
        backends = {"gloo": False, "nccl": False}
    else:
        backends = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    return {
        "backends": backends,
        "cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
        "devices": _devices(torch),
    }


def _devices(torch: Any) -> list[str]:
    """A line for each accelerator; none of them is set up for work."""
    if not torch.accelerator.is_available():
        return []
    kind = str(torch.accelerator.current_accelerator())
    module = torch.get_device_module(kind)
    lines = []
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        name = getattr(properties, "name", kind)
        memory = getattr(properties, "total_memory", None)
        lines.append(f"{kind}:{index} {name}" + (f", {memory / 2**30:.0f} GiB" if memory else ""))
    return lines


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "; ".join(value) or "cpu only"
    return str(value)
