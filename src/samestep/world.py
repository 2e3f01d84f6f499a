"""The ranks of a run: who this process is, which device it owns, how it talks to the others.

The only module that reads RANK, WORLD_SIZE and their kin.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import EngineError, RunError

# What a process takes that has imported torch and transformers and nothing else: 270 MB resident on Linux, CPU build.
_RANK_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class World:
    """One process's view of the run. `size` is the number of processes, `rank` this one's number."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def launched() -> bool:
    """Whether a launcher (torchrun) started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_size() -> int:
    """Number of ranks the launcher started; 1 without a launcher."""
    return _number("WORLD_SIZE") if launched() else 1


def launched_rank() -> int:
    """This process's rank as the launcher gave it; 0 without a launcher."""
    return _number("RANK") if launched() else 0


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    if not text.isascii() or not text.isdigit():
        raise EngineError(
            f"{name} is {text!r}, not a number",
            where="environment",
            remedy="Start the ranks with torchrun, or unset RANK and WORLD_SIZE.",
        )
    return int(text)


def device_for(local_rank: int) -> torch.device:
    """The accelerator this rank owns, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    if local_rank >= torch.accelerator.device_count():
        raise EngineError(
            f"rank {local_rank} of this machine has no device: {torch.accelerator.device_count()} found",
            where="engine.ranks",
            remedy="Ask for at most one rank per device.",
        )
    return torch.device(accelerator.type, local_rank)


def require_room(ranks: int) -> None:
    """Raises EngineError when this machine cannot hold so many ranks: one device each, or memory for the processes."""
    device_for(ranks - 1)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if ranks * _RANK_BYTES > memory:
        raise EngineError(
            f"{ranks} ranks need {ranks * _RANK_BYTES / 2**30:,.0f} GiB of memory before they hold a model; "
            f"this machine has {memory / 2**30:,.0f} GiB",
            where="engine.ranks",
            remedy=f"Ask for at most {memory // _RANK_BYTES} ranks.",
        )


def start(*, timeout_seconds: int) -> World:
    """Joins the process group (or makes one of size 1) and returns this process's place in it.

    A group that exists already is used as it is. Raises RunError when the other ranks cannot be reached.
    """
    local_rank = _number("LOCAL_RANK") if launched() else 0
    device = device_for(local_rank)
    if device.type == "cpu":
        # DeepSpeed, and what imports it, otherwise guesses the accelerator and says so in a log line.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(local_rank)
    if not dist.is_initialized():
        # Device tensors go through the accelerator's own library, host tensors through gloo.
        backend = None if device.type != "cpu" else "gloo"
        timeout = datetime.timedelta(seconds=timeout_seconds)
        try:
            if launched():
                dist.init_process_group(backend, timeout=timeout)
            else:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise RunError(
                f"the ranks could not find each other: {str(error).splitlines()[0]}",
                remedy="Check that the rendezvous port is free and that every rank started.",
            ) from error
    return World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=local_rank, device=device)


def stop() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_numbers(values: list[float], world: World) -> list[list[float]]:
    """Every rank's list of fp64 numbers, by rank. All ranks must pass lists of one length."""
    mine = torch.tensor(values, dtype=torch.float64)
    if world.size == 1:
        return [mine.tolist()]
    # fp64 is not there on every accelerator; gloo carries it from the host where the group has it.
    mine = mine if world.device.type == "cpu" else mine.to(world.device)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyone, mine)
    return [row.tolist() for row in everyone]


def gather_objects(value: Any, world: World, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's small picklable object, by rank. All ranks of the group must call it."""
    if world.size == 1:
        return [value]
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, value, group=group)
    return everyone
