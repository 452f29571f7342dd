"""What a collective needs at least, whatever its algorithm: bytes that sets of links have to carry together.

What a rank has to be told enters by its links, what only it knows leaves by them, and what a node has to be told enters
by the NICs of its members. A ring, a tree or a sum by hierarchy may carry more, none less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, assert_never

from sim.base.kept import kept
from sim.engine.traffic.ways import by_node
from sim.schedule.ir.ops import CollectiveName
from topology.cluster import Cluster, Route
from topology.kinds import DIRECT

Need = tuple[frozenset[int], float]
"""Some links, and the bytes that they carry together at least."""


class _Ends(NamedTuple):
    """Where a group's data leaves and enters."""

    out: list[frozenset[int]]
    """Per rank its own links, of any kind."""
    into: list[frozenset[int]]
    node_out: list[frozenset[int]]
    """Per node the NICs of its members, none for a single node."""
    node_into: list[frozenset[int]]
    members: list[int]
    """Ranks per node."""
    nodes: int
    """Of the whole group."""


def needs(
    kind: CollectiveName, ranks: tuple[int, ...], nbytes: float, cluster: Cluster, of: range | None = None
) -> Iterator[Need]:
    """Yield what a collective over ``ranks`` needs; ``nbytes`` is one part (of an all-reduce the whole).

    With ``of`` it is what concerns the nodes of these ranks. Where a rank is alone on its node, the same links may be
    its own and its node's: they are named once.
    """
    found: dict[frozenset[int], float] = {}
    for links, least in _of_ranks_and_nodes(kind, ranks, nbytes, cluster, of):
        found[links] = max(found.get(links, 0.0), least)
    yield from found.items()


def _of_ranks_and_nodes(
    kind: CollectiveName, ranks: tuple[int, ...], nbytes: float, cluster: Cluster, of: range | None
) -> Iterator[Need]:
    """Yield what each rank needs, then what each node does."""
    n = len(ranks)
    if n == 1 or kind == "barrier":
        return
    ends = _ends(cluster).among(ranks, cluster, of)
    if kind == "all_reduce":
        yield from _of_sums(n, nbytes, ends, cluster)
    elif kind == "all_gather" or kind == "reduce_scatter" or kind == "all_to_all":  # noqa: PLR1714 - mypy narrows these
        enters, leaves = kind != "reduce_scatter", kind != "all_gather"
        for links, side in ((ends.into, enters), (ends.out, leaves)):
            yield from ((own, nbytes * (n - 1)) for own in links if side)
        for links, side in ((ends.node_into, enters), (ends.node_out, leaves)):
            for nics, members in zip(links, ends.members, strict=False):
                if side:
                    yield nics, nbytes * (n - members) * (members if kind == "all_to_all" else 1)
    else:
        assert_never(kind)


def _of_sums(n: int, nbytes: float, ends: _Ends, cluster: Cluster) -> Iterator[Need]:
    """Every rank, and every node, gives all of its numbers away and is told all sums. Where no switch sums, n of them
    pass the whole n - 1 times to sum it and as often to tell it, on average 2 (n - 1) / n each (Patarasuk and Yuan
    2009); the most loaded has no less.
    """
    nvlink, nic = cluster.spec.nvlink, cluster.spec.nic
    of_rank = nbytes if nvlink and nvlink.reduces else 2 * nbytes * (n - 1) / n
    of_node = nbytes if nic and nic.reduces else 2 * nbytes * (ends.nodes - 1) / ends.nodes
    yield from ((own, of_rank) for own in (*ends.out, *ends.into))
    yield from ((nics, of_node) for nics in (*ends.node_out, *ends.node_into))


def least_seconds(found: Iterable[Need], cluster: Cluster) -> float:
    """Return the time at the links' rates of what needs longest, without latencies."""
    return max((nbytes / rate(links, cluster) for links, nbytes in found), default=0.0)


def rate(links: Iterable[int], cluster: Cluster) -> float:
    """Return the bytes per second of some links together."""
    return math.fsum(cluster.resources[link].capacity for link in links)


class _EndsOf:
    """The ends of groups on one cluster, found once."""

    def __init__(self) -> None:
        self._found: dict[tuple[tuple[int, ...], range | None], _Ends] = {}

    def among(self, ranks: tuple[int, ...], cluster: Cluster, of: range | None) -> _Ends:
        """Return those of a group, or of its nodes with some ranks ``of`` these."""
        key = ranks, of
        if key not in self._found:
            self._found[key] = _find_ends(ranks, cluster, of)
        return self._found[key]


@kept
def _ends(_: Cluster) -> _EndsOf:
    return _EndsOf()


def _find_ends(ranks: tuple[int, ...], cluster: Cluster, of: range | None) -> _Ends:
    nodes = by_node(ranks, cluster)
    out, into, node_out, node_into, counts = [], [], [], [], []
    for number, members in enumerate(nodes):
        if of is not None and not any(rank in of for rank in members):
            continue
        counts.append(len(members))
        there, back = [], []
        for place, rank in enumerate(members):
            near = members[:place] + members[place + 1 :]
            near = near if cluster.spec.bridged_gpus else near[place - 1 :][:1]  # a link of its own for each way
            far = _far(nodes, number, cluster)
            leaving = [cluster.route(rank, other) for other in (*near, *far)]
            entering = [cluster.route(other, rank) for other in (*near, *far)]
            out.append(frozenset(route.resources[0] for route in leaving))
            into.append(frozenset(_links(route, cluster)[-1] for route in entering))
            if len(nodes) > 1:
                there += [_nics(route, cluster)[0] for route in leaving[len(near) :]]
                back += [_nics(route, cluster)[-1] for route in entering[len(near) :]]
        if len(nodes) > 1:
            node_out.append(frozenset(there))
            node_into.append(frozenset(back))
    return _Ends(out, into, node_out, node_into, counts, len(nodes))


def _far(nodes: list[list[int]], number: int, cluster: Cluster) -> list[int]:
    """Return ranks of other nodes than one, to which its ranks take all ways out that they have."""
    fabric = cluster.spec.fabric
    if len(nodes) == 1:
        return []
    if isinstance(fabric, DIRECT):  # a link of its own for each way
        return [rank for other, members in enumerate(nodes) if other != number for rank in members]
    return nodes[number - 1] if fabric else nodes[number - 1][:1]  # by rails, where what is for another changes them


def _links(route: Route, cluster: Cluster) -> list[int]:
    """Return the links of a route, without the memory that it may pass."""
    return [one for one in route.resources if cluster.resources[one].group != "dram"]


def _nics(route: Route, cluster: Cluster) -> list[int]:
    return [one for one in route.resources if cluster.resources[one].group == "nic"]
