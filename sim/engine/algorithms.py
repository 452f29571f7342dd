"""What an algorithm of a collective puts on every link: the bytes that it moves, not P x P flows of their own."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache, reduce
from itertools import repeat
from operator import add
from typing import NamedTuple

from sim.engine.ways import by_node, ways_of
from topology.cluster import Cluster
from topology.kinds import FullMeshSpec


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


def direct(ranks: tuple[int, ...], part: float, cluster: Cluster) -> LinkTraffic:
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


def rings(
    ranks: tuple[int, ...], part: float, steps: int, cluster: Cluster, memory_bytes: float, near: int | None
) -> LinkTraffic:
    """Every rank passes ``steps`` parts on to its neighbour, split over the rings."""
    ways = ways_of(cluster).rings(ranks, cluster, near)
    load = {link: _times(count, part * steps / ways.width) for link, count in ways.passes.items()}
    return LinkTraffic(load, ways.hop_s, steps, memory_bytes)


def trees(
    ranks: tuple[int, ...], nbytes: float, cluster: Cluster, memory_bytes: float, near: int | None
) -> LinkTraffic | None:
    """Two binary trees of nodes that carry half of the tensor each, a node being a leaf of one of them, over chains
    inside the nodes; None for one node. Sums go up and come down, so every node sends the whole twice, as in a ring,
    but after log(nodes) hops (NCCL's tree; Sanders, Speck and Träff 2009).
    """
    ways = ways_of(cluster).trees(ranks, cluster, near)
    if ways is None:
        return None
    load = {link: _times(count, nbytes) for link, count in ways.inside.items()}
    for link, count in ways.across.items():  # after what is inside, so that all nodes are loaded alike to the bit
        load[link] = _times(count, 2 * nbytes / ways.width, load.get(link, 0.0))
    latency_s = 2 * ((ways.longest - 1) * ways.inside_s + math.ceil(math.log2(ways.nodes)) * ways.across_s)
    return LinkTraffic(load, latency_s, 1, memory_bytes)


def in_switches(ranks: tuple[int, ...], nbytes: float, cluster: Cluster, near: int | None) -> LinkTraffic | None:
    """Sum in the switch of each node, as ``in_switch``, and over the nodes by trees of each rank's part (NCCL's
    NVLSTree). Of two nodes each sends its sums once, and has all; of more it sends and is sent them twice, as in
    ``trees``. None for one node, for one rank a node, and where no switch sums.
    """
    ways, nvlink = ways_of(cluster).trees(ranks, cluster, near), cluster.spec.nvlink
    if ways is None or ways.longest == 1 or not (nvlink and nvlink.reduces):
        return None
    port = nbytes + nbytes / ways.longest
    load = {link: _times(count, port) for link, count in ways.around.items()}
    sent = (1 if ways.nodes == 2 else 2) * nbytes / ways.width
    for link, count in ways.across.items():
        load[link] = _times(count, sent, load.get(link, 0.0))
    latency_s = 2 * (ways.inside_s + math.ceil(math.log2(ways.nodes)) * ways.across_s)
    return LinkTraffic(load, latency_s, 1, 2 * port)


def in_switch(ranks: tuple[int, ...], nbytes: float, cluster: Cluster) -> LinkTraffic | None:
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


def straight(
    ring: LinkTraffic, ranks: tuple[int, ...], part: float, steps: int, cluster: Cluster
) -> LinkTraffic | None:
    """In each step every rank sends a part straight to every other: to its owner, which sums, or from it to all; its
    memory has as much to do as in a ring. None but in a full mesh, whose collectives take all paths (UB-Mesh,
    arXiv:2503.20313 §5); NCCL knows rings and trees.
    """
    if not isinstance(cluster.spec.fabric, FullMeshSpec):
        return None
    once = direct(ranks, part, cluster)
    load = {link: steps * nbytes for link, nbytes in once.nbytes.items()}
    return LinkTraffic(load, once.hop_s, steps, ring.memory_bytes)


@lru_cache(maxsize=4096)
def _times(count: float, nbytes: float, start: float = 0.0) -> float:
    """Return ``start`` with some bytes added so many times, one by one, and then a share of them."""
    whole = int(count)
    return reduce(add, repeat(nbytes, whole), start) + (count - whole) * nbytes
