"""The machine as a networkx graph: to be drawn, exported, and searched."""

from __future__ import annotations

import networkx as nx

from topology.direct import direct_edges
from topology.fabrics import FABRIC, edges
from topology.specs import ClusterSpec


def wire(spec: ClusterSpec) -> nx.DiGraph:
    """Return the directed graph of all devices and hubs; each edge carries its ``Edge``."""
    wired = edges(spec, range(spec.nodes))
    for start, ends in direct_edges(spec).items():
        wired[start] |= ends
    return nx.DiGraph({start: {end: {"edge": edge} for end, edge in ends.items()} for start, ends in wired.items()})


def shortest_paths(graph: nx.DiGraph, start: str, *, inside: bool) -> dict[str, list[str]]:
    """Return a shortest path from a device to each device and hub; ``inside`` its node, however short it is outside or
    through a NIC that both share.
    """
    hidden = [FABRIC, *graph[FABRIC]] if inside and FABRIC in graph else []
    found: dict[str, list[str]] = nx.single_source_shortest_path(nx.restricted_view(graph, hidden, []), start)
    return found
