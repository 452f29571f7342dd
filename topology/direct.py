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

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, pairwise

from topology.fabrics import Edge, Resource
from topology.kinds import DIRECT, CircuitsSpec, Direct, FullMeshSpec, MeshSpec, TorusSpec
from topology.specs import ClusterSpec

Grid = MeshSpec | TorusSpec | FullMeshSpec


def direct(spec: ClusterSpec) -> Direct | None:
    """Return the fabric of a cluster if it is one without switches."""
    return spec.fabric if isinstance(spec.fabric, DIRECT) else None


def direct_edges(spec: ClusterSpec) -> dict[str, dict[str, Edge]]:
    """Return the edges from every GPU to those of the nodes that a link leads to; none where there is a switch."""
    fabric = direct(spec)
    if fabric is None:
        return {}
    return {_gpu(node): {_gpu(other): _edge(spec, node, other) for other in _next_to(fabric, node, spec.nodes)}
            for node in range(spec.nodes)}  # fmt: skip


def direct_path(spec: ClusterSpec, source: int, target: int) -> list[str]:
    """Return the GPUs that a message between two passes, with both."""
    return [_gpu(node) for node in _passed(spec, source, target)]


def direct_way(spec: ClusterSpec, source: int, target: int) -> list[Edge]:
    """Return the edges that a message between the GPUs of two nodes passes."""
    return [_edge(spec, *hop) for hop in pairwise(_passed(spec, source, target))]


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


def _edge(spec: ClusterSpec, node: int, other: int) -> Edge:
    nic = spec.nic
    assert nic is not None
    name = f"node[{node}].to[{other}]"
    return Edge((Resource(name, "nic", float(nic.bytes_per_s * nic.payload)),), nic.latency_s)


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


def _next_to(fabric: Direct, node: int, nodes: int) -> Iterator[int]:
    """Yield the nodes that a link leads to, each once."""
    if isinstance(fabric, CircuitsSpec):
        yield from dict.fromkeys((node + step) % nodes for stride in fabric.strides for step in (stride, -stride))
        return
    found: dict[int, None] = {}
    for dim, size in enumerate(fabric.dims):
        for step in range(1, size) if isinstance(fabric, FullMeshSpec) else (1, -1):
            place = _place(fabric, node)
            place[dim] += step
            if not isinstance(fabric, MeshSpec):
                place[dim] %= size
            if 0 <= place[dim] < size and (other := _number(fabric, place)) != node:
                found[other] = None
    yield from found


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
