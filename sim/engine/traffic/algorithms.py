"""What an algorithm of a collective puts on every link: the bytes that it moves, not P x P flows of their own."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache, reduce
from itertools import pairwise, permutations, repeat
from operator import add
from typing import Literal, NamedTuple

from sim.base.errors import InputError
from sim.engine.traffic.ways import by_node, passes, ways_of
from topology.cluster import Cluster, Route
from topology.fabric.direct import closed_ways
from topology.fabric.direct import direct as direct_of
from topology.fabric.fabrics import nvlink_peers
from topology.kinds import FullMeshSpec

Gathers = Literal["all_gather", "reduce_scatter", "all_reduce"]


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


_COUNTED = 2.0**53
"""Up to which a float has every whole number."""


def slowest_link(nbytes: dict[int, float], cluster: Cluster) -> int:
    """Return which of several links takes longest for its bytes."""
    return max(nbytes, key=lambda link: (nbytes[link] / cluster.resources[link].capacity, -link))


def direct(ranks: tuple[int, ...], part: float, cluster: Cluster) -> LinkTraffic:
    """Every rank sends one part to every other. What passes a link is added up part by part, or to the same sum at once
    where it is of whole bytes that a float can count.
    """
    memory_bytes = 2 * part * len(ranks)  # the own part is copied
    together = ways_of(cluster).direct(ranks, cluster)
    if together is not None:
        passed, longest_s = together
        whole = part == int(part) and max(passed.values(), default=0) * part < _COUNTED
        return LinkTraffic(
            {link: float(count * int(part)) if whole else _times(count, part) for link, count in passed.items()},
            longest_s,
            1,
            memory_bytes,
        )
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
    return LinkTraffic(dict(load), latency_s, 1, memory_bytes)


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
    memory has as much to do as in a ring. None but in a full mesh, whose collectives take all paths: of nodes (UB-Mesh,
    arXiv:2503.20313 §5), and of the GPUs of one, as many rings as RCCL finds carry as much. NCCL knows rings and trees.
    """
    joined = nvlink_peers(cluster.spec, cluster.devices[ranks[0]].number)
    meshed = cluster.spec.bridged_gpus and all(cluster.devices[rank].number in joined for rank in ranks)
    if not (meshed or isinstance(cluster.spec.fabric, FullMeshSpec)):
        return None
    once = direct(ranks, part, cluster)
    load = {link: steps * nbytes for link, nbytes in once.nbytes.items()}
    return LinkTraffic(load, once.hop_s, steps, ring.memory_bytes)


def chosen(
    kind: Gathers, ranks: tuple[int, ...], nbytes: float, cluster: Cluster, memory_bytes: float, near: int | None
) -> LinkTraffic:
    """Return a collective by the algorithm that the cluster's ``[collectives]`` names for its kind."""
    name, n = getattr(cluster.spec.collectives, kind), len(ranks)
    part, times = (nbytes / n, 2) if kind == "all_reduce" else (nbytes, 1)
    if name == "ring":
        return rings(ranks, part, times * (n - 1), cluster, memory_bytes, near)
    if name == "neighbour-ring":
        return neighbour_rings(ranks, part, times * (n - 1), cluster, memory_bytes)
    if name == "hierarchical":
        return hierarchical(kind, ranks, part, times, cluster, memory_bytes, near)
    if name == "pat":
        return aggregated_trees(kind, ranks, part, cluster, memory_bytes)
    if name == "tree":
        return trees(ranks, nbytes, cluster, memory_bytes, near) or chain(ranks, nbytes, cluster, memory_bytes)
    if name == "switch":
        summed = in_switch(ranks, nbytes, cluster) or in_switches(ranks, nbytes, cluster, near)
        return summed or rings(ranks, part, times * (n - 1), cluster, memory_bytes, near)
    assert name == "direct"
    once = direct(ranks, part, cluster)
    load = {link: times * carried for link, carried in once.nbytes.items()}
    return LinkTraffic(load, once.hop_s, times, memory_bytes)


def neighbour_rings(
    ranks: tuple[int, ...], part: float, steps: int, cluster: Cluster, memory_bytes: float
) -> LinkTraffic:
    """Rings as ``rings``, but along the links of nodes without switches, half of the bytes each way around; of circuits
    over all strides that pass all nodes. Ranks of a part of the nodes are in that order, too.
    """
    fabric, found, slowest_s = direct_of(cluster.spec), list[Route](), 0.0
    assert fabric is not None
    orders = closed_ways(fabric, cluster.spec.nodes)
    for order in orders:
        place = {node: number for number, node in enumerate(order)}
        ring = sorted(ranks, key=lambda rank: place[cluster.devices[rank].node])
        for way in (ring, ring[::-1]):
            routes = [cluster.route(*pair) for pair in zip(way, (*way[1:], way[0]), strict=True)]
            slowest_s = max(slowest_s, sum(route.latency_s for route in routes) / len(routes))
            found += routes
    load = {link: count * part * steps / (2 * len(orders)) for link, count in passes(found).items()}
    return LinkTraffic(load, slowest_s, steps, memory_bytes)


