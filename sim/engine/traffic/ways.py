"""The ways of groups of ranks: which links the rings, the chains and the trees of a collective pass, and how often."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from sim.base.kept import kept
from topology.cluster import Cluster, Route


def passes(routes: Iterable[Route]) -> dict[int, float]:
    """Return how many of some routes pass each link; of one that takes several ways it is a share."""
    found: dict[int, float] = defaultdict(int)
    for route in routes:
        for link in route.resources:
            found[link] += 1
        for link, share in route.shares:
            found[link] += share
    return found


class RingWays(NamedTuple):
    """What the rings of a group pass."""

    passes: dict[int, float]
    """How many of their hops pass each link."""
    width: int
    """How many rings there are."""
    hop_s: float
    """Mean latency of the hops of the slowest ring."""


class TreeWays(NamedTuple):
    """What the chains inside the nodes of a group, and the trees over them, pass."""

    inside: dict[int, float]
    """How many hops inside nodes pass each link."""
    around: dict[int, float]
    """The same of hops from each member to the next and from the last to the first: each port once, each way."""
    across: dict[int, float]
    """How many hops between nodes do."""
    inside_s: float
    across_s: float
    width: int
    """Hops between two nodes, side by side."""
    longest: int
    """Ranks of the longest chain."""
    nodes: int


class _Ways:
    """The ways of groups on one cluster, found once for collectives of any size."""

    def __init__(self) -> None:
        self._rings: dict[tuple[tuple[int, ...], int | None], RingWays] = {}
        self._trees: dict[tuple[tuple[int, ...], int | None], TreeWays | None] = {}
        self._direct: dict[tuple[int, ...], tuple[dict[int, int], float] | None] = {}

    def rings(self, ranks: tuple[int, ...], cluster: Cluster, near: int | None) -> RingWays:
        """Return those of its rings."""
        key = ranks, near
        if key not in self._rings:
            self._rings[key] = _find_rings(ranks, cluster, near)
        return self._rings[key]

    def trees(self, ranks: tuple[int, ...], cluster: Cluster, near: int | None) -> TreeWays | None:
        """Return those of its trees, None for one node."""
        key = ranks, near
        if key not in self._trees:
            self._trees[key] = _find_trees(ranks, cluster, near)
        return self._trees[key]

    def direct(self, ranks: tuple[int, ...], cluster: Cluster) -> tuple[dict[int, int], float] | None:
        """Return what the ways from each to each other one pass: see ``Cluster.all_to_all``."""
        if ranks not in self._direct:
            self._direct[ranks] = cluster.all_to_all(ranks)
        return self._direct[ranks]


@kept
def ways_of(_: Cluster) -> _Ways:
    """Return where those of a cluster are kept."""
    return _Ways()


def _find_rings(ranks: tuple[int, ...], cluster: Cluster, near: int | None) -> RingWays:
    nodes = by_node(ranks, cluster)
    few = _near(nodes, near)
    passed: list[Route] = []
    latency_s = 0.0
    orders = _ring_orders(few)
    for order in orders:
        routes = [cluster.route(*pair) for pair in zip(order, (*order[1:], order[0]), strict=True)]
        latency_s = max(latency_s, sum(route.latency_s for route in routes) / len(routes))
        passed += routes
    if len(few) < len(nodes):
        latency_s = _hop_s_of_alike(nodes, cluster)
    return RingWays(passes(passed), len(orders), latency_s)


def _hop_s_of_alike(nodes: list[list[int]], cluster: Cluster) -> float:
    """Return the mean latency of the hops of the slowest ring over nodes that are alike: what is told of the first two
    holds of all.
    """
    here, there, width = nodes[0], nodes[1], len(nodes[0])
    inside = [
        [cluster.route(*pair).latency_s for pair in pairwise(here[start:] + here[:start])] for start in range(width)
    ]
    across = [[cluster.route(source, target).latency_s for target in there] for source in here]
    slowest_s = 0.0
    for ring in range(width):
        starts = [(ring - number) % width for number in range(len(nodes))]
        hops: list[float] = []
        for start, entered in zip(starts, (*starts[1:], starts[0]), strict=True):
            hops += inside[start]
            hops.append(across[(start - 1) % width][entered])
        slowest_s = max(slowest_s, sum(hops) / len(hops))
    return slowest_s


def _find_trees(ranks: tuple[int, ...], cluster: Cluster, near: int | None) -> TreeWays | None:
    nodes = by_node(ranks, cluster)
    if len(nodes) == 1:
        return None
    width, few = min(map(len, nodes)), _near(nodes, near)
    inside = [
        cluster.route(*pair)
        for members in few
        for source, target in pairwise(members)
        for pair in ((source, target), (target, source))
    ]
    around = [
        cluster.route(*pair)
        for members in few
        if len(members) > 1
        for pair in zip(members, (*members[1:], members[0]), strict=True)
    ]
    across = [
        cluster.route(source, target)
        for members, others in zip(few, (*few[1:], few[0]), strict=True)
        for source, target in zip(members[:width], others[:width], strict=True)
    ]
    passed = [passes(routes) for routes in (inside, around, across)]
    inside_s, across_s = (max((route.latency_s for route in routes), default=0.0) for routes in (inside, across))
    return TreeWays(passed[0], passed[1], passed[2], inside_s, across_s, width, max(map(len, nodes)), len(nodes))


def _ring_orders(nodes: list[list[int]]) -> list[list[int]]:
    """Return the rings: ring c enters the k-th node at its member c - k and leaves it at the one before."""
    orders = []
    for ring in range(min(map(len, nodes))):
        order = []
        for number, members in enumerate(nodes):
            start = (ring - number) % len(members)
            order += members[start:] + members[:start]
        orders.append(order)
    return orders


def by_node(ranks: tuple[int, ...], cluster: Cluster) -> list[list[int]]:
    """Return the ranks of each node."""
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        nodes[cluster.devices[rank].node].append(rank)
    return list(nodes.values())


def _near(nodes: list[list[int]], near: int | None) -> list[list[int]]:
    """Return the nodes of ranks below a number, and as many others as make a ring; all if None, or if they differ."""
    if near is None or len(set(map(len, nodes))) > 1:
        return nodes
    wanted = [number for number, ranks in enumerate(nodes) if min(ranks) < near]
    others = [number for number in range(len(nodes)) if number not in wanted]
    return [nodes[number] for number in sorted(wanted + others[: max(0, 2 - len(wanted))])]
