"""What a collective puts on every link: the bytes that its algorithm moves, not P x P flows of their own.

All-to-all sends every part straight to its owner. All-gather, reduce-scatter and all-reduce run as rings, one per
member of a node, each leaving its node through another member's NIC, as NCCL spreads its channels over the NICs.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple, assert_never

from sim.schedule.ops import AllGather, AllReduce, AllToAll, Barrier, Collective, ReduceScatter
from topology.cluster import Cluster


class LinkTraffic(NamedTuple):
    """What one collective of a group does to the machine."""

    nbytes: dict[int, float]
    """Bytes per resource, links only."""
    hop_s: float
    """Latency of one step: of the longest route that it takes."""
    steps: int
    """Steps that follow each other."""
    memory_bytes: float
    """Bytes that each rank reads and writes in its memory."""

    @property
    def latency_s(self) -> float:
        """Latency of all steps."""
        return self.hop_s * self.steps


def link_traffic(op: Collective, ranks: tuple[int, ...], nbytes: int, cluster: Cluster) -> LinkTraffic:
    """Return the traffic of a collective over ``ranks``; ``nbytes`` is one part (for AllReduce the whole)."""
    n = len(ranks)
    if n == 1:
        return LinkTraffic({}, 0.0, 0, 0.0)
    if isinstance(op, AllToAll):
        return _direct(ranks, nbytes, cluster)
    if isinstance(op, AllGather):  # each part is read once and written once per step; the own one is copied
        return _rings(ranks, nbytes, n - 1, cluster, 2 * nbytes * n)
    if isinstance(op, ReduceScatter):  # sums read two parts and write one
        return _rings(ranks, nbytes, n - 1, cluster, 3 * nbytes * (n - 1))
    if isinstance(op, AllReduce):
        return _rings(ranks, nbytes / n, 2 * (n - 1), cluster, (3 + 2) * nbytes * (n - 1) / n)
    if isinstance(op, Barrier):
        return _rings(ranks, 0, n - 1, cluster, 0.0)._replace(nbytes={})
    assert_never(op)


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
        for source, target in zip(order, (*order[1:], order[0]), strict=True):
            route = cluster.route(source, target)
            latency_s = max(latency_s, route.latency_s)
            for resource in route.resources:
                load[resource] += part * steps / len(orders)
    return LinkTraffic(dict(load), latency_s, steps, memory_bytes)


def _ring_orders(ranks: tuple[int, ...], cluster: Cluster) -> list[list[int]]:
    """Return the rings: ring c enters the k-th node at its member c - k and leaves it at the one before."""
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        nodes[cluster.devices[rank].node].append(rank)
    width = min(len(members) for members in nodes.values())
    orders = []
    for ring in range(width):
        order = []
        for number, members in enumerate(nodes.values()):
            start = (ring - number) % len(members)
            order += members[start:] + members[:start]
        orders.append(order)
    return orders