def hierarchical(
    kind: str, ranks: tuple[int, ...], part: float, times: int, cluster: Cluster, memory_bytes: float, near: int | None
) -> LinkTraffic:
    """Rings inside nodes, and rings over nodes of the ranks that have the same place in theirs, so that data stays on
    its rail. Chunks are in both at once (BlueConnect: Cho et al., MLSys 2019). As many bytes pass a rank's memory as in
    one ring. Inside one node, or with one rank a node, it is that ring.
    """
    ways, group = ways_of(cluster).trees(ranks, cluster, near), by_node(ranks, cluster)
    if ways is None or ways.longest == 1:
        return rings(ranks, part, times * (len(ranks) - 1), cluster, memory_bytes, near)
    _require_equal(kind, "hierarchical", group)
    inside, across = times * (ways.longest - 1), times * (ways.nodes - 1)
    load = {link: count * inside * ways.nodes * part for link, count in ways.around.items()}
    for link, count in ways.across.items():
        load[link] = load.get(link, 0.0) + count * across * part
    return LinkTraffic(load, inside * ways.inside_s + across * ways.across_s, 1, memory_bytes)


def aggregated_trees(
    kind: str, ranks: tuple[int, ...], part: float, cluster: Cluster, memory_bytes: float
) -> LinkTraffic:
    """In step k every rank passes the parts that it has, up to 2^k, on to the one 2^k further: as many bytes as in a
    ring, in a logarithm of steps (NCCL's PAT of 2.23, for one rank a node; Bruck et al. 1997).
    """
    if any(len(members) > 1 for members in by_node(ranks, cluster)):
        raise InputError(
            f"collectives.{kind} = 'pat': a group has several ranks on a node, and NCCL's PAT takes one a node; set "
            f"ring or hierarchical"
        )
    load: dict[int, float] = defaultdict(float)
    latency_s, n, far = 0.0, len(ranks), 1
    while far < n:
        routes = [cluster.route(rank, ranks[(number + far) % n]) for number, rank in enumerate(ranks)]
        latency_s += max(route.latency_s for route in routes)
        for link, count in passes(routes).items():
            load[link] += count * min(far, n - far) * part
        far *= 2
    return LinkTraffic(dict(load), latency_s, 1, memory_bytes)


def chain(ranks: tuple[int, ...], nbytes: float, cluster: Cluster, memory_bytes: float) -> LinkTraffic:
    """Send sums along the ranks of a single node and back: its tree."""
    routes = [cluster.route(*pair) for ends in pairwise(ranks) for pair in (ends, ends[::-1])]
    load = {link: count * nbytes for link, count in passes(routes).items()}
    return LinkTraffic(load, max(route.latency_s for route in routes), 2 * (len(ranks) - 1), memory_bytes)


def rail_aligned(ranks: tuple[int, ...], part: float, cluster: Cluster) -> LinkTraffic:
    """All-to-all in two steps: inside each node to the rank that has the place of the receiver in its node, then
    between ranks of the same place. All bytes pass the memory twice; one node, or one rank a node, needs one step.
    """
    nodes = by_node(ranks, cluster)
    if len(nodes) == 1 or len(ranks) == len(nodes):
        return direct(ranks, part, cluster)
    width = _require_equal("all_to_all", "rail-aligned", nodes)
    inside = [cluster.route(*pair) for members in nodes for pair in permutations(members, 2)]
    across = [cluster.route(*pair) for one, other in permutations(nodes, 2) for pair in zip(one, other, strict=True)]
    load = {link: count * part * len(nodes) for link, count in passes(inside).items()}
    for link, count in passes(across).items():
        load[link] = load.get(link, 0.0) + count * part * width
    latency_s = sum(max(route.latency_s for route in routes) for routes in (inside, across))
    return LinkTraffic(load, latency_s, 1, 2 * 2 * part * len(ranks))


def _require_equal(kind: str, algorithm: str, nodes: list[list[int]]) -> int:
    """Return how many ranks each node has; raises InputError where they differ."""
    counts = {len(members) for members in nodes}
    if len(counts) > 1:
        raise InputError(
            f"collectives.{kind} = {algorithm!r}: a group has {' and '.join(map(str, sorted(counts)))} ranks on its "
            f"nodes, and takes as many on each; set ring or direct, or other degrees"
        )
    return counts.pop()


@lru_cache(maxsize=4096)
def _times(count: float, nbytes: float, start: float = 0.0) -> float:
    """Return ``start`` with some bytes added so many times, one by one, and then a share of them."""
    whole = int(count)
    return reduce(add, repeat(nbytes, whole), start) + (count - whole) * nbytes
