"""The machine as a networkx graph: to be drawn, exported, and searched; and the ways through a fabric's switches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import networkx as nx

from sim.base.garbage import garbage_collection_off
from topology.fabric.direct import direct_edges
from topology.fabric.fabrics import FABRIC, Edge, edges, is_nic
from topology.fabric.switches import leaf, switched, trunks
from topology.kinds import Switched
from topology.specs import ClusterSpec


class Share(NamedTuple):
    """What of a flow takes one direction of a link."""

    edge: Edge
    share: float


@garbage_collection_off()
def wire(spec: ClusterSpec) -> nx.DiGraph:
    """Return the directed graph of all devices and hubs; each edge carries its ``Edge``."""
    wired = edges(spec, range(spec.nodes))
    for start, ends in direct_edges(spec).items():
        wired[start] |= ends
    graph = nx.DiGraph({start: {end: {"edge": edge} for end, edge in ends.items()} for start, ends in wired.items()})
    fabric = switched(spec)
    if fabric and FABRIC in graph:
        ports = list(graph[FABRIC])  # as the fabric meets them: node by node, rail by rail
        for number, port in enumerate(ports):
            switch = leaf(spec, fabric, *divmod(number, spec.ports_per_node))
            graph.add_edge(port, switch, edge=graph.edges[port, FABRIC]["edge"])
            graph.add_edge(switch, port, edge=graph.edges[FABRIC, port]["edge"])
        graph.remove_node(FABRIC)
        graph.update(switch_graph(spec, fabric))
    return graph


def switch_graph(spec: ClusterSpec, fabric: Switched) -> nx.DiGraph:
    """Return the directed graph of a fabric's switches; each edge carries its ``Edge`` and how many ``links`` it is."""
    assert spec.nic is not None
    graph = nx.DiGraph()
    rails = range(spec.ports_per_node)
    graph.add_nodes_from(leaf(spec, fabric, node, rail) for node in range(spec.nodes) for rail in rails)
    for trunk in trunks(spec, fabric):
        up, down = trunk.edges(spec.nic.payload)
        graph.add_edge(trunk.lower, trunk.upper, edge=up, links=trunk.links)
        graph.add_edge(trunk.upper, trunk.lower, edge=down, links=trunk.links)
    return graph


def hops_from(graph: nx.DiGraph, start: str) -> dict[str, int]:
    """Return the links on a shortest path from a switch to each other one, which are as many as back."""
    found: dict[str, int] = nx.single_source_shortest_path_length(graph, start)
    return found


def spread(graph: nx.DiGraph, source: str, hops: Mapping[str, int]) -> list[Share]:
    """Return which share of a flow takes which link: at each switch an equal part every link that leads nearer (ECMP).

    ``hops`` are those to the flow's last switch.
    """
    found, here = [], {source: 1.0}
    while here and hops[next(iter(here))]:
        further: dict[str, float] = {}
        for switch, arriving in here.items():
            nearer = {end: link for end, link in graph[switch].items() if hops[end] < hops[switch]}
            links = sum(link["links"] for link in nearer.values())
            for end, link in nearer.items():
                share = arriving * link["links"] / links
                found.append(Share(link["edge"], share))
                further[end] = further.get(end, 0.0) + share
        here = further
    return found


def shortest_paths(graph: nx.DiGraph, start: str, *, inside: bool) -> dict[str, list[str]]:
    """Return a shortest path from a device to each device and hub; ``inside`` its node, however short it is outside or
    through a NIC that both share.
    """
    hidden = [vertex for vertex in graph if vertex == FABRIC or is_nic(vertex)] if inside else []
    found: dict[str, list[str]] = nx.single_source_shortest_path(nx.restricted_view(graph, hidden, []), start)
    return found
