"""P95: what an engine setting is, in collectives: how often a step with accumulation gathers parameters and sums
gradients over two ranks. The right counts follow from what each setting means, per unit and micro-batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from samestep.crosscheck.side import MODEL
from samestep.recipe import Recipe
from tests.distributed import collective_jobs
from tests.distributed.ranks import RankPools

MICRO = 3
CONFIG: dict[str, Any] = {name: value for name, value in MODEL.items() if name != "model_type"}
LAYERS = [sum(p.numel() for p in layer.parameters()) for layer in LlamaForCausalLM(LlamaConfig(**CONFIG)).model.layers]
ALL = sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**CONFIG)).parameters())
UNITS = Counter([*LAYERS, ALL - sum(LAYERS)])
"""Shard units by their size: one a layer, and the root for the rest. All sizes are even: nothing is padded."""
SMALLEST = 16
"""Elements of the smallest parameter; loss, norm and flags are smaller."""
GATHERS = ("_allgather_base_",)
SUMS = ("_reduce_scatter_base_", "allreduce_")


def counted(ranks: RankPools, engine: dict[str, Any], names: tuple[str, ...]) -> Counter[int]:
    """Collectives of a step of MICRO micro-batches, by their number of elements."""
    content: dict[str, Any] = {
        "model": {"config": MODEL, "tokenizer": "-"},
        "data": {"path": "-"},
        "precision": {"regime": "mixed"},
        "engine": {"ranks": 2, **engine},
        "train": {"steps": 5, "micro_batch": 1, "accumulation": MICRO},
    }
    recipe = Recipe.model_validate(content).model_dump(mode="json")
    first, second = ranks.run(2, collective_jobs.collectives_of_a_step, recipe=recipe)
    assert first == second
    return Counter(size for name, size in first if name in names and size >= SMALLEST)


def times(number: int) -> Counter[int]:
    return Counter({size: number * count for size, count in UNITS.items() if number})


ON_FSDP2 = [
    # ZeRO-3: gathered for the forward pass and again for the backward pass of every micro-batch.
    ({"name": "fsdp"}, 2 * MICRO, MICRO),
    ({"name": "fsdp", "reduce_every": "step"}, 2 * MICRO, 1),
    # Nearest to ZeRO-2 and, reducing once, to ZeRO-1. Parameters are sharded at rest: one gather a micro-batch.
    ({"name": "fsdp", "reshard_after_forward": False}, MICRO, MICRO),
    ({"name": "fsdp", "reshard_after_forward": False, "reduce_every": "step"}, MICRO, 1),
    ({"name": "ddp"}, 0, MICRO),
    ({"name": "ddp", "reduce_every": "step"}, 0, 1),
]


@pytest.mark.parametrize(("engine", "gathers", "sums"), ON_FSDP2)
def test_p95_collectives_of_every_unit(ranks: RankPools, engine: dict[str, Any], gathers: int, sums: int) -> None:
    assert counted(ranks, engine, GATHERS) == times(gathers)
    assert counted(ranks, engine, SUMS) == times(sums)


@pytest.mark.parametrize(
    ("engine", "gathers", "sums"),
    [
        # Whole on every rank while it computes: gathered once, after the update.
        ({"name": "zero1"}, 1, MICRO),
        ({"name": "zero1", "reduce_every": "step"}, 1, 1),
        ({"name": "zero2"}, 1, MICRO),
        # What the backward pass uses again within stage3_max_reuse_distance, 1e9 elements, stays gathered for it.
        ({"name": "zero3", "persistent_elements": 0}, MICRO, MICRO),
    ],
)
def test_p95_elements_that_deepspeed_sends(ranks: RankPools, engine: dict[str, Any], gathers: int, sums: int) -> None:
    pytest.importorskip("deepspeed")
    assert sum(counted(ranks, engine, GATHERS).elements()) == gathers * ALL
    assert sum(counted(ranks, engine, SUMS).elements()) == sums * ALL
