"""A 70B-wide model on 1,024 ranks in one process: what the engine cuts, what was planned, what a checkpoint describes.

`benchmarks/scale.py` does it with all 80 blocks, and benchmarks/scale.md has its time and memory.
"""

from __future__ import annotations

import itertools
import math

import pytest
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchmarks import scale
from samestep import memory, models

RANKS = 1024


@pytest.fixture(scope="module")
def shapes() -> scale.Shapes:
    recipe = scale.recipe_for(RANKS, layers=2)
    return {name: tuple(p.shape) for name, p in models.load_meta_model(recipe.model).named_parameters()}


@pytest.mark.parametrize("rank", [0, 511, RANKS - 1])
def test_a_rank_holds_what_was_planned(shapes: scale.Shapes, rank: int) -> None:
    recipe = scale.recipe_for(RANKS, layers=2)
    planned = memory.estimate(recipe, models.load_meta_model(recipe.model)).items["masters"]
    with scale.sharded(recipe, rank) as model:
        assert {p.device.type for p in model.parameters()} == {"meta"}
        held = scale.check_cut(model, shapes, rank, RANKS)
    # 1,024 divides every first dimension but the vocabulary's 128,256 rows: at 126 a rank the last six get none, of the
    # embedding and of the head.
    assert planned - held == (0 if rank < RANKS - 1 else 2 * 126 * 8192 * 4)


def test_the_metadata_covers_every_tensor_once(shapes: scale.Shapes) -> None:
    found = scale.metadata(shapes, RANKS)
    scale.check_metadata(found, shapes)
    for name, stored in found.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        rows = sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in stored.chunks)
        assert all(begin + count == after for (begin, count), (after, _) in itertools.pairwise(rows)), name
        assert sum(math.prod(chunk.sizes) for chunk in stored.chunks) == math.prod(stored.size)
