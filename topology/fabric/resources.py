"""All resources of a cluster in their fixed order: those of devices, of links as the graph lists its edges, of links
between switches, of hosts.

Nodes are equal but for the numbers of their parts, so only the first one is wired to tell the resources of all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, repeat

from topology.fabric.direct import DirectLinks
from topology.fabric.fabrics import FABRIC, Resource, edges, socket_of, switch_of
from topology.fabric.switches import switched, trunks
from topology.specs import ClusterSpec

LINKS = ("nvlink", "pcie", "loopback", "nic")
"""Groups of links that a GPU may have for itself."""
_NUMBERED = re.compile(r"(\w+)\[(\d+)\]")
"""What a part of a name is, and its number in the whole cluster."""


class Resources:
    """Every resource once, in a fixed order: its place is its index. Links between nodes without switches are made when
    they are asked for.
    """

    def __init__(
        self,
        before: Iterable[Resource],
        links: DirectLinks,
        after: Iterable[Resource],
        numbers: dict[str, int] | None = None,
    ) -> None:
        """``numbers`` are those of all by their names, where these are known."""
        self._before, self._links, self._after = list(before), links, list(after)
        self._rest = len(self._before) + len(links)
        if numbers is None:
            numbers = {one.name: index for index, one in enumerate(self._before)}
            numbers |= {one.name: index for index, one in enumerate(self._after, self._rest)}
        self._numbers = numbers

    def __len__(self) -> int:
        return self._rest + len(self._after)

    def __getitem__(self, index: int) -> Resource:
        if index < len(self._before):
            return self._before[index]
        return self._links[index - len(self._before)] if index < self._rest else self._after[index - self._rest]

    def __iter__(self) -> Iterator[Resource]:
        return chain(self._before, self._links, self._after)

    def at_rates(self, capacities: Mapping[int, float]) -> Resources:
        """Return the same with other capacities of some, by their indices, none of which is a link between nodes
        without switches.
        """
        before, after = self._before[:], self._after[:]
        for index, capacity in capacities.items():
            some, at = (before, index) if index < len(before) else (after, index - self._rest)
            some[at] = some[at]._replace(capacity=capacity)
        return Resources(before, self._links, after, self._numbers)

    def capacities(self) -> list[float]:
        """Return the capacity of each."""
        before, after = ([one.capacity for one in some] for some in (self._before, self._after))
        return before + self._links.capacities() + after

    def number(self, name: str) -> int:
        """Return the index of one by its name."""
        found = self._numbers.get(name)
        return self.of_link(*(number for _, number in _numbered(name)[1])) if found is None else found

    def of_link(self, node: int, other: int) -> int:
        """Return the index of the link from one node to another one that is next to it."""
        return len(self._before) + self._links.number(node, other)


def resources(spec: ClusterSpec) -> Resources:
    """Return every resource of a cluster."""
    links, to_nics, before = _of_links(spec)
    between = list(_between_switches(spec))
    listed = _in_all_nodes(spec, links)
    listed[before:before] = _in_all_nodes(spec, to_nics)
    shares = {gpu: special.link for gpu, special in spec.per_gpu.items() if special.link != 1.0}
    first = _named(spec, (*_in_all_nodes(spec, _of_devices(spec)), *listed), shares)
    last = _named(spec, (*between, *_in_all_nodes(spec, _of_hosts(spec))), shares)
    return Resources(first.values(), DirectLinks(spec), (one for name, one in last.items() if name not in first))


def of_first_node(spec: ClusterSpec) -> list[Resource]:
    """Return the resources of the first node, some of which may be there twice, as fast as they are of equal GPUs."""
    links, to_nics, _ = _of_links(spec)
    return [*_of_devices(spec), *links, *to_nics, *_of_hosts(spec)]


def _of_devices(spec: ClusterSpec) -> list[Resource]:
    return [one for gpu in range(spec.gpus_per_node) for one in device_resources(spec, gpu)]


def _of_hosts(spec: ClusterSpec) -> list[Resource]:
    sockets = range(spec.socket.per_node) if spec.socket else ()
    return [one for number in sockets for one in (*host_dram(spec, number), *host_cxl(spec, number))]


def _named(spec: ClusterSpec, found: Iterable[Resource], shares: dict[int, float]) -> dict[str, Resource]:
    """Return resources by name, each once, and as slow as the GPU whose own they are."""
    named = {one.name: one for one in found}
    return {name: _slowed(spec, one, shares) for name, one in named.items()} if shares else named


def _between_switches(spec: ClusterSpec) -> Iterator[Resource]:
    fabric = switched(spec)
    if fabric and spec.nic:
        for trunk in trunks(spec, fabric):
            for edge in trunk.edges(spec.nic.payload):
                yield from edge.resources


def _slowed(spec: ClusterSpec, resource: Resource, shares: dict[int, float]) -> Resource:
    """Return a resource as slow as the slowest GPU whose own link it is: NICs are that it shares with nobody."""
    of = [int(number) for part, number in _numbered(resource.name)[1] if part in {"gpu", "nic"}]
    if resource.group not in LINKS or (resource.group == "nic" and spec.nics_per_node < spec.gpus_per_node):
        return resource
    share = min((shares.get(number, 1.0) for number in of), default=1.0)
    return resource._replace(capacity=resource.capacity * share)


def device_resources(spec: ClusterSpec, gpu: int) -> tuple[Resource, Resource]:
    """Return what a device computes on, its own SMs or the cores of its host, and the memory that it works on."""
    owner, cores, memory = f"gpu[{gpu}]", float(spec.gpu.sms), float(spec.hbm.bytes_per_s)
    if spec.gpu.kind != "cpu":
        return Resource(f"{owner}.sms", "compute", cores), Resource(f"{owner}.hbm", "hbm", memory)
    assert spec.host is not None
    host = "host" if spec.host.shared else f"node[{gpu // spec.gpus_per_node}]"
    return Resource(f"{host}.cores", "compute", float(spec.host.cores)), Resource(f"{host}.dram", "hbm", memory)


def host_dram(spec: ClusterSpec, socket: int) -> tuple[Resource, ...]:
    """Return the memory of a socket, and where writes get less of it than reads what limits these."""
    assert spec.socket is not None
    dram, name = spec.socket.dram, f"socket[{socket}].dram"
    writes = (Resource(f"{name}.writes", "dram", float(dram.write_bytes_per_s)),) if dram.write_bytes_per_s else ()
    return Resource(name, "dram", float(dram.bytes_per_s)), *writes


def host_cxl(spec: ClusterSpec, socket: int) -> tuple[Resource, ...]:
    """Return the second tier of a socket's memory, if it has one."""
    cxl = spec.socket and spec.socket.cxl
    return (Resource(f"socket[{socket}].cxl", "cxl", float(cxl.bytes_per_s)),) if cxl else ()


