"""Seconds of collectives on hand-made groups."""

from __future__ import annotations

import pytest

from samestep.planning.cluster.links import (
    Group,
    Links,
    all_reduce_seconds,
    exchange_seconds,
    gather_seconds,
    reduce_scatter_seconds,
)

LINKS = Links(intra=100.0, inter=400.0)


def test_a_ring_in_one_node() -> None:
    # Each of 4 devices receives 3/4 of 800 bytes at 100 bytes/s.
    assert gather_seconds(800, Group(per_node=4, nodes=1), LINKS) == pytest.approx(6.0)


def test_the_slower_kind_of_links_counts() -> None:
    group = Group(per_node=8, nodes=4)
    # Within: 31/32 of 3200 at 100. Between: a node receives 3/4 of 3200, at 400 or at 40.
    assert gather_seconds(3200, group, LINKS) == pytest.approx(31.0)
    assert gather_seconds(3200, group, Links(intra=100.0, inter=40.0)) == pytest.approx(60.0)


def test_an_exchange_crosses_the_network_once_per_device() -> None:
    group, links = Group(per_node=8, nodes=4), Links(intra=1e12, inter=40.0)
    assert exchange_seconds(3200, group, links) == pytest.approx(8 * 60.0)
    # In one node the volume is the ring's.
    one = Group(per_node=8, nodes=1)
    assert exchange_seconds(800, one, LINKS) == gather_seconds(800, one, LINKS) == pytest.approx(7.0)


def test_groups_of_a_node_share_its_network() -> None:
    links = Links(intra=1.0, inter=40.0)
    one = gather_seconds(3200, Group(per_node=1, nodes=4), links)
    assert one == pytest.approx(60.0)
    assert gather_seconds(3200, Group(per_node=1, nodes=4, at_once=8), links) == pytest.approx(8 * one)


def test_latency_of_every_hop() -> None:
    links = Links(intra=1.0, inter=1.0, intra_latency=2.0, inter_latency=100.0)
    # 16 devices on 2 nodes: 15 hops, one of them between the nodes.
    assert gather_seconds(0, Group(per_node=8, nodes=2), links) == 14 * 2.0 + 100.0


def test_one_device_talks_to_nobody() -> None:
    alone = Group(per_node=1, nodes=1)
    for tree in (False, True):
        assert all_reduce_seconds(1e9, alone, Links(intra=1.0, inter=None), tree=tree) == 0.0


def test_reductions() -> None:
    group = Group(per_node=4, nodes=2)
    links = Links(intra=1e12, inter=40.0)
    ring, exchange = gather_seconds(800, group, links), exchange_seconds(800, group, links)
    assert reduce_scatter_seconds(800, group, links, tree=False) == ring
    assert reduce_scatter_seconds(800, group, links, tree=True) == exchange
    assert all_reduce_seconds(800, group, links, tree=False) == 2 * ring
    assert all_reduce_seconds(800, group, links, tree=True) == exchange + ring
    # Two ranks add in either order: the engines use the library's own collective.
    pair = Group(per_node=1, nodes=2)
    assert reduce_scatter_seconds(800, pair, links, tree=True) == gather_seconds(800, pair, links)
