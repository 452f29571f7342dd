"""How devices are wired: ``links_up`` states each kind of link once; the graph and the shortest ways follow from it.

    gpu ── nvswitch ── gpu                          inside a node, non-blocking: only the ports of the GPUs limit
    gpu ── pair ── gpu                              the same without a switch: a link for any two
    gpu ── pcie ── switch ── uplink ── socket       PCIe: GPUs behind one switch share its way to the CPU
    socket ── socket                                between the CPUs of a node, each with its host memory
    gpu ── pcie ── nic ── fabric                    the nearest NIC, or stripe of NICs, and what joins the nodes: one
                                                    switch that does not block, or many, see ``switches``
    gpu ── loopback ── gpu                          ranks that are processes of one host
    gpu ── gpu                                      nodes without switches, see ``direct``

Every direction of a link is a resource of its own. A switch itself is not simulated: it limits nothing.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import NamedTuple

import msgspec

from topology.kinds import DIRECT
from topology.specs import ClusterSpec, LinkSpec

FABRIC = "fabric"
"""What joins the nodes."""


class Resource(NamedTuple):
    """Something that activities share: SMs, cores, memory bandwidth, one direction of a link."""

    name: str
    group: str
    """Class of the resource: compute, hbm, nvlink, pcie, socket, dram, cxl, nic, fabric, loopback."""
    capacity: float
    """SMs or cores; bytes per second, of data, for memory and links."""


class Edge(NamedTuple):
    """One direction of a link; no resources where nothing limits it."""

    resources: tuple[Resource, ...] = ()
    """The direction itself, and what both directions get together where that is less."""
    latency_s: float = 0.0


class Link(NamedTuple):
    """A link from a device or hub up to a hub, or between two sockets."""

    lower: str
    upper: str
    name: str = ""
    group: str = ""
    spec: LinkSpec | None = None
    """None: it neither limits nor delays."""

    def edges(self) -> tuple[Edge, Edge]:
        """Return both directions, up and down; a path device-hub-device has the latency once, half at each end."""
        if self.spec is None:
            return Edge(), Edge()
        limit, half_s = self.spec.both_ways_bytes_per_s, self.spec.latency_s / 2
        both = (Resource(f"{self.name}.both", self.group, float(limit)),) if limit else ()
        rate = float(self.spec.bytes_per_s * self.spec.payload)
        up, down = (Resource(f"{self.name}.{direction}", self.group, rate) for direction in ("out", "in"))
        return Edge((up, *both), half_s), Edge((down, *both), half_s)


class Climb(NamedTuple):
    """The way between a GPU and a hub, by the names that it has in the first node."""

    hubs: list[str]
    """Upwards."""
    up: list[Edge]
    down: list[Edge]


class Way(NamedTuple):
    """The edges from one GPU to another, by the names that they have in the first node."""

    up: list[Edge]
    """In the node of the source."""
    down: list[Edge]
    """In the node of the target."""
    through_host: bool


def links_up(spec: ClusterSpec, gpu: int) -> list[list[Link]]:
    """Return the links from a GPU up to each hub that joins it to others: NVSwitch, socket, loopback, fabric."""
    node, device, slot = gpu // spec.gpus_per_node, f"gpu[{gpu}]", f"pcie[{gpu}]"
    to_slot = Link(device, slot, f"{device}.pcie", "pcie", spec.pcie)
    found = [[link] for link in _nvlinks(spec, gpu)]
    if spec.pcie:
        switch, socket = f"switch[{switch_of(spec, gpu)}]", f"socket[{socket_of(spec, gpu)}]"
        uplink = Link(switch, socket, f"{switch}.uplink", "pcie", spec.pcie.uplink)
        found.append([to_slot, Link(slot, switch), uplink])
    if spec.loopback:
        found.append([Link(device, f"loopback[{node}]", f"{device}.loopback", "loopback", spec.loopback)])
    if spec.nic and spec.nodes > 1 and not isinstance(spec.fabric, DIRECT):
        nic = f"nic[{nic_of(spec, gpu)}]"
        found.append([to_slot, Link(slot, nic), Link(nic, FABRIC, f"{nic}.nic", "nic", _stripe(spec))])
    return found


def nvlink_peers(spec: ClusterSpec, gpu: int) -> range:
    """Return the GPUs that NVLink joins to one, which is among them."""
    first = gpu - gpu % spec.gpus_per_node % spec.gpus_per_nvlink
    return range(first, first + spec.gpus_per_nvlink)


def _nvlinks(spec: ClusterSpec, gpu: int) -> list[Link]:
    """Return a GPU's port to a switch, or its link to each other one that is joined to it."""
    if spec.nvlink is None:
        return []
    device, joined = f"gpu[{gpu}]", nvlink_peers(spec, gpu)
    if spec.bridged_gpus is None:
        return [Link(device, f"nvswitch[{gpu // spec.gpus_per_node}]", f"{device}.nvlink", "nvlink", spec.nvlink)]
    return [
        Link(device, f"pair[{min(gpu, peer) * len(joined) + max(gpu, peer) - joined.start}]", f"{device}.peer[{peer}]",
             "nvlink", spec.nvlink)
        for peer in joined if peer != gpu
    ]  # fmt: skip


