"""What a collective puts on every link: the bytes that its algorithm moves, not P x P flows of their own.

All-to-all sends every part straight to its owner. All-gather and reduce-scatter run as rings, one per member of a node,
each leaving its node through another member's NIC, as NCCL spreads its channels over the NICs; all-reduce does too, or
as trees over the nodes, whose sums inside a node go along a chain or through its switch, or in the switch of one node,
whichever is fastest at the links' rates. In a full mesh, where a ring takes one link of a node and leaves the others
idle, parts also go straight to their owners, if that is faster. A cluster's table ``[collectives]`` names others.
"""

from __future__ import annotations

from typing import assert_never

from sim.base.errors import InputError
from sim.engine.traffic.algorithms import (
    Gathers,
    LinkTraffic,
    chosen,
    direct,
    in_switch,
    in_switches,
    rail_aligned,
    rings,
    slowest_link,
    straight,
    trees,
)
from sim.schedule.ir.ops import CollectiveName
from topology.cluster import Cluster

_LINKS = ("nic", "pcie", "nvlink", "loopback")
"""Kinds of links as profiles call them, widest ways first: PCIe where bridges join pairs only."""


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
    """Return the traffic of a collective over ``ranks``, by the algorithm that the cluster names for it; ``nbytes`` is
    one part (of an all-reduce the whole). Raises InputError where that algorithm is not for such ranks.

    With ``near`` the links are those of the nodes of ranks below that number, and maybe of another node: for ranks that
    fill nodes, each with the same of its GPUs in the same order, so that the links of all nodes are loaded alike.
    """
    name = algorithm(kind, cluster)
    if len(ranks) == 1 or name == "fastest" or kind == "barrier":
        return usual_traffic(kind, ranks, nbytes, cluster, near)
    if kind == "all_to_all":
        return direct(ranks, nbytes, cluster) if name == "direct" else rail_aligned(ranks, nbytes, cluster)
    return chosen(kind, ranks, nbytes, cluster, _memory_bytes(kind, len(ranks), nbytes), near)


def algorithm(kind: CollectiveName, cluster: Cluster) -> str:
    """Return the name of the algorithm that a cluster has for a kind of collective."""
    return "fastest" if kind == "barrier" else str(getattr(cluster.spec.collectives, kind))


def usual_traffic(
    kind: CollectiveName, ranks: tuple[int, ...], nbytes: int, cluster: Cluster, near: int | None = None
) -> LinkTraffic:
    """Return the same by the fastest algorithm at the links' rates of those that libraries choose from."""
    n = len(ranks)
    if n == 1:
        return LinkTraffic({}, 0.0, 0, 0.0)
    if kind == "all_to_all":
        return direct(ranks, nbytes, cluster)
    if kind == "barrier":
        return rings(ranks, 0, n - 1, cluster, 0.0, near)._replace(nbytes={})
    memory_bytes = _memory_bytes(kind, n, nbytes)
    if kind == "all_gather" or kind == "reduce_scatter":  # noqa: PLR1714 - mypy narrows these
        ring = rings(ranks, nbytes, n - 1, cluster, memory_bytes, near)
        return _fastest(cluster, ring, straight(ring, ranks, nbytes, 1, cluster))
    if kind == "all_reduce":
        ring = rings(ranks, nbytes / n, 2 * (n - 1), cluster, memory_bytes, near)
        return _fastest(
            cluster,
            ring,
            trees(ranks, nbytes, cluster, memory_bytes, near),
            in_switches(ranks, nbytes, cluster, near),
            in_switch(ranks, nbytes, cluster),
            straight(ring, ranks, nbytes / n, 2, cluster),
        )
    assert_never(kind)


def _memory_bytes(kind: Gathers, n: int, nbytes: float) -> float:
    """Return what each of n ranks reads and writes in its memory: of a gather each part is read once and written once
    per step, and the own one is copied; sums read two parts and write one; all-reduce sums, and gathers sums.
    """
    if kind == "all_gather":
        return 2 * nbytes * n
    return 3 * nbytes * (n - 1) if kind == "reduce_scatter" else (3 + 2) * nbytes * (n - 1) / n


def _fastest(cluster: Cluster, ring: LinkTraffic, *others: LinkTraffic | None) -> LinkTraffic:
    """Return the first of the fastest at the links' rates, of what there is."""
    return min((ring, *(found for found in others if found)), key=lambda found: found.seconds(cluster))