def equals(spec: ClusterSpec, name: str) -> Iterator[str]:
    """Return what a resource of the first node is called in each node: numbers go on from node to node."""
    gpus, sockets = spec.gpus_per_node, socket_of(spec, spec.gpus_per_node)
    in_a_node = {"node": 1, "gpu": gpus, "peer": gpus, "nic": spec.nics_per_node, "socket": sockets, "to": sockets}
    if spec.pcie:
        in_a_node["switch"] = switch_of(spec, gpus)
    pattern, first = _numbered(name)
    if not first:  # what all nodes share
        return repeat(name, spec.nodes)
    numbers = [range(at, at + spec.nodes * in_a_node[part], in_a_node[part]) for part, at in first]
    return map(pattern.__mod__, zip(*numbers, strict=True))


@lru_cache(maxsize=2**12)
def _numbered(name: str) -> tuple[str, list[tuple[str, int]]]:
    """Return a name without its numbers, and which parts have which."""
    return _NUMBERED.sub(r"\1[%d]", name), [(part, int(number)) for part, number in _NUMBERED.findall(name)]


def _of_links(spec: ClusterSpec) -> tuple[list[Resource], list[Resource], int]:
    """Return the resources of the edges of one node; those from the fabric to its NICs; before which of the first these
    come, with those to the NICs of all nodes, since the graph meets the fabric at the first NIC.
    """
    found: list[Resource] = []
    to_nics: list[Resource] = []
    before = 0
    for start, ends in edges(spec, range(1)).items():
        passed = [one for edge in ends.values() for one in edge.resources]
        if start == FABRIC:
            before, to_nics = len(found), passed
        else:
            found += passed
    return found, to_nics, before


def _in_all_nodes(spec: ClusterSpec, found: Iterable[Resource]) -> list[Resource]:
    """Return resources of the first node and their equals in all others, node by node."""
    if spec.nodes == 1:
        return list(found)
    columns = [map(Resource, equals(spec, one.name), repeat(one.group), repeat(one.capacity)) for one in found]
    return list(chain.from_iterable(zip(*columns, strict=True)))
