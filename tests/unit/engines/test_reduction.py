"""The order of sums over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samestep.engines.reduction import TreeAccumulator, tree_sum


class Term:
    """Something that writes down how it was added up."""

    def __init__(self, text: str) -> None:
        self.text = text

    def add_(self, other: Term) -> Term:
        self.text = f"({self.text}+{other.text})"
        return self


def terms(*numbers: int) -> list[Any]:
    return [Term(str(number)) for number in numbers]


def order_of(count: int) -> str:
    total: Any = tree_sum(terms(*range(count)))
    return total.text


@pytest.mark.parametrize(
    ("count", "order"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
    ],
)
def test_pairs_of_neighbours_level_by_level(count, order):
    assert order_of(count) == order


@pytest.mark.parametrize("count", range(1, 18))
def test_a_stream_adds_up_in_the_same_order(count):
    ranks = TreeAccumulator()
    for rank in range(count):
        ranks.push(terms(rank, rank))
    totals: list[Any] = ranks.total()
    assert [total.text for total in totals] == [order_of(count)] * 2


@pytest.mark.parametrize("count", range(1, 10))
def test_bits_of_the_stream(count):
    """In bf16 nearly every order gives other bits."""
    generator = torch.Generator().manual_seed(count)
    parts = [torch.randn(50, generator=generator).bfloat16() for _ in range(count)]
    ranks = TreeAccumulator()
    for part in parts:
        ranks.push([part.clone()])
    (streamed,) = ranks.total()
    assert torch.equal(streamed, tree_sum([part.clone() for part in parts]))
    ranks.push([parts[0].clone()])  # empty again after a total
    assert torch.equal(ranks.total()[0], parts[0])


def order_of_groups(groups: int, size: int) -> str:
    """The order in which hybrid sharding adds: within a group, then between groups."""
    within: list[Any] = [tree_sum(terms(*range(size * group, size * (group + 1)))) for group in range(groups)]
    total: Any = tree_sum(within)
    return total.text


@pytest.mark.parametrize(("groups", "size"), [(2, 2), (4, 2), (3, 2), (2, 4), (3, 4), (5, 1), (1, 3)])
def test_groups_of_a_power_of_two_are_the_same_tree(groups, size):
    assert order_of_groups(groups, size) == order_of(groups * size)


def test_other_groups_are_another_tree():
    assert order_of_groups(2, 3) == "(((0+1)+2)+((3+4)+5))" != order_of(6)
