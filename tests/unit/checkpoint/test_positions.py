"""An optimizer's positions as names: only where one way fits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.checkpoint.importing.positions import Ambiguous, Impossible, Shape, names_of

LAYERS: list[tuple[str, Shape]] = [
    (f"{layer}.{name}", shape)
    for layer in range(3)
    for name, shape in (("q", (4, 4)), ("k", (2, 4)), ("v", (2, 4)), ("norm", (4,)))
]


def split(
    parameters: Sequence[tuple[str, Shape]], group_of: Sequence[int], groups: int
) -> list[list[tuple[str, Shape]]]:
    return [[p for p, g in zip(parameters, group_of, strict=True) if g == index] for index in range(groups)]


def shapes(groups: Sequence[Sequence[tuple[str, Shape]]]) -> list[list[Shape]]:
    return [[shape for _, shape in group] for group in groups]


def test_weight_decay_groups() -> None:
    """The usual trap: matrices first, then vectors; position 1 is not the model's second parameter."""
    groups = split(LAYERS, [len(shape) == 1 for _, shape in LAYERS], 2)
    assert names_of(shapes(groups), LAYERS) == [[name for name, _ in group] for group in groups]


def test_one_group_in_the_models_order() -> None:
    assert names_of([[shape for _, shape in LAYERS]], LAYERS) == [[name for name, _ in LAYERS]]


def test_a_group_per_layer_is_ambiguous() -> None:
    groups = split(LAYERS, [int(name[0]) for name, _ in LAYERS], 3)
    with pytest.raises(Ambiguous):
        names_of(shapes(groups), LAYERS)


def test_another_model_is_impossible() -> None:
    with pytest.raises(Impossible, match=r"no group of the optimizer has a place for 0\.q"):
        names_of([[(5, 4), *(shape for _, shape in LAYERS[1:])]], LAYERS)
    with pytest.raises(Impossible, match="the optimizer has 11 parameters, the model 12 to train"):
        names_of([[shape for _, shape in LAYERS[1:]]], LAYERS)


@given(st.lists(st.tuples(st.sampled_from([(1,), (2,), (3,)]), st.integers(0, 2)), min_size=1, max_size=7))
def test_against_all_ways(drawn: list[tuple[Shape, int]]) -> None:
    """Compared with trying every way to deal the parameters to three groups."""
    parameters = [(f"p{i}", shape) for i, (shape, _) in enumerate(drawn)]
    wanted = shapes(split(parameters, [group for _, group in drawn], 3))
    ways = [w for w in itertools.product(range(3), repeat=len(drawn)) if shapes(split(parameters, w, 3)) == wanted]
    if len(ways) == 1:
        assert names_of(wanted, parameters) == [[n for n, _ in group] for group in split(parameters, ways[0], 3)]
    else:
        with pytest.raises(Ambiguous):
            names_of(wanted, parameters)
