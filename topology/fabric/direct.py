"""Fabrics without switches: nodes linked to each other at the figures of the table [nic]; others are reached through
those between.

    0 ── 1 ── 2 ── 3        a mesh of 4: a chain           0 ── 1
                                                           │    │    a torus of 2 x 2: where a dimension has two nodes,
                                                           2 ── 3    the way around is the link that there is

A full mesh links each node to all others along every dimension. Node numbers count along the last dimension first.
Routes are in dimension order, the last dimension first, along the shorter way around; of two as short ones the one
upwards. So they are fixed, and free of deadlock in a mesh (Dally and Seitz 1987). Over optical circuits they take the
fewest, first by the strides that are named first, and between nodes as far apart by the same strides. Each direction of
a link is a resource of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, pairwise

from topology.fabric.fabrics import Edge, Resource
from topology.kinds import DIRECT, CircuitsSpec, Direct, FullMeshSpec, MeshSpec, TorusSpec
from topology.specs import ClusterSpec

Grid = MeshSpec | TorusSpec | FullMeshSpec


def direct(spec: ClusterSpec) -> Direct | None:
    """Return the fabric of a cluster if it is one without switches."""
    return spec.fabric if isinstance(spec.fabric, DIRECT) else None


def direct_edges(spec: ClusterSpec) -> dict[str, dict[str, Edge]]:
    """Return the edges from every GPU to those of the nodes that a link leads to; none where there is a switch."""
    links = DirectLinks(spec, even=True)
    gpus = [_gpu(node) for node in range(spec.nodes)]
    return {
        gpus[node]: {gpus[other]: Edge((links.made(node, other),), links.latency_s) for other in others}
        for node, others in enumerate(links.ends)
    }


class DirectLinks:
    """What links between nodes are limited by, in the order of ``direct_edges``; none where there is a switch. There
    may be a million, so each is made when asked for. With ``even`` all have the rate of the spec.
    """

    def __init__(self, spec: ClusterSpec, *, even: bool = False) -> None:
        fabric = direct(spec)
        self.ends = [list(_next_to(fabric, node, spec.nodes)) for node in range(spec.nodes)] if fabric else []
        """For every node those that a link leads to, each once."""
        self.latency_s = spec.nic.latency_s if spec.nic else 0.0
        self._rate = float(spec.nic.bytes_per_s * spec.nic.payload) if spec.nic else 0.0
        special = {} if even else spec.per_gpu
        self._shares = {gpu: one.link for gpu, one in special.items() if one.link != 1.0}
        self._first = [0, *accumulate(map(len, self.ends))]

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, number: int) -> Resource:
        node = bisect_right(self._first, number) - 1
        return self.made(node, self.ends[node][number - self._first[node]])

    def __iter__(self) -> Iterator[Resource]:
        return (self.made(node, other) for node, others in enumerate(self.ends) for other in others)

    def capacities(self) -> list[float]:
        """Return the bytes per second of each."""
        return [one.capacity for one in self] if self._shares else [self._rate] * len(self)

    def number(self, node: int, other: int) -> int:
        """Return which of them leads from one node to another one that is next to it."""
        return self._first[node] + self.ends[node].index(other)

    def made(self, node: int, other: int) -> Resource:
        """Return the one that leads there, as slow as the slower of both GPUs' own links."""
        shares, rate = self._shares, self._rate
        if shares:
            rate *= min(shares.get(node, 1.0), shares.get(other, 1.0))
        return Resource(f"node[{node}].to[{other}]", "nic", rate)


def direct_path(spec: ClusterSpec, source: int, target: int) -> list[str]:
    """Return the GPUs that a message between two passes, with both."""
    return [_gpu(node) for node in _passed(spec, source, target)]


def direct_hops(spec: ClusterSpec, source: int, target: int) -> list[tuple[int, int]]:
    """Return the links that a message between the GPUs of two nodes passes, by the nodes at their ends."""
    return list(pairwise(_passed(spec, source, target)))


