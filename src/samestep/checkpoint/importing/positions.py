"""Which parameter an optimizer's position means.

torch's optimizers number their parameters: groups in their order, and inside a group as it was given. Groups are
practically always taken from a model's parameters in the model's order, so every group is a subsequence of them. Which
one, the shapes of the state tell, when only one way of dealing the parameters to the groups fits. If several fit, the
file does not say which is meant, and nobody should guess.
"""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, ...]

_MOST_STATES = 20_000


class Ambiguous(Exception):
    """Several ways of dealing the parameters fit."""


class Impossible(Exception):
    """No way fits."""


def names_of(groups: Sequence[Sequence[Shape]], parameters: Sequence[tuple[str, Shape]]) -> list[list[str]]:
    """The names of every group's parameters, given the shapes of their states and the model's parameters in order.

    Raises Ambiguous when more than one assignment keeps the model's order inside every group, Impossible when none
    does.
    """
    if sum(map(len, groups)) != len(parameters):
        raise Impossible(f"the optimizer has {sum(map(len, groups))} parameters, the model {len(parameters)} to train")
    places = (0,) * len(groups)
    # For every way to have dealt the first parameters: in how many ways (2 means more than one), and the last step.
    levels: list[dict[tuple[int, ...], tuple[int, int]]] = [{places: (1, -1)}]
    for name, shape in parameters:
        reached: dict[tuple[int, ...], tuple[int, int]] = {}
        for at, (ways, _) in levels[-1].items():
            for index, group in enumerate(groups):
                if at[index] < len(group) and group[at[index]] == shape:
                    after = (*at[:index], at[index] + 1, *at[index + 1 :])
                    before = reached.get(after, (0, -1))[0]
                    reached[after] = (min(2, before + ways), index)
        if not reached:
            raise Impossible(f"no group of the optimizer has a place for {name} {list(shape)}")
        if len(reached) > _MOST_STATES:
            raise Ambiguous
        levels.append(reached)
    return _traced(levels, tuple(map(len, groups)), parameters)


def _traced(
    levels: list[dict[tuple[int, ...], tuple[int, int]]], end: tuple[int, ...], parameters: Sequence[tuple[str, Shape]]
) -> list[list[str]]:
    """The one way to the end, backwards."""
    if levels[-1][end][0] > 1:
        raise Ambiguous
    found: list[list[str]] = [[] for _ in end]
    at = end
    for level, (name, _) in zip(reversed(levels[1:]), reversed(parameters), strict=True):
        index = level[at][1]
        found[index].append(name)
        at = (*at[:index], at[index] - 1, *at[index + 1 :])
    return [names[::-1] for names in found]
