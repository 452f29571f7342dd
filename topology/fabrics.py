"""How devices are wired: each function adds one kind of link to the graph, every direction a resource of its own.

    gpu ── nvswitch ── gpu              inside a node, non-blocking: only the ports of the GPUs limit
    gpu ── pcie[i] ── root[n] ── …      the PCIe switch of a GPU, and the node's root complex
    pcie[i] ── nic[i] ── fabric         one NIC per GPU on a non-blocking fabric between nodes
    gpu ── loopback[n] ── gpu           ranks that are processes of one host

A switch is not simulated: it limits nothing, and a blocking one would be one more edge.
"""

from __future__ import annotations

from typing import NamedTuple

import networkx as nx

from topology.specs import ClusterSpec, LinkSpec


class Edge(NamedTuple):
    """One direction of a link; ``resource`` is empty where nothing limits it."""

    resource: str
    group: str
    bytes_per_s: float
    """Of data."""
    latency_s: float


def wire(spec: ClusterSpec) -> nx.DiGraph:
    """Return the directed graph of all devices and switches; each edge carries its ``Edge``."""
    graph = nx.DiGraph()
    for node in range(spec.nodes):
        gpus = range(node * spec.gpus_per_node, (node + 1) * spec.gpus_per_node)
        graph.add_nodes_from(f"gpu[{gpu}]" for gpu in gpus)
        for gpu in gpus:
            if spec.nvlink:
                _link(graph, f"gpu[{gpu}]", f"nvswitch[{node}]", f"gpu[{gpu}]", "nvlink", spec.nvlink)
            if spec.pcie:
                _link(graph, f"gpu[{gpu}]", f"pcie[{gpu}]", f"gpu[{gpu}]", "pcie", spec.pcie)
                _free(graph, f"pcie[{gpu}]", f"root[{node}]")
            if spec.loopback:
                _link(graph, f"gpu[{gpu}]", f"loopback[{node}]", f"gpu[{gpu}]", "loopback", spec.loopback)
            if spec.nic and spec.nodes > 1:
                if not spec.pcie:
                    _free(graph, f"gpu[{gpu}]", f"pcie[{gpu}]")
                _free(graph, f"pcie[{gpu}]", f"nic[{gpu}]")
                _link(graph, f"nic[{gpu}]", "fabric", f"nic[{gpu}]", "nic", spec.nic)
    return graph


def _link(graph: nx.DiGraph, device: str, hub: str, owner: str, group: str, link: LinkSpec) -> None:
    """Add a device's port to a hub; a path device-hub-device has the link's latency once, half at each end."""
    for a, b, direction in ((device, hub, "out"), (hub, device, "in")):
        edge = Edge(f"{owner}.{group}.{direction}", group, link.bytes_per_s * link.payload, link.latency_s / 2)
        graph.add_edge(a, b, edge=edge)


def _free(graph: nx.DiGraph, a: str, b: str) -> None:
    """Add a connection that neither limits nor delays."""
    for start, end in ((a, b), (b, a)):
        graph.add_edge(start, end, edge=Edge("", "", 0.0, 0.0))
