"""A cluster, built and sealed: devices, the resources that they share, and one fixed route for every pair."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from functools import cache, cached_property, partial
from itertools import pairwise, product
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from sim.base.errors import InputError
from sim.base.presets import load_toml
from topology.fabric.direct import direct, direct_hops, direct_path
from topology.fabric.fabrics import Edge, climbs, is_socket, rail_of, socket_of, structural_way
from topology.fabric.resources import device_resources, equals, host_cxl, host_dram, of_first_node, resources
from topology.fabric.switches import forwards, leaf, switched
from topology.host import host_facts, with_facts
from topology.named import HARDWARE, load_named
from topology.specs import ClusterSpec

if TYPE_CHECKING:
    import networkx as nx


class Device(NamedTuple):
    """One GPU (or one process of a CPU host): where it computes and which memory it works on."""

    number: int
    node: int
    compute: int
    """Index of the resource that its kernels occupy: its own SMs, or the cores of its host."""
    compute_units: float
    """How much of that resource a kernel takes without interference."""
    hbm: int
    speed: float


class Route(NamedTuple):
    """The way from one device to another, or between a device and its host's memory."""

    resources: tuple[int, ...]
    """One of them twice where data passes it twice."""
    bytes_per_s: float
    """Rate of the slowest link on the way."""
    latency_s: float
    shares: tuple[tuple[int, float], ...] = ()
    """Links between switches, and which share of the data takes each: flows take all of the shortest ways."""

    def load(self, nbytes: float) -> dict[int, float]:
        """Return the bytes that a message puts on each resource."""
        passed = {index: float(nbytes) * self.resources.count(index) for index in self.resources}
        return passed | {index: nbytes * share for index, share in self.shares}


class _Way(NamedTuple):
    """A route between two places in a node, for the nodes of all such pairs."""

    source: tuple[tuple[int, ...], ...]
    """Per resource in the source's node its index for each node."""
    target: tuple[tuple[int, ...], ...]
    """The same in the target's node."""
    bytes_per_s: float
    latency_s: float

    def between(self, source: int, target: int) -> Route:
        """Return the route between two nodes."""
        passed = [*(index[source] for index in self.source), *(index[target] for index in self.target)]
        return Route(tuple(passed), self.bytes_per_s, self.latency_s)


