"""What a collective puts on every link: the bytes that its algorithm moves, not P x P flows of their own.

All-to-all sends every part straight to its owner. All-gather and reduce-scatter run as rings, one per member of a node,
each leaving its node through another member's NIC, as NCCL spreads its channels over the NICs; all-reduce does too, or
as trees over the nodes, whose sums inside a node go along a chain or through its switch, or in the switch of one node,
whichever is fastest at the links' rates. In a full mesh, where a ring takes one link of a node and leaves the others
idle, parts also go straight to their owners, if that is faster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache, reduce
from itertools import pairwise, repeat
from operator import add
from typing import NamedTuple, assert_never

from sim.errors import InputError
from sim.kept import kept
from sim.schedule.ir.ops import CollectiveName
from topology.cluster import Cluster, Route
from topology.kinds import FullMeshSpec

_LINKS = ("nic", "nvlink", "pcie", "loopback")
"""Kinds of links as profiles call them, widest ways first."""


class LinkTraffic(NamedTuple):
    """What one collective of a group does to the machine."""

    nbytes: dict[int, float]
    """Bytes per resource, links only."""
    hop_s: float
    """Latency of one step: the mean of the routes on a way that passes through all members, else of the longest one."""
    steps: int
    """Steps that follow each other."""
    memory_bytes: float
    """Bytes that each rank reads and writes in its memory."""

    @property
    def latency_s(self) -> float:
        """Latency of all steps."""
        return self.hop_s * self.steps

    def seconds(self, cluster: Cluster) -> float:
        """Return the time at the links' rates."""
        if not self.nbytes:
            return self.latency_s
        slowest = slowest_link(self.nbytes, cluster)
        return self.latency_s + self.nbytes[slowest] / cluster.resources[slowest].capacity


def slowest_link(nbytes: dict[int, float], cluster: Cluster) -> int:
    """Return which of several links takes longest for its bytes."""
    return max(nbytes, key=lambda link: (nbytes[link] / cluster.resources[link].capacity, -link))


def link_name(nbytes: dict[int, float], cluster: Cluster) -> str:
    """Return what profiles call the way of bytes between ranks: the widest kind of link on it."""
    groups = {cluster.resources[link].group for link in nbytes}
    found = next((kind for kind in _LINKS if kind in groups), None)
    if found is None:
        raise InputError(
            f"profiles have no name for a way over {', '.join(sorted(groups))}: they know {', '.join(_LINKS)}; add its "
            f"kind to _LINKS in {__name__}"
        )
    return found


def slowest_of_kind(nbytes: dict[int, float], link: str, cluster: Cluster) -> int:
    """Return which link of the kind that names a way takes longest for its bytes: what measured times over that way are
    sorted by and scale with. Copies to the host's memory (dram) are named after their end, and any link may limit them.
    """
    if link == "dram":
        return slowest_link(nbytes, cluster)
    return slowest_link({one: n for one, n in nbytes.items() if cluster.resources[one].group == link}, cluster)


def width_of(link: str, cluster: Cluster) -> int:
    """Return how many times as wide a link of some kind is as those that measured times are told for: a stripe of NICs
    as what a GPU has for itself. Its time is that of one of these parts, for a part of the bytes.
    """
    return cluster.spec.stripe_width if link == "nic" else 1


def wire_bytes(kind: CollectiveName, ranks: tuple[int, ...], whole: int, cluster: Cluster) -> tuple[int, str]:
    """Return the bytes that a collective puts on the busiest link of the kind that its way is called by, and that kind;
    ``whole`` is the tensor that a rank ends with, or begins with, in bytes.
    """
    part = whole if kind == "all_reduce" else whole // len(ranks)
    nbytes = link_traffic(kind, ranks, part, cluster).nbytes
    link = link_name(nbytes, cluster)
    return round(nbytes[slowest_of_kind(nbytes, link, cluster)] / width_of(link, cluster)), link


