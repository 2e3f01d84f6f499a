"""A model on a thousand ranks and more, in one process: planning, sharding and the metadata of a checkpoint.

    python benchmarks/scale.py [--ranks 1024] [--layers 80]

Llama 3 70B (with --layers, fewer of its blocks) under torch's fake process group. One rank's shards are live DTensors
on the meta device, made by the engine; the checkpoint plans of all ranks come from the rule by which FSDP cuts, which
is checked against them, and go through the coordinator's part of a save.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from samestep import models
from samestep.checkpoint.boxes import boxes
from samestep.checkpoint.state import master_key, state_key
from samestep.checkpoint.writer import Part, Planner
from samestep.engines import build, torch_native
from samestep.engines.reduction import Reducer
from samestep.planning import report
from samestep.recipe import parse
from samestep.recipe.schema import Recipe
from samestep.world import World

Shapes = dict[str, tuple[int, ...]]


def recipe_for(ranks: int, layers: int) -> Recipe:
    return parse(
        "{model: {load_dtype: bfloat16, tokenizer: none, config: {model_type: llama, vocab_size: 128256, "
        f"hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: {layers}, num_attention_heads: 64, "
        "num_key_value_heads: 8, tie_word_embeddings: false}}, data: {path: none, max_tokens: 4096}, "
        f"engine: {{name: fsdp, ranks: {ranks}}}, "
        "train: {steps: 1000, micro_batch: 1, activation_checkpointing: true}}"
    )


class _Unfilled:
    """In the place of the engine's filler: the weights stay on the meta device."""

    def __init__(self, model: nn.Module, world: World) -> None:
        pass

    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        pass


@contextmanager
def sharded(recipe: Recipe, rank: int) -> Iterator[nn.Module]:
    """The recipe's model as this rank of the engine holds it, on the meta device, while its process group is there."""
    model = models.load_meta_model(recipe.model)
    dist.init_process_group("fake", rank=rank, world_size=recipe.engine.ranks, store=FakeStore())
    try:
        world = World(rank=rank, size=recipe.engine.ranks, local_rank=0, device=torch.device("cpu"))
        mesh, _ = torch_native._mesh(recipe.engine, world)
        with mock.patch.object(torch_native, "Filler", _Unfilled):
            torch_native._shard(
                model,
                plan=build.resolve_plan(recipe, model),
                recipe=recipe.engine,
                units=models.unit_modules(model, None),
                unsharded=set(),
                mesh=mesh,
                reducer=Reducer(recipe.engine.reduce_order),
                world=world,
            )
        yield model
    finally:
        dist.destroy_process_group()


def cut(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, int]:
    """First element and number of elements of a rank's part of a tensor: equal chunks of rows."""
    rows, inner = -(-shape[0] // ranks), math.prod(shape[1:])
    start = min(rank * rows, shape[0])
    return start * inner, (min(start + rows, shape[0]) - start) * inner


def check_cut(model: nn.Module, shapes: Shapes, rank: int, ranks: int) -> int:
    """Compares the rule with a rank's live shards; returns the bytes of its masters."""
    size = 0
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        assert (torch_native._start(parameter), local.numel()) == cut(shapes[name], rank, ranks), name
        size += local.nbytes
    return size


def parts(shapes: Shapes, rank: int, ranks: int) -> Iterator[Part]:
    """What a rank writes: its boxes of every master and of both moments."""
    for name, shape in shapes.items():
        for box in boxes(shape, *cut(shape, rank, ranks)):
            for key in (master_key(name), state_key(name, "exp_avg"), state_key(name, "exp_avg_sq")):
                yield Part(
                    name=key, shape=shape, dtype=torch.float32, offsets=box.offsets, sizes=box.sizes, read=_nothing
                )


def _nothing() -> torch.Tensor:
    raise AssertionError("nothing is written here")


def metadata(shapes: Shapes, ranks: int) -> Metadata:
    """The metadata that the coordinator makes of all ranks' plans."""
    # Millions of small objects, none of which is garbage: looking for it would take most of the time.
    gc.disable()
    plans = [Planner(parts(shapes, rank, ranks)).create_local_plan() for rank in range(ranks)]
    _, found = Planner([]).create_global_plan(plans)
    gc.enable()
    return found


def check_metadata(found: Metadata, shapes: Shapes) -> int:
    """Every tensor is covered once, by number of elements; returns the number of boxes."""
    count = 0
    for stored in found.state_dict_metadata.values():
        assert isinstance(stored, TensorStorageMetadata)
        assert sum(math.prod(chunk.sizes) for chunk in stored.chunks) == math.prod(stored.size)
        count += len(stored.chunks)
    assert len(found.state_dict_metadata) == 3 * len(shapes)
    return count


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ranks", type=int, default=1024)
    arguments.add_argument("--layers", type=int, default=80)
    given = arguments.parse_args()
    recipe = recipe_for(given.ranks, given.layers)
    begin = time.perf_counter()
    planned: dict[str, Any] = report.plan(recipe, device_memory=80 * 10**9)
    _say("planning", begin)
    row = next(r for r in planned["memory"] if (r["engine"], r["regime"]) == ("fsdp", "mixed"))
    shapes = {name: tuple(p.shape) for name, p in models.load_meta_model(recipe.model).named_parameters()}
    for rank in (0, given.ranks - 1):
        with sharded(recipe, rank) as model:
            size = check_cut(model, shapes, rank, given.ranks)
        assert size <= row["items"]["masters"], "a rank holds more than was planned"
        _say(f"sharding, as rank {rank}: {size / 1e6:,.1f} MB of masters", begin)
    boxes_found = check_metadata(metadata(shapes, given.ranks), shapes)
    _say(f"checkpoint metadata: {boxes_found:,} boxes", begin)


def _say(what: str, begin: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{what}: {time.perf_counter() - begin:.1f} s since the start, peak {peak:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