class Cluster:
    """The machine that a schedule is simulated on. Built once from a spec, never changed.

    Nodes are equal but for the numbers of their parts, so what is told of the first one holds for all. With a
    ``placement`` number i is the device ``placement[i]``, by default i.
    """

    def __init__(self, spec: ClusterSpec, placement: Sequence[int] | None = None) -> None:
        self.spec = spec
        self.resources = resources(spec)
        self._equals = cache(self._find_equals)
        self._own = cache(self._find_own)
        self._find_anew()
        self._place(placement)

    def _find_anew(self) -> None:
        """Forget the ways between devices."""
        self._climbs = cache(partial(climbs, self.spec))
        self._way = cache(self._find_way)
        self._host_way = cache(self._find_host_way)
        self._route = cache(self._find_route)
        self._paths = cache(self._find_paths)
        self._spread = cache(self._find_spread)
        self._hops_from = cache(self._find_hops_from)

    def _place(self, placement: Sequence[int] | None) -> None:
        """Let number i be the device ``placement[i]``; raises InputError where that is none of the machine's, or is
        there twice.
        """
        self._given = placement
        total = self.spec.nodes * self.spec.gpus_per_node
        self._placement = range(total) if placement is None else placement
        if len(set(self._placement)) < len(self._placement) or not set(self._placement) <= set(range(total)):
            raise InputError(f"placement {placement}: expected different devices among 0 to {total - 1}")
        self.devices = [self._device(index) for index in self._placement]

    def placed(self, placement: Sequence[int]) -> Cluster:
        """Return the same machine with another placement; both share resources and routes."""
        other = self._copied()
        other._place(placement)  # noqa: SLF001 - a copy of its own, as below
        return other

    def _copied(self) -> Cluster:
        """Return a copy without what was made of the machine when it was asked for."""
        other = copy.copy(self)
        for name in ("even", "graph"):
            vars(other).pop(name, None)
        return other

    def like(self, spec: ClusterSpec) -> Cluster:
        """Return another cluster with the same placement, which shares what is the same in both: resources and routes
        where only what GPUs compute or launch differs, the numbers of resources where rates and latencies differ.
        """
        here = self.spec.gpu
        gpu = structs.replace(spec.gpu, peak_flops_per_s=here.peak_flops_per_s, launch_s=here.launch_s)
        if structs.replace(spec, gpu=gpu) == self.spec:
            other = copy.copy(self)
            other.spec = spec
            return other
        changed = self._other_rates(spec)
        if changed is None:
            return Cluster(spec, self._given)
        other = self._copied()
        other.spec, other.resources = spec, self.resources.at_rates(changed)
        other._find_anew()  # noqa: SLF001
        return other

    def _other_rates(self, spec: ClusterSpec) -> dict[int, float] | None:
        """Return by number the capacities of the resources that have another one by a spec. None where its devices or
        resources are others, or where some resources differ from their equals in other nodes.
        """

        def devices(one: ClusterSpec) -> tuple[object, ...]:
            return one.nodes, one.gpus_per_node, one.gpu.kind, one.gpu.sms, one.per_gpu

        if devices(spec) != devices(self.spec) or spec.per_gpu or spec.fabric or self.spec.fabric:
            return None
        here, there = of_first_node(self.spec), of_first_node(spec)
        if [one[:2] for one in here] != [one[:2] for one in there]:
            return None
        changed: dict[int, float] = {}
        for one, other in zip(here, there, strict=True):
            if one.capacity != other.capacity:
                changed |= dict.fromkeys(self._equals(one.name), other.capacity)
        return changed

    @cached_property
    def uneven(self) -> bool:
        """Whether some GPU's own links have another rate than the spec says of all."""
        return self.spec.uneven

    @cached_property
    def even(self) -> Cluster:
        """The same cluster, all links at the rates of the spec."""
        if not self.uneven:
            return self
        per_gpu = {number: structs.replace(one, link=1.0) for number, one in self.spec.per_gpu.items()}
        return Cluster(structs.replace(self.spec, per_gpu=per_gpu), self._given)

    @cached_property
    def graph(self) -> nx.DiGraph:
        """All devices, hubs and links, to be drawn, exported or searched; each edge carries its ``Edge``."""
        from topology.fabric.graph import wire

        return wire(self.spec)

    def route(self, source: int, target: int) -> Route:
        """Return the route between two different devices, the same on every call and in every run."""
        return self._route(self._placement[source], self._placement[target])

    def all_to_all(self, devices: Sequence[int]) -> tuple[dict[int, int], float] | None:
        """Return how many of the routes from each of some devices to each other one pass each resource, and the latency
        of the longest: by pairs of places in a node, since nodes are equal. None where a fabric tells routes, or where
        the structure of a node tells none.
        """
        if self.spec.fabric is not None:
            return None
        nodes: dict[int, set[int]] = {}
        for node, place in (divmod(self._placement[device], self.spec.gpus_per_node) for device in devices):
            nodes.setdefault(place, set()).add(node)
        passed: dict[int, int] = {}
        latency_s = 0.0
        for (here, own), (there, others) in product(nodes.items(), repeat=2):
            far = (
                {node: len(others) - (node in others) for node in own},
                {node: len(own) - (node in own) for node in others},
            )
            inside = dict.fromkeys(own & others if here != there else (), 1)
            for near, (out, into) in ((False, far), (True, (inside, inside))):
                if not any(out.values()):
                    continue
                way = self._way(here, there, near)
                if way is None:
                    return None
                latency_s = max(latency_s, way.latency_s)
                for indices, times in ((way.source, out), (way.target, into)):
                    for index, (node, count) in product(indices, times.items()):
                        passed[index[node]] = passed.get(index[node], 0) + count
        return {index: count for index, count in passed.items() if count}, latency_s

    def typical_routes(self) -> list[Route]:
        """Return the routes to a neighbour, to the next node and to the host's memory, as far as there are such."""
        per_node = self.spec.gpus_per_node
        others = [number for number in (1, per_node) if number < self.spec.nodes * per_node]
        to_host = [self._host_route(0, 0, True)] if self.spec.socket else []
        return [self._typical(other) for other in others] + to_host

    def _typical(self, other: int) -> Route:
        """Return the route from the first GPU to another one. Over NICs it leaves out the switches between, which may
        be narrower: measured times are filed by NICs.
        """
        way = self._way(0, 0, False) if switched(self.spec) and other >= self.spec.gpus_per_node else None
        return way.between(0, 1) if way else self._route(0, other)

    def dram_load(self, device: int, read: float, written: float) -> dict[int, float]:
        """Return the bytes that reading and writing put on the memory of a device's socket, by resource; raises
        InputError if the cluster has no such memory.
        """
        self._require_socket()
        node, place = divmod(self._placement[device], self.spec.gpus_per_node)
        load: dict[int, float] = {}
        for tiers, nbytes in zip(self._tiers(place), (written, read), strict=True):
            for name, share in tiers:
                index = self._equals(name)[node]
                load[index] = load.get(index, 0.0) + nbytes * share
        return load

    def _require_socket(self) -> None:
        if self.spec.socket is None:
            raise InputError(
                f"cluster {self.spec.name!r} has no host memory: give it a table [socket] with its dram, or keep all "
                f"buffers on the GPUs"
            )

    def links_of(self, device: int) -> list[int]:
        """Return the links on the ways of a device up to all that joins it to others, both directions; those of devices
        that are alike in the same order.
        """
        node, place = divmod(self._placement[device], self.spec.gpus_per_node)
        edges = (edge for climb in self._climbs(place) for edge in (*climb.up, *climb.down))
        return [self._equals(one.name)[node] for edge in edges for one in edge.resources]

    def host_route(self, device: int, *, to_host: bool) -> Route:
        """Return the way between a device and the memory of its socket, one direction; raises InputError if the cluster
        has no such memory.
        """
        self._require_socket()
        node, place = divmod(self._placement[device], self.spec.gpus_per_node)
        return self._host_route(node, place, to_host)

    def _host_route(self, node: int, place: int, to_host: bool) -> Route:
        """Return the same by the places of a node: to both tiers of the memory at once, where there are two."""
        route, socket = self._host_way(place, to_host).between(node, node), self.spec.socket
        if socket is None or socket.cxl is None:
            return route
        written, read = self._tiers(place)
        shares = tuple([(self._equals(name)[node], share) for name, share in (written if to_host else read)])
        latency_s = route.latency_s + socket.cxl.latency_s
        return Route(route.resources, self._slowest_of(route.resources, shares), latency_s, shares)

    def search(self, source: int, target: int) -> Route:
        """Return the route between two GPUs of the spec along a shortest path of the graph, where the structure of the
        fabrics tells none; raises InputError if there is no path.
        """
        path = self.path(source, target)
        if len(path) < 2:
            raise InputError(f"no link leads from gpu[{source}] to gpu[{target}] of cluster {self.spec.name!r}")
        edges: list[Edge] = [self.graph.edges[a, b]["edge"] for a, b in pairwise(path)]
        memory = self._staging(target) if any(is_socket(hop) for hop in path) else []
        passed = [self.resources.number(name) for name in (*_names(edges), *memory)]
        return Route(tuple(passed), self._slowest(passed), _latency_s(edges))

    def peak_flops_per_s(self, device: int, dtype: str) -> float:
        """Return the peak rate of one device; raises InputError for a data type that it has no peak for."""
        peaks = self.spec.gpu.peak_flops_per_s
        if dtype not in peaks:
            raise InputError(
                f"{self.spec.gpu.name} has no peak for {dtype}: its data types are {', '.join(peaks)}; "
                f"set `dtype`, or cluster.gpu.peak_flops_per_s.{dtype} in a cluster file"
            )
        return peaks[dtype] * self.devices[device].speed

    def _device(self, index: int) -> Device:
        node, place = divmod(index, self.spec.gpus_per_node)
        compute, hbm = (of_nodes[node] for of_nodes in self._own(place))
        special = self.spec.per_gpu.get(index)
        return Device(index, node, compute, float(self.spec.gpu.sms), hbm, special.speed if special else 1.0)

    def _find_own(self, place: int) -> list[tuple[int, ...]]:
        """Return, of a GPU of the first node, the indices of its own resources and of their equals in all nodes."""
        return [self._equals(resource.name) for resource in device_resources(self.spec, place)]

    def _find_equals(self, name: str) -> tuple[int, ...]:
        """Return the index of a resource of the first node, and of its equals in all other nodes."""
        return tuple(self.resources.number(other) for other in equals(self.spec, name))

    def _find_route(self, source: int, target: int) -> Route:
        (node, place), (other, end) = (divmod(gpu, self.spec.gpus_per_node) for gpu in (source, target))
        if self.spec.fabric and node != other:
            return self._over_fabric(source, target)
        way = self._way(place, end, node == other) if source != target else None
        if way is None:
            return self.search(source, target)
        route = way.between(node, other)
        return route._replace(bytes_per_s=self._slowest(list(route.resources))) if self.uneven else route

    def _over_fabric(self, source: int, target: int) -> Route:
        """Return the route between two GPUs of different nodes that a fabric joins."""
        per_node, fabric = self.spec.gpus_per_node, switched(self.spec)
        (node, place), (other, end) = divmod(source, per_node), divmod(target, per_node)
        if fabric is None:
            return self._direct_route(direct_hops(self.spec, node, other))
        rail, wanted = rail_of(self.spec, place), rail_of(self.spec, end)
        if forwards(fabric) and rail != wanted:
            near, far = self._route(source, node * per_node + end), self._route(node * per_node + end, target)
            passed, latency_s = (*near.resources, *far.resources), near.latency_s + far.latency_s
            return Route(passed, self._slowest_of(passed, far.shares), latency_s, far.shares)
        way = self._way(place, end, False)
        assert way is not None
        route = way.between(node, other)
        shares, between_s = self._spread(leaf(self.spec, fabric, node, rail), leaf(self.spec, fabric, other, wanted))
        return Route(route.resources, self._slowest_of(route.resources, shares), route.latency_s + between_s, shares)

    def _find_spread(self, source: str, target: str) -> tuple[tuple[tuple[int, float], ...], float]:
        """Return which share of a flow between two leaves takes which link, and the mean latency of its ways."""
        from topology.fabric.graph import spread

        found = spread(self._switch_graph, source, self._hops_from(target))
        shares = tuple([(self.resources.number(one.name), share) for edge, share in found for one in edge.resources])
        return shares, math.fsum(edge.latency_s * share for edge, share in found)

    @cached_property
    def _switch_graph(self) -> nx.DiGraph:
        from topology.fabric.graph import switch_graph

        fabric = switched(self.spec)
        assert fabric is not None
        return switch_graph(self.spec, fabric)

    def _find_hops_from(self, leaf: str) -> dict[str, int]:
        from topology.fabric.graph import hops_from

        return hops_from(self._switch_graph, leaf)

    def _direct_route(self, hops: list[tuple[int, int]]) -> Route:
        """Return the route along links between nodes."""
        assert self.spec.nic is not None
        passed = [self.resources.of_link(*hop) for hop in hops]
        return Route(tuple(passed), self._slowest(passed), sum(self.spec.nic.latency_s for _ in hops))

    def path(self, source: int, target: int) -> list[str]:
        """Return the devices and hubs on the route between two GPUs of the spec, with both."""
        node, other = source // self.spec.gpus_per_node, target // self.spec.gpus_per_node
        if direct(self.spec) and node != other:
            return direct_path(self.spec, node, other)
        return self._paths(source, node == other).get(f"gpu[{target}]", [])

    def _find_paths(self, source: int, near: bool) -> dict[str, list[str]]:
        """Return a shortest path from a GPU to each device and hub, of its own node if ``near``."""
        from topology.fabric.graph import shortest_paths

        return shortest_paths(self.graph, f"gpu[{source}]", inside=near)

    def _find_way(self, source: int, target: int, near: bool) -> _Way | None:
        """Return the way between two GPUs of one node, or of two, by their places in it; None where only a search tells
        it.
        """
        found = structural_way(self.spec, self._climbs(source), self._climbs(target), near=near)
        if found is None:
            return None
        memory = self._staging(target) if found.through_host else []
        return self._along(found.up, found.down, memory, 0 if near else 1)

    def _find_host_way(self, place: int, to_host: bool) -> _Way:
        climb = next(climb for climb in self._climbs(place) if is_socket(climb.hubs[-1]))
        written, read = ([], []) if self.spec.socket and self.spec.socket.cxl else self._dram(place)
        return self._along(climb.up if to_host else climb.down, [], written if to_host else read, 0)

    def _along(self, up: list[Edge], down: list[Edge], memory: list[str], node: int) -> _Way:
        """Return the way along edges of the first node and of another one, where it also passes some memory."""
        source = tuple(self._equals(name) for name in _names(up))
        target = tuple(self._equals(name) for name in (*_names(down), *memory))
        passed = [*(index[0] for index in source), *(index[node] for index in target)]
        return _Way(source, target, self._slowest(passed), _latency_s([*up, *down]))

    def _staging(self, target: int) -> list[str]:
        """Return the memory that data between GPUs passes on its way through the host."""
        # NCCL's shared-memory transport keeps its buffers on the receiving side: written there once, read there once
        if self.spec.pcie is None or self.spec.pcie.peers != "switch":
            return []
        written, read = self._dram(target)
        return written + read

    def _dram(self, gpu: int) -> tuple[list[str], list[str]]:
        """Return what data passes that is written to the memory of a GPU's socket, and that is read from it."""
        memory, *writes = (one.name for one in host_dram(self.spec, socket_of(self.spec, gpu)))
        return [memory, *writes], [memory]

    def _tiers(self, gpu: int) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
        """Return the same of what offload keeps there, with the share of it that each memory has."""
        assert self.spec.socket is not None
        far = self.spec.socket.cxl_share
        second = [(one.name, far) for one in host_cxl(self.spec, socket_of(self.spec, gpu))]
        written, read = ([*((name, 1 - far) for name in names), *second] for names in self._dram(gpu))
        return written, read

    def _slowest(self, passed: Sequence[int]) -> float:
        """Return the rate of data that passes resources, some of them several times."""
        return min(self.resources[index].capacity / passed.count(index) for index in passed)

    def _slowest_of(self, passed: Sequence[int], shares: Sequence[tuple[int, float]]) -> float:
        """Return the rate of data that passes resources, and others with a share of it."""
        return min(
            self._slowest(passed), *(self.resources[index].capacity / share for index, share in shares), math.inf
        )


def _names(edges: list[Edge]) -> list[str]:
    return [resource.name for edge in edges for resource in edge.resources]


def _latency_s(edges: list[Edge]) -> float:
    return sum(edge.latency_s for edge in edges)


_LATEST: deque[Cluster] = deque(maxlen=4)
"""Those that were built last, which questions about one machine share."""


def cluster_of(spec: ClusterSpec) -> Cluster:
    """Return the cluster of a spec: the same one for an equal spec that was asked for of late, since to build 16,384
    GPUs takes a third of a second.
    """
    found = next((one for one in tuple(_LATEST) if one.spec == spec), None)
    if found is None:
        found = Cluster(spec)
        _LATEST.append(found)
    return found


def load_cluster(name: str) -> ClusterSpec:
    """Return the spec of a preset, of a GPU by name, of so many (``16xH100``), or of a TOML file; ``host`` is this
    machine. Raises InputError with the names.
    """
    if name.endswith(".toml") or "/" in name:
        return load_toml("cluster", name, ClusterSpec, HARDWARE, "`cluster`")
    spec = load_named(name)
    return with_facts(spec, host_facts()) if spec.name == "host" else spec
