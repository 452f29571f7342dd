"""How devices are wired: each function adds one kind of link to the graph, every direction a resource of its own.

    gpu ── nvswitch ── gpu                          inside a node, non-blocking: only the ports of the GPUs limit
    gpu ── pcie ── switch ── uplink ── socket       PCIe: GPUs behind one switch share its way to the CPU
    socket ── socket                                between the CPUs of a node, each with its host memory
    gpu ── pcie ── nic ── fabric                    one NIC per GPU on a non-blocking fabric between nodes
    gpu ── loopback ── gpu                          ranks that are processes of one host

A switch itself is not simulated: it limits nothing, and a blocking one would be one more edge.
"""

from __future__ import annotations

from typing import NamedTuple

import networkx as nx

from topology.specs import ClusterSpec, LinkSpec

FABRIC = "fabric"
"""What joins the nodes."""


class Resource(NamedTuple):
    """Something that activities share: SMs, cores, memory bandwidth, one direction of a link."""

    name: str
    group: str
    """Class of the resource: compute, hbm, nvlink, pcie, socket, dram, nic, loopback."""
    capacity: float
    """SMs or cores; bytes per second, of data, for memory and links."""


class Edge(NamedTuple):
    """One direction of a link; no resources where nothing limits it."""

    resources: tuple[Resource, ...] = ()
    """The direction itself, and what both directions get together where that is less."""
    latency_s: float = 0.0


def wire(spec: ClusterSpec) -> nx.DiGraph:
    """Return the directed graph of all devices and switches; each edge carries its ``Edge``."""
    graph = nx.DiGraph()
    for node in range(spec.nodes):
        gpus = range(node * spec.gpus_per_node, (node + 1) * spec.gpus_per_node)
        graph.add_nodes_from(f"gpu[{gpu}]" for gpu in gpus)
        for gpu in gpus:
            if spec.nvlink:
                _link(graph, f"gpu[{gpu}]", f"nvswitch[{node}]", f"gpu[{gpu}].nvlink", "nvlink", spec.nvlink)
            if spec.pcie:
                _link(graph, f"gpu[{gpu}]", f"pcie[{gpu}]", f"gpu[{gpu}].pcie", "pcie", spec.pcie)
                _free(graph, f"pcie[{gpu}]", f"switch[{_switch(spec, gpu)}]")
            if spec.loopback:
                _link(graph, f"gpu[{gpu}]", f"loopback[{node}]", f"gpu[{gpu}].loopback", "loopback", spec.loopback)
            if spec.nic and spec.nodes > 1:
                if not spec.pcie:
                    _free(graph, f"gpu[{gpu}]", f"pcie[{gpu}]")
                _free(graph, f"pcie[{gpu}]", f"nic[{gpu}]")
                _link(graph, f"nic[{gpu}]", FABRIC, f"nic[{gpu}].nic", "nic", spec.nic)
        if spec.pcie:
            _uplinks(graph, spec, gpus)
    return graph


def socket_of(spec: ClusterSpec, gpu: int) -> int:
    """Return the number of a GPU's socket in the whole cluster: that of its switch, which is its first GPU's."""
    sockets = spec.socket.per_node if spec.socket else 1
    node, local = divmod(gpu, spec.gpus_per_node)
    first = local - local % (spec.pcie.gpus_per_switch if spec.pcie else 1)
    return node * sockets + first * sockets // spec.gpus_per_node


def _switch(spec: ClusterSpec, gpu: int) -> int:
    """Return the number of a GPU's PCIe switch in the whole cluster."""
    assert spec.pcie is not None
    node, local = divmod(gpu, spec.gpus_per_node)
    return node * -(-spec.gpus_per_node // spec.pcie.gpus_per_switch) + local // spec.pcie.gpus_per_switch


def _uplinks(graph: nx.DiGraph, spec: ClusterSpec, gpus: range) -> None:
    """Join the switches of a node to their sockets, and those to each other."""
    assert spec.pcie is not None
    for switch, gpu in {_switch(spec, gpu): gpu for gpu in reversed(gpus)}.items():
        hub = f"socket[{socket_of(spec, gpu)}]"
        if spec.pcie.uplink:
            _link(graph, f"switch[{switch}]", hub, f"switch[{switch}].uplink", "pcie", spec.pcie.uplink)
        else:
            _free(graph, f"switch[{switch}]", hub)
    sockets = sorted({socket_of(spec, gpu) for gpu in gpus})
    for first in sockets:
        for second in sockets:
            if first < second and spec.socket and spec.socket.link:
                name = f"socket[{first}].to[{second}]"
                _link(graph, f"socket[{first}]", f"socket[{second}]", name, "socket", spec.socket.link)


def _link(graph: nx.DiGraph, device: str, hub: str, name: str, group: str, link: LinkSpec) -> None:
    """Add a device's port to a hub; a path device-hub-device has the link's latency once, half at each end."""
    limit = link.both_ways_bytes_per_s
    both = (Resource(f"{name}.both", group, limit),) if limit else ()
    for a, b, direction in ((device, hub, "out"), (hub, device, "in")):
        one = Resource(f"{name}.{direction}", group, link.bytes_per_s * link.payload)
        graph.add_edge(a, b, edge=Edge((one, *both), link.latency_s / 2))


def _free(graph: nx.DiGraph, a: str, b: str) -> None:
    """Add a connection that neither limits nor delays."""
    for start, end in ((a, b), (b, a)):
        graph.add_edge(start, end, edge=Edge())
