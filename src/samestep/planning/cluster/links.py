"""Seconds of the collectives between devices, in closed form.

N = p m devices of one group, p on each of m nodes; every node has s such groups that communicate at once. A ring over
them enters every node once, so what a node has to receive crosses the network once, whatever the number of its devices:

| collective of S bytes | a device receives within its node | a node receives from others | hops |
|---|---|---|---|
| gather, reduce-scatter: ring | S (N - 1) / N | s S (m - 1) / m | N - m inside, m - 1 outside |
| reduce-scatter: all-to-all | S (p - 1) / N | p s S (m - 1) / m | the same |
| all-reduce: ring | twice the ring above | | |

The two kinds of links work at the same time, so the slower one counts; the latency of the hops comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Links:
    """Speeds in bytes per second and one direction: `intra` of a device within its node, `inter` of a whole node (None
    where there is one node). Latencies in seconds per hop."""

    intra: float
    inter: float | None
    intra_latency: float = 0.0
    inter_latency: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices that communicate: `per_node` on each of `nodes`. `at_once` groups of a node share its network."""

    per_node: int
    nodes: int
    at_once: int = 1

    @property
    def size(self) -> int:
        return self.per_node * self.nodes


def gather_seconds(size: float, group: Group, links: Links) -> float:
    """A ring all-gather whose result has `size` bytes, or a ring reduce-scatter of as many."""
    within = size * (group.size - 1) / group.size if group.per_node > 1 else 0.0
    across = group.at_once * size * (group.nodes - 1) / group.nodes
    return _seconds(within, across, group, links)


def exchange_seconds(size: float, group: Group, links: Links) -> float:
    """A reduce-scatter of `size` bytes as an all-to-all, each device adding up what it receives."""
    within = size * (group.per_node - 1) / group.size
    across = group.at_once * group.per_node * size * (group.nodes - 1) / group.nodes
    return _seconds(within, across, group, links)


def _seconds(within: float, across: float, group: Group, links: Links) -> float:
    if group.size == 1:
        return 0.0
    seconds = within / links.intra
    if group.nodes > 1:
        assert links.inter is not None
        seconds = max(seconds, across / links.inter)
    inside, outside = group.size - group.nodes, group.nodes - 1
    return seconds + inside * links.intra_latency + outside * links.inter_latency


def reduce_scatter_seconds(size: float, group: Group, links: Links, *, tree: bool) -> float:
    """A reduce-scatter of `size` bytes: of engine.reduce_order `tree` an all-to-all (two devices need none)."""
    if tree and group.size > 2:
        return exchange_seconds(size, group, links)
    return gather_seconds(size, group, links)


def all_reduce_seconds(size: float, group: Group, links: Links, *, tree: bool) -> float:
    """An all-reduce of `size` bytes: a reduce-scatter and a gather."""
    return reduce_scatter_seconds(size, group, links, tree=tree) + gather_seconds(size, group, links)