def closed_ways(fabric: Direct, nodes: int) -> list[list[int]]:
    """Return orders of all nodes in which each has a link to the next, and the last to the first wherever the fabric
    allows that: one of a grid, of circuits one for each stride that passes all nodes. A mesh has none that closes
    where it is a chain, or all of its sides are odd.
    """
    if isinstance(fabric, CircuitsSpec):
        return [[step * stride % nodes for step in range(nodes)] for stride in fabric.passing_all(nodes)]
    sides = fabric.dims
    even = next((dim for dim, size in enumerate(sides) if size % 2 == 0), None)
    if even is None:
        return [[_number(fabric, list(place)) for place in _snake(sides)]]
    columns = _snake((*sides[:even], *sides[even + 1 :]))
    rows = [[(*place[:even], row, *place[even:]) for place in columns] for row in range(sides[even])]
    there = [place for number, row in enumerate(rows) for place in (row[1:] if number % 2 == 0 else row[:0:-1])]
    back = [row[0] for row in reversed(rows)]
    return [[_number(fabric, list(place)) for place in (*there, *back)]]


def _snake(sides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all places of a grid, each next to the one before: a row there, the next one back."""
    found: list[tuple[int, ...]] = [()]
    for size in reversed(sides):
        found = [(at, *rest) for at in range(size) for rest in (found if at % 2 == 0 else found[::-1])]
    return found


def _gpu(node: int) -> str:
    return f"gpu[{node}]"


def _passed(spec: ClusterSpec, source: int, target: int) -> list[int]:
    """Return the nodes on the way, with both ends."""
    fabric = direct(spec)
    assert fabric is not None
    if isinstance(fabric, CircuitsSpec):
        steps = _steps(fabric.strides, spec.nodes)[(target - source) % spec.nodes]
        return [node % spec.nodes for node in accumulate(steps, initial=source)]
    here, there = _place(fabric, source), _place(fabric, target)
    nodes = [source]
    for dim in reversed(range(len(fabric.dims))):
        size = fabric.dims[dim]
        up = (there[dim] - here[dim]) % size
        step = 1 if there[dim] > here[dim] else -1
        if isinstance(fabric, TorusSpec):
            step = 1 if up <= size - up else -1
        elif isinstance(fabric, FullMeshSpec):
            step = up
        while here[dim] != there[dim]:
            here[dim] = (here[dim] + step) % size
            nodes.append(_number(fabric, here))
    return nodes


@lru_cache(maxsize=64)
def _steps(strides: tuple[int, ...], nodes: int) -> dict[int, tuple[int, ...]]:
    """Return the fewest steps to the node that is so many further, for each."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    reached = deque([0])
    while reached:
        here = reached.popleft()
        for stride in strides:
            for step in (stride, -stride):
                if (there := (here + step) % nodes) not in found:
                    found[there] = (*found[here], step)
                    reached.append(there)
    return found


def _next_to(fabric: Direct, node: int, nodes: int) -> Iterable[int]:
    """Return the nodes that a link leads to, each once."""
    if isinstance(fabric, CircuitsSpec):
        return dict.fromkeys((node + step) % nodes for stride in fabric.strides for step in (stride, -stride))
    found: dict[int, None] = {}
    apart = nodes
    for size in fabric.dims:
        apart //= size
        at = node // apart % size
        if isinstance(fabric, FullMeshSpec):
            ends: Iterable[int] = (*range(at + 1, size), *range(at))
        elif isinstance(fabric, TorusSpec):
            ends = (at + 1) % size, (at - 1) % size
        else:
            ends = [end for end in (at + 1, at - 1) if 0 <= end < size]
        found |= dict.fromkeys(node + (end - at) * apart for end in ends if end != at)
    return found


def _place(grid: Grid, node: int) -> list[int]:
    """Return the coordinates of a node."""
    place = []
    for size in reversed(grid.dims):
        node, at = divmod(node, size)
        place.append(at)
    return place[::-1]


def _number(grid: Grid, place: list[int]) -> int:
    number = 0
    for size, at in zip(grid.dims, place, strict=True):
        number = number * size + at
    return number
