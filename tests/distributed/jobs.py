"""Small jobs for the tests of the ranks themselves."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def who_am_i() -> tuple[int, int, int]:
    """Rank, world size and process id."""
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def make_groups(count: int) -> int:
    """Makes so many groups and leaves them; the process id."""
    for _ in range(count):
        dist.new_group(backend="gloo")
    return os.getpid()


def sum_of(value: float) -> float:
    """The sum over ranks of rank + value."""
    total = torch.tensor(dist.get_rank() + value)
    dist.all_reduce(total)
    return total.item()


def surroundings() -> dict[str, object]:
    """What a job finds around it."""
    names = ("DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR", "MASTER_PORT", "HF_HUB_OFFLINE")
    return {name: os.environ.get(name) for name in names} | {"threads": torch.get_num_threads()}


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, plus the rank."""
    return tensor + dist.get_rank()


def fail_on(rank: int) -> None:
    """Raises on one rank; the others wait for it in a collective."""
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} was told to fail")
    dist.barrier()


def die_on(rank: int) -> None:
    """One rank dies without a word."""
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def sleep(seconds: float) -> None:
    """Hangs."""
    print("about to sleep", flush=True)
    time.sleep(seconds)


def refuse_to_pickle() -> object:
    """A result that cannot travel."""
    return lambda: None
