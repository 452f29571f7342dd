"""The shape of what joins nodes, from its graph: how far ports are apart, by how many ways, what halves can send."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import networkx as nx

from topology.fabric.direct import direct, direct_edges
from topology.fabric.fabrics import FABRIC
from topology.fabric.graph import hops_from, switch_graph
from topology.fabric.switches import leaf, switched
from topology.specs import ClusterSpec

_STARTS = 64
"""Vertices from which distances are looked for, spread evenly: all others are like one of them."""


class Links(NamedTuple):
    """Links between equal kinds of switches, or nodes."""

    lower: str
    upper: str
    number: int
    bytes_per_s: float
    """Of each, per direction, headers left out."""


class Shape(NamedTuple):
    """What a fabric offers."""

    kind: str
    nodes: int
    ports: int
    """NICs, or stripes of them; of nodes without switches their links."""
    switches: int
    links: tuple[Links, ...]
    """Between switches, or between nodes."""
    diameter: int
    """Links between two ports at most: those to and from switches, and between them; between nodes those passed."""
    paths_least: int
    """Shortest ways between two switches with ports, or two nodes; one inside a switch."""
    paths_most: int
    bisection_bytes_per_s: float
    """What one half of the nodes can send the other one: the least cut of halves by number, by turns, and along each
    dimension. Another way to halve may have less."""
    injection_bytes_per_s: float
    """What the ports of a half can send."""

    @property
    def blocking(self) -> float:
        """Ratio of what the ports of one half send to what the other half can receive."""
        return self.injection_bytes_per_s / self.bisection_bytes_per_s


def shape(spec: ClusterSpec) -> Shape | None:
    """Return the shape of a cluster's fabric, None of a single node."""
    if spec.nodes == 1 or spec.nic is None:
        return None
    graph, ports = joined(spec)
    fabric = direct(spec)
    rate = spec.nic.bytes_per_s * spec.nic.payload * (1 if fabric else spec.nics_per_flow)
    ends = list(dict.fromkeys(ports))
    starts = ends[:: -(-len(ends) // _STARTS)]
    hops, paths = _apart(graph, starts, ends)
    links = tuple(_links(graph))
    of_node = [rate * graph.out_degree(port) if fabric else rate for port in ports]
    cuts = [_cut(graph, ports, of_node, half, spec.nodes) for half in _halves(spec)]
    bisection, injection = min(cuts, key=lambda cut: cut[0] / cut[1])
    kind = "one switch" if spec.fabric is None else str(spec.fabric.__struct_config__.tag)
    return Shape(
        kind, spec.nodes, graph.number_of_edges() if fabric else len(ports), 0 if fabric else len(graph), links,
        hops if fabric else hops + 2, *paths, bisection, injection,
    )  # fmt: skip


def _links(graph: nx.DiGraph) -> Iterator[Links]:
    """Yield links by the kinds of what they join, and their rates."""
    found: Counter[tuple[str, str, float]] = Counter()
    place = {vertex: number for number, vertex in enumerate(graph)}
    for start, end, link in graph.edges(data=True):
        rate = min(one.capacity for one in link["edge"].resources) / link["links"]
        lower, upper = (re.sub(r"\[\d+\]", "", vertex) for vertex in sorted((start, end), key=lambda one: place[one]))
        found[lower, upper, rate] += link["links"]
    yield from (Links(lower, upper, count // 2, rate) for (lower, upper, rate), count in found.items())


def joined(spec: ClusterSpec) -> tuple[nx.DiGraph, list[str]]:
    """Return the graph of switches, or of nodes without any, and which of them each port is at, node by node."""
    fabric = switched(spec)
    if fabric:
        rails = range(spec.ports_per_node)
        return switch_graph(spec, fabric), [
            leaf(spec, fabric, node, rail) for node in range(spec.nodes) for rail in rails
        ]
    graph = nx.DiGraph()
    if direct(spec) is None:
        graph.add_node(FABRIC)
        return graph, [FABRIC] * spec.nodes * spec.ports_per_node
    for start, ends in direct_edges(spec).items():
        graph.add_edges_from((start, end, {"edge": edge, "links": 1}) for end, edge in ends.items())
    return graph, list(direct_edges(spec))


def _apart(graph: nx.DiGraph, starts: list[str], ends: list[str]) -> tuple[int, tuple[int, int]]:
    """Return the links between two vertices at most, and the shortest ways between two at least and at most; of those
    that are joined.
    """
    longest, counts = 0, set[int]()
    for start in starts:
        hops, ways = hops_from(graph, start), {start: 1}
        for vertex in sorted(hops, key=lambda one: hops[one]):
            for end, link in graph[vertex].items():
                if hops[end] == hops[vertex] + 1:
                    ways[end] = ways.get(end, 0) + ways[vertex] * link["links"]
        others = [end for end in ends if end != start and end in hops]
        longest = max([longest, *(hops[end] for end in others)])
        counts |= {ways[end] for end in others}
    return longest, (min(counts, default=1), max(counts, default=1))


def _cut(graph: nx.DiGraph, ports: list[str], rates: list[float], half: set[int], nodes: int) -> tuple[float, float]:
    """Return what the ports of some nodes can send to those of all others, by the least cut, and what they put in."""
    rails, between = len(ports) // nodes, nx.DiGraph()
    for start, end, edge in graph.edges(data="edge"):
        between.add_edge(start, end, capacity=sum(round(one.capacity) for one in edge.resources))
    injected = 0
    for number, (port, rate) in enumerate(zip(ports, rates, strict=True)):
        sends = number // rails in half
        pair = ("half", port) if sends else (port, "others")
        before = between.edges[pair]["capacity"] if between.has_edge(*pair) else 0
        between.add_edge(*pair, capacity=before + round(rate))
        injected += round(rate) * sends
    return float(nx.maximum_flow_value(between, "half", "others")), float(injected)


def _halves(spec: ClusterSpec) -> Iterator[set[int]]:
    """Yield ways to halve the nodes: by number, in turn, and along each dimension of a grid."""
    nodes = range(spec.nodes)
    yield set(nodes[: spec.nodes // 2])
    yield set(nodes[::2][: spec.nodes // 2])
    dims = getattr(spec.fabric, "dims", ())
    for number, size in enumerate(dims):
        inside = 1
        for further in dims[number + 1 :]:
            inside *= further
        if size > 1:
            yield {node for node in nodes if node // inside % size < size // 2}
