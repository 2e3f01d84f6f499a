"""What the machine says: memory used, versions installed."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import samestep


def peak_memory(device: torch.device) -> int:
    """Largest memory so far: allocated on an accelerator, resident on the CPU. Bytes."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory(device: torch.device) -> dict[str, int]:
    """What this process has of the device's memory, in bytes, each number by itself.

    On an accelerator: what tensors take (`allocated`), what torch's allocator keeps for them (`reserved`), and the most
    of both so far. On the CPU: what is `resident`, and the most so far.
    """
    if device.type != "cpu":
        return {
            "allocated": torch.accelerator.memory_allocated(),
            "peak_allocated": torch.accelerator.max_memory_allocated(),
            "reserved": torch.accelerator.memory_reserved(),
            "peak_reserved": torch.accelerator.max_memory_reserved(),
        }
    found = {"peak_resident": peak_memory(device)}
    with contextlib.suppress(OSError):  # Linux has it
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["resident"] = pages * os.sysconf("SC_PAGE_SIZE")
    return found


def versions() -> dict[str, str]:
    """Versions of samestep, Python and the packages that make the numbers."""
    found = {"samestep": samestep.__version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "deepspeed", "peft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