def link_traffic(
    kind: CollectiveName, ranks: tuple[int, ...], nbytes: int, cluster: Cluster, near: int | None = None
) -> LinkTraffic:
    """Return the traffic of a collective over ``ranks``; ``nbytes`` is one part (of an all-reduce the whole).

    With ``near`` the links are those of the nodes of the first so many ranks, and maybe of the next node: for ranks
    that fill nodes, each with the same of its GPUs in the same order, so that the links of all nodes are loaded alike.
    """
    n = len(ranks)
    if n == 1:
        return LinkTraffic({}, 0.0, 0, 0.0)
    if kind == "all_to_all":
        return _direct(ranks, nbytes, cluster)
    if kind == "all_gather":  # each part is read once and written once per step; the own one is copied
        ring = _rings(ranks, nbytes, n - 1, cluster, 2 * nbytes * n, near)
        return _fastest(cluster, ring, _straight(ring, ranks, nbytes, 1, cluster))
    if kind == "reduce_scatter":  # sums read two parts and write one
        ring = _rings(ranks, nbytes, n - 1, cluster, 3 * nbytes * (n - 1), near)
        return _fastest(cluster, ring, _straight(ring, ranks, nbytes, 1, cluster))
    if kind == "all_reduce":
        memory_bytes = (3 + 2) * nbytes * (n - 1) / n
        ring = _rings(ranks, nbytes / n, 2 * (n - 1), cluster, memory_bytes, near)
        return _fastest(
            cluster,
            ring,
            _trees(ranks, nbytes, cluster, memory_bytes, near),
            _in_switches(ranks, nbytes, cluster, near),
            _in_switch(ranks, nbytes, cluster),
            _straight(ring, ranks, nbytes / n, 2, cluster),
        )
    if kind == "barrier":
        return _rings(ranks, 0, n - 1, cluster, 0.0, near)._replace(nbytes={})
    assert_never(kind)


def _fastest(cluster: Cluster, ring: LinkTraffic, *others: LinkTraffic | None) -> LinkTraffic:
    """Return the first of the fastest at the links' rates, of what there is."""
    return min((ring, *(found for found in others if found)), key=lambda found: found.seconds(cluster))


def _straight(
    ring: LinkTraffic, ranks: tuple[int, ...], part: float, steps: int, cluster: Cluster
) -> LinkTraffic | None:
    """In each step every rank sends a part straight to every other: to its owner, which sums, or from it to all; its
    memory has as much to do as in a ring. None but in a full mesh, whose collectives take all paths (UB-Mesh,
    arXiv:2503.20313 §5); NCCL knows rings and trees.
    """
    if not isinstance(cluster.spec.fabric, FullMeshSpec):
        return None
    once = _direct(ranks, part, cluster)
    load = {link: steps * nbytes for link, nbytes in once.nbytes.items()}
    return LinkTraffic(load, once.hop_s, steps, ring.memory_bytes)


def _direct(ranks: tuple[int, ...], part: float, cluster: Cluster) -> LinkTraffic:
    """Every rank sends one part to every other."""
    load: dict[int, float] = defaultdict(float)
    latency_s = 0.0
    for source in ranks:
        for target in ranks:
            if source != target:
                route = cluster.route(source, target)
                latency_s = max(latency_s, route.latency_s)
                for resource in route.resources:
                    load[resource] += part
                for resource, share in route.shares:
                    load[resource] += part * share
    return LinkTraffic(dict(load), latency_s, 1, 2 * part * len(ranks))  # the own part is copied


def _rings(
    ranks: tuple[int, ...], part: float, steps: int, cluster: Cluster, memory_bytes: float, near: int | None
) -> LinkTraffic:
    """Every rank passes ``steps`` parts on to its neighbour, split over the rings."""
    ways = _ways(cluster).rings(ranks, cluster, near)
    load = {link: _times(count, part * steps / ways.width) for link, count in ways.passes.items()}
    return LinkTraffic(load, ways.hop_s, steps, memory_bytes)


def _trees(
    ranks: tuple[int, ...], nbytes: float, cluster: Cluster, memory_bytes: float, near: int | None
) -> LinkTraffic | None:
    """Two binary trees of nodes that carry half of the tensor each, a node being a leaf of one of them, over chains
    inside the nodes; None for one node. Sums go up and come down, so every node sends the whole twice, as in a ring,
    but after log(nodes) hops (NCCL's tree; Sanders, Speck and Träff 2009).
    """
    ways = _ways(cluster).trees(ranks, cluster, near)
    if ways is None:
        return None
    load = {link: _times(count, nbytes) for link, count in ways.inside.items()}
    for link, count in ways.across.items():  # after what is inside, so that all nodes are loaded alike to the bit
        load[link] = _times(count, 2 * nbytes / ways.width, load.get(link, 0.0))
    latency_s = 2 * ((ways.longest - 1) * ways.inside_s + math.ceil(math.log2(ways.nodes)) * ways.across_s)
    return LinkTraffic(load, latency_s, 1, memory_bytes)


