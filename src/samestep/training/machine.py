"""What the machine says: memory used, versions installed."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

import samestep


def peak_memory(device: torch.device) -> int:
    """Largest memory so far: allocated on an accelerator, resident on the CPU. Bytes."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Versions of samestep, Python and the packages that make the numbers."""
    found = {"samestep": samestep.__version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "deepspeed", "peft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
