"""Other numbers of ranks than two. From three ranks on, engines agree because sums over ranks have one order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.equivalence.cases import SHARDED, make_examples, make_recipe
from tests.equivalence.trajectories import first_difference

EXAMPLES = make_examples(53)  # 16 rows a step on 4 ranks: three windows of two micro-batches, the last one short

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("engine", SHARDED)
@pytest.mark.parametrize("regime", ["full", "mixed", "low"])
def test_four_ranks(run, model_folder, regime, engine):
    """hsdp is two groups of two here."""
    changes = {"engine__ranks": 4, "train__accumulation": 2, "steps": 4}
    single = run(make_recipe("single", model_folder(), regime=regime, **changes), EXAMPLES)
    other = run(make_recipe(engine, model_folder(), regime=regime, **changes), EXAMPLES)
    assert first_difference(single, other) is None


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "hsdp", "zero1"])
def test_four_ranks_reduced_once_per_step(run, model_folder, engine):
    changes = {"engine__ranks": 4, "engine__reduce_every": "step", "train__accumulation": 2, "steps": 4}
    single = run(make_recipe("single", model_folder(), **changes), EXAMPLES)
    other = run(make_recipe(engine, model_folder(), **changes), EXAMPLES)
    assert first_difference(single, other) is None


@pytest.mark.parametrize(("count", "shard_ranks"), [(2, 1), (2, 2), (4, 1), (4, 4)])
def test_shapes_of_hsdp(run, model_folder, count, shard_ranks):
    changes = {"engine__ranks": count, "train__accumulation": 2}
    single = run(make_recipe("single", model_folder(), **changes), EXAMPLES)
    other = run(make_recipe("hsdp", model_folder(), **changes, engine__shard_ranks=shard_ranks), EXAMPLES)
    assert first_difference(single, other) is None


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("regime", ["mixed", "low"])
def test_three_ranks(run, model_folder, regime, engine):
    changes = {"engine__ranks": 3, "train__accumulation": 2}
    single = run(make_recipe("single", model_folder(), regime=regime, **changes), EXAMPLES)
    other = run(make_recipe(engine, model_folder(), regime=regime, **changes), EXAMPLES)
    assert first_difference(single, other) is None


@pytest.mark.parametrize("engine", SHARDED)
def test_two_ranks_agree_in_any_order(run, model_folder, engine):
    """a + b is b + a: what the communication library does is the same thing on two ranks."""
    tree = run(make_recipe("single", model_folder()), EXAMPLES)
    other = run(make_recipe(engine, model_folder(), engine__reduce_order="backend"), EXAMPLES)
    assert first_difference(tree, other) is None


def sums_of_four() -> dict[str, list[float]]:
    """A job: the sum over ranks of 1e8, 1, -1e8 and 1, at sixteen places, by every collective that engines use."""
    from samestep.engines.reduction import Reducer

    mine = torch.full((16,), (1e8, 1.0, -1e8, 1.0)[dist.get_rank()], dtype=torch.float32)

    def by_all_reduce(order: str) -> list[float]:
        values = mine.clone()
        Reducer(order).all_reduce(values)
        return values.tolist()

    def by_reduce_scatter(order: str) -> list[float]:
        part = torch.empty(4)
        Reducer(order).reduce_scatter(part, mine.clone(), None)
        parts = [torch.empty(4) for _ in range(4)]
        dist.all_gather(parts, part)
        return torch.cat(parts).tolist()

    return {
        f"{name} {order}": collective(order)
        for order in ("tree", "backend")
        for name, collective in (("all_reduce", by_all_reduce), ("reduce_scatter", by_reduce_scatter))
    }


def test_why_the_order_is_ours(ranks):
    """In fp32 1e8 + 1 is 1e8, so the sum says in which order it was made. The library's order depends on the collective
    or on the place in the tensor; ours is ((0 + 1) + (2 + 3)) everywhere."""
    results = ranks.run(4, sums_of_four)
    assert all(result == results[0] for result in results)
    sums = results[0]
    one = torch.tensor(1.0)
    expected = ((1e8 * one + one) + (-1e8 * one + one)).item()
    assert set(sums["all_reduce tree"]) == set(sums["reduce_scatter tree"]) == {expected}
    assert len(set(sums["all_reduce backend"] + sums["reduce_scatter backend"])) > 1


@pytest.mark.parametrize("engine", SHARDED)
def test_the_order_of_the_library_stays_within_rounding(run, model_folder, engine):
    """Four ranks summed in the library's own order: losses and norms within 1e-5 over six steps in fp32, weights within
    a thousandth of what they moved."""
    changes = {"engine__ranks": 4, "train__accumulation": 2, "steps": 6, "train__optimizer__eps": 1e-4}
    single = run(make_recipe("single", model_folder(), regime="full", **changes), EXAMPLES)
    recipe = make_recipe(engine, model_folder(), regime="full", **changes, engine__reduce_order="backend")
    other = run(recipe, EXAMPLES)
    assert other.start == single.start
    for a, b in zip(single.steps, other.steps, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-5)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
    moved = 6 * 1e-2  # AdamW's bound: the learning rate, six times
    gap = max(float((single.masters[name] - other.masters[name]).abs().max()) for name in single.masters)
    assert gap < 1e-3 * moved