def _in_switches(ranks: tuple[int, ...], nbytes: float, cluster: Cluster, near: int | None) -> LinkTraffic | None:
    """Sum in the switch of each node, as ``_in_switch``, and over the nodes by trees of each rank's part (NCCL's
    NVLSTree). Of two nodes each sends its sums once, and has all; of more it sends and is sent them twice, as in
    ``_trees``. None for one node, for one rank a node, and where no switch sums.
    """
    ways, nvlink = _ways(cluster).trees(ranks, cluster, near), cluster.spec.nvlink
    if ways is None or ways.longest == 1 or not (nvlink and nvlink.reduces):
        return None
    port = nbytes + nbytes / ways.longest
    load = {link: _times(count, port) for link, count in ways.around.items()}
    sent = (1 if ways.nodes == 2 else 2) * nbytes / ways.width
    for link, count in ways.across.items():
        load[link] = _times(count, sent, load.get(link, 0.0))
    latency_s = 2 * (ways.inside_s + math.ceil(math.log2(ways.nodes)) * ways.across_s)
    return LinkTraffic(load, latency_s, 1, 2 * port)


@lru_cache(maxsize=4096)
def _times(count: float, nbytes: float, start: float = 0.0) -> float:
    """Return ``start`` with some bytes added so many times, one by one, and then a share of them."""
    whole = int(count)
    return reduce(add, repeat(nbytes, whole), start) + (count - whole) * nbytes


def _passes(routes: Iterable[Route]) -> dict[int, float]:
    """Return how many of some routes pass each link; of one that takes several ways it is a share."""
    found: dict[int, float] = defaultdict(int)
    for route in routes:
        for link in route.resources:
            found[link] += 1
        for link, share in route.shares:
            found[link] += share
    return found


class _RingWays(NamedTuple):
    """What the rings of a group pass."""

    passes: dict[int, float]
    """How many of their hops pass each link."""
    width: int
    """How many rings there are."""
    hop_s: float
    """Mean latency of the hops of the slowest ring."""


class _TreeWays(NamedTuple):
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
        self._rings: dict[tuple[tuple[int, ...], int | None], _RingWays] = {}
        self._trees: dict[tuple[tuple[int, ...], int | None], _TreeWays | None] = {}

    def rings(self, ranks: tuple[int, ...], cluster: Cluster, near: int | None) -> _RingWays:
        """Return those of its rings."""
        key = ranks, near
        if key not in self._rings:
            self._rings[key] = _find_rings(ranks, cluster, near)
        return self._rings[key]

    def trees(self, ranks: tuple[int, ...], cluster: Cluster, near: int | None) -> _TreeWays | None:
        """Return those of its trees, None for one node."""
        key = ranks, near
        if key not in self._trees:
            self._trees[key] = _find_trees(ranks, cluster, near)
        return self._trees[key]


@kept
def _ways(_: Cluster) -> _Ways:
    return _Ways()


def _find_rings(ranks: tuple[int, ...], cluster: Cluster, near: int | None) -> _RingWays:
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
    return _RingWays(_passes(passed), len(orders), latency_s)


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


def _find_trees(ranks: tuple[int, ...], cluster: Cluster, near: int | None) -> _TreeWays | None:
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
    passes = [_passes(routes) for routes in (inside, around, across)]
    inside_s, across_s = (max((route.latency_s for route in routes), default=0.0) for routes in (inside, across))
    return _TreeWays(passes[0], passes[1], passes[2], inside_s, across_s, width, max(map(len, nodes)), len(nodes))


def _in_switch(ranks: tuple[int, ...], nbytes: float, cluster: Cluster) -> LinkTraffic | None:
    """Sum in the switch of a node, which hands each part to a rank that gives it to all by the switch again: a port
    carries the whole and one part, each way (NCCL's NVLS). None where no switch does that.
    """
    spec = cluster.spec
    if not (spec.nvlink and spec.nvlink.reduces) or len(by_node(ranks, cluster)) > 1:
        return None
    part = nbytes / len(ranks)
    load: dict[int, float] = defaultdict(float)
    hop_s = 0.0
    for source, target in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
        route = cluster.route(source, target)
        hop_s = max(hop_s, route.latency_s)
        for resource in route.resources:
            load[resource] += nbytes + part
    return LinkTraffic(dict(load), hop_s, 2, 2 * nbytes + 2 * part)


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


def _near(nodes: list[list[int]], ranks: int | None) -> list[list[int]]:
    """Return the nodes of the first so many ranks, and as many as make a ring; all if None."""
    return nodes if ranks is None else nodes[: max(2, -(-ranks // len(nodes[0])))]
