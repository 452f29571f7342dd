"""What a collective puts on every link: the bytes that its algorithm moves, not P x P flows of their own.

All-to-all sends every part straight to its owner. All-gather and reduce-scatter run as rings, one per member of a node,
each leaving its node through another member's NIC, as NCCL spreads its channels over the NICs; all-reduce does too, or
as trees over the nodes, or in the switch of a node, whichever is fastest at the links' rates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple, assert_never

from sim.errors import InputError
from sim.schedule.ir.ops import CollectiveName
from topology.cluster import Cluster

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


def wire_bytes(kind: CollectiveName, ranks: tuple[int, ...], whole: int, cluster: Cluster) -> tuple[int, str]:
    """Return the bytes that a collective puts on its slowest link, and what that way is called; ``whole`` is the tensor
    that a rank ends with, or begins with, in bytes.
    """
    part = whole if kind == "all_reduce" else whole // len(ranks)
    nbytes = link_traffic(kind, ranks, part, cluster).nbytes
    return round(nbytes[slowest_link(nbytes, cluster)]), link_name(nbytes, cluster)


def link_traffic(kind: CollectiveName, ranks: tuple[int, ...], nbytes: int, cluster: Cluster) -> LinkTraffic:
    """Return the traffic of a collective over ``ranks``; ``nbytes`` is one part (of an all-reduce the whole)."""
    n = len(ranks)
    if n == 1:
        return LinkTraffic({}, 0.0, 0, 0.0)
    if kind == "all_to_all":
        return _direct(ranks, nbytes, cluster)
    if kind == "all_gather":  # each part is read once and written once per step; the own one is copied
        return _rings(ranks, nbytes, n - 1, cluster, 2 * nbytes * n)
    if kind == "reduce_scatter":  # sums read two parts and write one
        return _rings(ranks, nbytes, n - 1, cluster, 3 * nbytes * (n - 1))
    if kind == "all_reduce":
        memory_bytes = (3 + 2) * nbytes * (n - 1) / n
        ring = _rings(ranks, nbytes / n, 2 * (n - 1), cluster, memory_bytes)
        others = (_trees(ranks, nbytes, cluster, memory_bytes), _in_switch(ranks, nbytes, cluster))
        return min((ring, *(found for found in others if found)), key=lambda found: found.seconds(cluster))
    if kind == "barrier":
        return _rings(ranks, 0, n - 1, cluster, 0.0)._replace(nbytes={})
    assert_never(kind)


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
    return LinkTraffic(dict(load), latency_s, 1, 2 * part * len(ranks))  # the own part is copied


def _rings(ranks: tuple[int, ...], part: float, steps: int, cluster: Cluster, memory_bytes: float) -> LinkTraffic:
    """Every rank passes ``steps`` parts on to its neighbour, split over the rings."""
    load: dict[int, float] = defaultdict(float)
    latency_s = 0.0
    orders = _ring_orders(ranks, cluster)
    for order in orders:
        routes = [cluster.route(*pair) for pair in zip(order, (*order[1:], order[0]), strict=True)]
        latency_s = max(latency_s, sum(route.latency_s for route in routes) / len(routes))
        for route in routes:
            for resource in route.resources:
                load[resource] += part * steps / len(orders)
    return LinkTraffic(dict(load), latency_s, steps, memory_bytes)


def _trees(ranks: tuple[int, ...], nbytes: float, cluster: Cluster, memory_bytes: float) -> LinkTraffic | None:
    """Two binary trees of nodes that carry half of the tensor each, a node being a leaf of one of them, over chains
    inside the nodes; None for one node. Sums go up and come down, so every node sends the whole twice, as in a ring,
    but after log(nodes) hops (NCCL's tree; Sanders, Speck and Träff 2009).
    """
    nodes = list(_by_node(ranks, cluster).values())
    if len(nodes) == 1:
        return None
    width = min(len(members) for members in nodes)
    load: dict[int, float] = defaultdict(float)
    inside_s = across_s = 0.0
    for members, others in zip(nodes, (*nodes[1:], nodes[0]), strict=True):
        for source, target in pairwise(members):
            for route in (cluster.route(source, target), cluster.route(target, source)):
                inside_s = max(inside_s, route.latency_s)
                for resource in route.resources:
                    load[resource] += nbytes
        for source, target in zip(members[:width], others[:width], strict=True):
            route = cluster.route(source, target)
            across_s = max(across_s, route.latency_s)
            for resource in route.resources:
                load[resource] += 2 * nbytes / width
    latency_s = 2 * ((max(map(len, nodes)) - 1) * inside_s + math.ceil(math.log2(len(nodes))) * across_s)
    return LinkTraffic(dict(load), latency_s, 1, memory_bytes)


def _in_switch(ranks: tuple[int, ...], nbytes: float, cluster: Cluster) -> LinkTraffic | None:
    """Sum in the switch of a node, which hands each part to a rank that gives it to all by the switch again: a port
    carries the whole and one part, each way (NCCL's NVLS). None where no switch does that.
    """
    spec = cluster.spec
    if not (spec.nvlink and spec.nvlink.reduces) or len(_by_node(ranks, cluster)) > 1:
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


def _ring_orders(ranks: tuple[int, ...], cluster: Cluster) -> list[list[int]]:
    """Return the rings: ring c enters the k-th node at its member c - k and leaves it at the one before."""
    nodes = _by_node(ranks, cluster)
    width = min(len(members) for members in nodes.values())
    orders = []
    for ring in range(width):
        order = []
        for number, members in enumerate(nodes.values()):
            start = (ring - number) % len(members)
            order += members[start:] + members[:start]
        orders.append(order)
    return orders


def _by_node(ranks: tuple[int, ...], cluster: Cluster) -> dict[int, list[int]]:
    """Return the ranks of each node."""
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        nodes[cluster.devices[rank].node].append(rank)
    return nodes
