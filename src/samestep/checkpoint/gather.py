"""Whole tensors on the main rank, one at a time, from whatever slices the ranks hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from samestep.engines.protocol import Engine, Shard
from samestep.world import World


def gather_masters(engine: Engine, world: World) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Name and master of every trainable parameter, in the model's order of names: the whole tensor on the CPU of the
    main rank, None on the others. Every rank must run this to its end."""
    shards = sorted(engine.masters(), key=lambda shard: shard.name)
    ranges = _ranges(shards, engine, world)
    for index, shard in enumerate(shards):
        mine = shard.values.contiguous()
        if world.is_main:
            yield shard.name, _assemble(shard, mine, [ranks[index] for ranks in ranges], world)
            continue
        if ranges[world.rank][index][1]:
            dist.send(mine, dst=0)
        yield shard.name, None


def _assemble(shard: Shard, mine: torch.Tensor, ranges: list[tuple[int, int]], world: World) -> torch.Tensor:
    whole = torch.empty(torch.Size(shard.shape).numel(), dtype=mine.dtype)
    for rank, (start, numel) in enumerate(ranges):
        if not numel:
            continue
        place = whole[start : start + numel]
        if rank == 0:
            place.copy_(mine)
        elif mine.device.type == "cpu":
            dist.recv(place, src=rank)
        else:
            part = torch.empty(numel, dtype=mine.dtype, device=mine.device)
            dist.recv(part, src=rank)
            place.copy_(part)
    return whole.view(shard.shape)


def _ranges(shards: list[Shard], engine: Engine, world: World) -> list[list[tuple[int, int]]]:
    """By rank and shard: start and length of what the rank contributes. Copies contribute nothing."""
    own = engine.replica.index == 0
    mine = torch.tensor([[s.start, s.values.numel() if own else 0] for s in shards], dtype=torch.int64)
    if world.size == 1:
        return [[(int(start), int(numel)) for start, numel in mine]]
    mine = mine.to(world.device)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyone, mine)
    return [[(int(start), int(numel)) for start, numel in rank.tolist()] for rank in everyone]
