"""Fabrics without switches: nodes in a grid, each linked to the next along every dimension; others are reached through
those between.

    0 ── 1 ── 2 ── 3        a mesh of 4: a chain           0 ── 1
                                                           │    │    a torus of 2 x 2: where a dimension has two nodes,
                                                           2 ── 3    the way around is the link that there is

Node numbers count along the last dimension first. Routes are in dimension order, the last dimension first, along the
shorter way around; of two as short ones the one upwards. So they are fixed, and free of deadlock in a mesh (Dally and
Seitz 1987). Each direction of a link is a resource of its own; its figures are those of the table [nic].
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from topology.fabrics import Edge, Resource
from topology.specs import ClusterSpec, MeshSpec, TorusSpec

Grid = MeshSpec | TorusSpec


def direct_edges(spec: ClusterSpec) -> dict[str, dict[str, Edge]]:
    """Return the edges from every GPU to those of the nodes next to its own; none where there is a switch."""
    grid = spec.fabric
    if grid is None:
        return {}
    return {_gpu(node): {_gpu(other): _edge(spec, node, other) for other in _next_to(grid, node)}
            for node in range(spec.nodes)}  # fmt: skip


def direct_path(spec: ClusterSpec, source: int, target: int) -> list[str]:
    """Return the GPUs that a message between two passes, with both."""
    assert spec.fabric is not None
    return [_gpu(node) for node in _passed(spec.fabric, source, target)]


def direct_way(spec: ClusterSpec, source: int, target: int) -> list[Edge]:
    """Return the edges that a message between the GPUs of two nodes passes."""
    assert spec.fabric is not None
    return [_edge(spec, *hop) for hop in pairwise(_passed(spec.fabric, source, target))]


def _gpu(node: int) -> str:
    return f"gpu[{node}]"


def _edge(spec: ClusterSpec, node: int, other: int) -> Edge:
    nic = spec.nic
    assert nic is not None
    name = f"node[{node}].to[{other}]"
    return Edge((Resource(name, "nic", float(nic.bytes_per_s * nic.payload)),), nic.latency_s)


def _passed(grid: Grid, source: int, target: int) -> list[int]:
    """Return the nodes on the way, with both ends."""
    here, there = _place(grid, source), _place(grid, target)
    nodes = [source]
    for dim in reversed(range(len(grid.dims))):
        size = grid.dims[dim]
        up = (there[dim] - here[dim]) % size
        step = 1 if there[dim] > here[dim] else -1
        if isinstance(grid, TorusSpec):
            step = 1 if up <= size - up else -1
        while here[dim] != there[dim]:
            here[dim] = (here[dim] + step) % size
            nodes.append(_number(grid, here))
    return nodes


def _next_to(grid: Grid, node: int) -> Iterator[int]:
    """Yield the nodes that a link leads to, each once."""
    found = []
    for dim, size in enumerate(grid.dims):
        for step in (1, -1):
            place = _place(grid, node)
            place[dim] += step
            if isinstance(grid, TorusSpec):
                place[dim] %= size
            if 0 <= place[dim] < size and (other := _number(grid, place)) != node and other not in found:
                found.append(other)
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
