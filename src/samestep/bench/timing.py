"""Taking a step apart: seconds of its parts, and seconds in which a collective was under way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator

import torch

# What torch's profiler calls a collective: gloo's span from its start to its end, a kernel of NCCL or RCCL.
_COLLECTIVES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Parts:
    """Adds up the seconds of named parts of steps while it is `on`; otherwise costs next to nothing."""

    def __init__(self, device: torch.device) -> None:
        self.on = False
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextlib.contextmanager
    def __call__(self, name: str) -> Generator[None]:
        if not self.on:
            yield
            return
        synchronize(self._device)
        began = time.perf_counter()
        yield
        synchronize(self._device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class Collectives:
    """Seconds in which at least one collective of this rank was under way. As a context, around steps."""

    def __init__(self, device: torch.device) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)

    def __enter__(self) -> Collectives:
        self._profiler.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._profiler.__exit__(None, None, None)

    def seconds(self) -> float | None:
        """None when the profiler saw no collective at all."""
        return covered(self._spans())

    def _spans(self) -> Iterator[tuple[float, float]]:
        for event in self._profiler.events() or ():
            if event.name.startswith(_COLLECTIVES):
                yield event.time_range.start / 1e6, event.time_range.end / 1e6


def covered(spans: Iterable[tuple[float, float]]) -> float | None:
    """Length of the union of intervals; None without any."""
    total, end, some = 0.0, float("-inf"), False
    for begin, finish in sorted(spans):
        some = True
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total if some else None
