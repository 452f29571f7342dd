"""What a collective puts on every link: the bytes that its algorithm moves, not P x P flows of their own.

All-to-all sends every part straight to its owner. All-gather and reduce-scatter run as rings, one per member of a node,
each leaving its node through another member's NIC, as NCCL spreads its channels over the NICs; all-reduce does too, or
as trees over the nodes, whose sums inside a node go along a chain or through its switch, or in the switch of one node,
whichever is fastest at the links' rates. In a full mesh, where a ring takes one link of a node and leaves the others
idle, parts also go straight to their owners, if that is faster.
"""

from __future__ import annotations

from typing import assert_never

from sim.engine.algorithms import LinkTraffic, direct, in_switch, in_switches, rings, slowest_link, straight, trees
from sim.errors import InputError
from sim.schedule.ir.ops import CollectiveName
from topology.cluster import Cluster

_LINKS = ("nic", "nvlink", "pcie", "loopback")
"""Kinds of links as profiles call them, widest ways first."""


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
        return direct(ranks, nbytes, cluster)
    if kind == "all_gather":  # each part is read once and written once per step; the own one is copied
        ring = rings(ranks, nbytes, n - 1, cluster, 2 * nbytes * n, near)
        return _fastest(cluster, ring, straight(ring, ranks, nbytes, 1, cluster))
    if kind == "reduce_scatter":  # sums read two parts and write one
        ring = rings(ranks, nbytes, n - 1, cluster, 3 * nbytes * (n - 1), near)
        return _fastest(cluster, ring, straight(ring, ranks, nbytes, 1, cluster))
    if kind == "all_reduce":
        memory_bytes = (3 + 2) * nbytes * (n - 1) / n
        ring = rings(ranks, nbytes / n, 2 * (n - 1), cluster, memory_bytes, near)
        return _fastest(
            cluster,
            ring,
            trees(ranks, nbytes, cluster, memory_bytes, near),
            in_switches(ranks, nbytes, cluster, near),
            in_switch(ranks, nbytes, cluster),
            straight(ring, ranks, nbytes / n, 2, cluster),
        )
    if kind == "barrier":
        return rings(ranks, 0, n - 1, cluster, 0.0, near)._replace(nbytes={})
    assert_never(kind)


def _fastest(cluster: Cluster, ring: LinkTraffic, *others: LinkTraffic | None) -> LinkTraffic:
    """Return the first of the fastest at the links' rates, of what there is."""
    return min((ring, *(found for found in others if found)), key=lambda found: found.seconds(cluster))