def edges(spec: ClusterSpec, nodes: range) -> dict[str, dict[str, Edge]]:
    """Return the edges from every device and hub of some nodes, by where they lead."""
    found: dict[str, dict[str, Edge]] = {}
    for node in nodes:
        gpus = range(node * spec.gpus_per_node, (node + 1) * spec.gpus_per_node)
        found |= {f"gpu[{gpu}]": {} for gpu in gpus}
        links = [link for gpu in gpus for upwards in links_up(spec, gpu) for link in upwards]
        uplinks = [link for link in reversed(links) if is_socket(link.upper)]
        own = [link for link in links if not is_socket(link.upper)]
        for link in (*own, *uplinks, *_between_sockets(spec, gpus)):
            up = found.setdefault(link.lower, {})
            if link.upper not in up:  # two ways up may share a link, as the GPUs behind a switch do its uplink
                up[link.upper], found.setdefault(link.upper, {})[link.lower] = link.edges()
    return found


def climbs(spec: ClusterSpec, place: int) -> list[Climb]:
    """Return the ways up and down between a GPU of the first node and each hub that joins it to others."""
    found = []
    for upwards in links_up(spec, place):
        edges = [link.edges() for link in upwards]
        up, down = [up for up, _ in edges], [down for _, down in reversed(edges)]
        found.append(Climb([link.upper for link in upwards], up, down))
    return found


def structural_way(spec: ClusterSpec, source: list[Climb], target: list[Climb], *, near: bool) -> Way | None:
    """Return the shortest way by the structure of the fabrics, if it tells one: up to where both GPUs meet, then down.

    Their climbs are those of their places in a node, the same node if ``near``. That is not left; others are reached
    over both NICs. A kind of link with fewer hubs makes the shorter way.
    """
    pairs = [
        (one, other) for one, other in product(source, target)
        if len(one.hubs) == len(other.hubs) and near == (one.hubs[-1] != FABRIC) == (other.hubs[-1] != FABRIC)
    ]  # fmt: skip
    if not near:
        return next((Way(one.up, other.down, through_host=False) for one, other in pairs), None)
    pairs.sort(key=lambda pair: len(pair[0].hubs))
    return next(filter(None, (_meeting(spec, *pair) for pair in pairs)), None)


def is_socket(vertex: str) -> bool:
    """Return whether a device or hub is a socket."""
    return vertex.startswith("socket[")


def is_nic(vertex: str) -> bool:
    """Return whether a device or hub is a NIC, or a stripe of several."""
    return vertex.startswith("nic[")


def socket_of(spec: ClusterSpec, gpu: int) -> int:
    """Return the number of a GPU's socket in the whole cluster: that of its switch, which is its first GPU's."""
    sockets = spec.socket.per_node if spec.socket else 1
    node, local = divmod(gpu, spec.gpus_per_node)
    first = local - local % (spec.pcie.gpus_per_switch if spec.pcie else 1)
    return node * sockets + first * sockets // spec.gpus_per_node


def switch_of(spec: ClusterSpec, gpu: int) -> int:
    """Return the number of a GPU's PCIe switch in the whole cluster."""
    assert spec.pcie is not None
    node, local = divmod(gpu, spec.gpus_per_node)
    return node * -(-spec.gpus_per_node // spec.pcie.gpus_per_switch) + local // spec.pcie.gpus_per_switch


def nic_of(spec: ClusterSpec, gpu: int) -> int:
    """Return the number, in the whole cluster, of the first of the NICs that a GPU's flows pass.

    Neighbours share the nearest one. NICs of one stripe carry equal parts of the same flows, so they are one resource,
    as ports that NCCL merges into one (NCCL_IB_MERGE_NICS); a GPU with several of its own spreads the channels of every
    peer over all of them (ncclTopoGetLocalNet and ncclTopoGetNchannels of NVIDIA/nccl, from memory).
    """
    node, local = divmod(gpu, spec.gpus_per_node)
    nearest = local * spec.nics_per_node // spec.gpus_per_node
    return node * spec.nics_per_node + nearest - nearest % spec.nics_per_flow


def rail_of(spec: ClusterSpec, gpu: int) -> int:
    """Return which of the ports of its node a GPU's flows pass: a NIC, or a stripe of several."""
    return nic_of(spec, gpu) % spec.nics_per_node // spec.nics_per_flow


def _stripe(spec: ClusterSpec) -> LinkSpec | None:
    """Return what the NICs of one flow are together."""
    nic, count = spec.nic, spec.nics_per_flow
    if nic is None or count == 1:
        return nic
    both = nic.both_ways_bytes_per_s
    return msgspec.structs.replace(
        nic, bytes_per_s=nic.bytes_per_s * count, both_ways_bytes_per_s=both and both * count
    )


def _between_sockets(spec: ClusterSpec, gpus: range) -> list[Link]:
    """Return the links between the sockets of a node's GPUs."""
    if spec.socket is None or spec.socket.link is None:
        return []
    sockets = sorted({socket_of(spec, gpu) for gpu in gpus})
    return [
        Link(f"socket[{first}]", f"socket[{second}]", f"socket[{first}].to[{second}]", "socket", spec.socket.link)
        for first, second in combinations(sockets, 2)
    ]


def _meeting(spec: ClusterSpec, one: Climb, other: Climb) -> Way | None:
    """Return the way up one climb to the first hub that is on both, and down the other; sockets may be linked."""
    for height, (here, there) in enumerate(zip(one.hubs, other.hubs, strict=True), 1):
        if here == there:
            return Way(one.up[:height], other.down[-height:], is_socket(here))
    tops = one.hubs[-1], other.hubs[-1]
    for link in _between_sockets(spec, range(spec.gpus_per_node)):
        if set(tops) == {link.lower, link.upper}:
            return Way([*one.up, link.edges()[tops[0] == link.upper]], other.down, through_host=True)
    return None
