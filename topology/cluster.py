"""A cluster, built and sealed: devices, the resources that they share, and one fixed route for every pair."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import networkx as nx

from sim.errors import InputError
from sim.presets import load_toml
from topology.fabrics import FABRIC, Edge, Resource, socket_of, wire
from topology.host import host_facts, with_facts
from topology.specs import ClusterSpec


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

    def load(self, nbytes: float) -> dict[int, float]:
        """Return the bytes that a message puts on each resource."""
        return {index: float(nbytes) * self.resources.count(index) for index in self.resources}


class Cluster:
    """The machine that a schedule is simulated on. Built once from a spec, never changed.

    With a ``placement`` number i is the device ``placement[i]``, by default i.
    """

    def __init__(self, spec: ClusterSpec, placement: Sequence[int] | None = None) -> None:
        self.spec = spec
        self._graph = wire(spec)
        self.resources: list[Resource] = []
        self._index: dict[str, int] = {}
        wired = [self._device(index) for index in range(spec.nodes * spec.gpus_per_node)]
        self._placement = range(len(wired)) if placement is None else placement
        if len(set(self._placement)) < len(self._placement) or not set(self._placement) <= set(range(len(wired))):
            raise InputError(f"placement {placement}: expected different devices among 0 to {len(wired) - 1}")
        self.devices = [wired[device] for device in self._placement]
        for _, _, edge in self._graph.edges(data="edge"):
            for resource in edge.resources:
                self._add(*resource)
        self._dram = (
            [
                self._add(f"socket[{number}].dram", "dram", spec.socket.dram.bytes_per_s)
                for number in range(spec.nodes * spec.socket.per_node)
            ]
            if spec.socket
            else []
        )
        inside = nx.restricted_view(self._graph, [FABRIC] if FABRIC in self._graph else [], [])
        self._paths_inside = cache(lambda source: nx.single_source_shortest_path(inside, f"gpu[{source}]"))
        self._paths_across = cache(lambda source: nx.single_source_shortest_path(self._graph, f"gpu[{source}]"))
        self._route = cache(self._find_route)
        self._host_route = cache(self._find_host_route)

    def route(self, source: int, target: int) -> Route:
        """Return the route between two different devices, the same on every call and in every run."""
        return self._route(self._placement[source], self._placement[target])

    def typical_routes(self) -> list[Route]:
        """Return the routes to a neighbour, to the next node and to the host's memory, as far as there are such."""
        per_node = self.spec.gpus_per_node
        others = [number for number in (1, per_node) if number < self.spec.nodes * per_node]
        return [self._route(0, other) for other in others] + ([self._host_route(0, True)] if self._dram else [])

    def host_route(self, device: int, *, to_host: bool) -> Route:
        """Return the way between a device and the memory of its socket, one direction; raises InputError if the cluster
        has no such memory.
        """
        if not self._dram:
            raise InputError(
                f"cluster {self.spec.name!r} has no host memory: give it a table [socket] with its dram, or keep all "
                f"buffers on the GPUs"
            )
        return self._host_route(self._placement[device], to_host)

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
        spec, node = self.spec, index // self.spec.gpus_per_node
        special = spec.per_gpu.get(index)
        speed = special.speed if special else 1.0
        if spec.gpu.kind == "cpu":
            assert spec.host is not None
            compute = self._add(f"node[{node}].cores", "compute", spec.host.cores)
            hbm = self._add(f"node[{node}].dram", "hbm", spec.hbm.bytes_per_s)
        else:
            compute = self._add(f"gpu[{index}].sms", "compute", spec.gpu.sms)
            hbm = self._add(f"gpu[{index}].hbm", "hbm", spec.hbm.bytes_per_s)
        return Device(index, node, compute, float(spec.gpu.sms), hbm, speed)

    def _add(self, name: str, group: str, capacity: float) -> int:
        """Return the index of a resource, which may be shared and there already."""
        if name not in self._index:
            self._index[name] = len(self.resources)
            self.resources.append(Resource(name, group, float(capacity)))
        return self._index[name]

    def _find_route(self, source: int, target: int) -> Route:
        per_node = self.spec.gpus_per_node
        near = source // per_node == target // per_node  # and so not over the NICs, however short that is
        path = (self._paths_inside if near else self._paths_across)(source).get(f"gpu[{target}]")
        if path is None or source == target:
            raise InputError(f"no link leads from gpu[{source}] to gpu[{target}] of cluster {self.spec.name!r}")
        through_host = any(hop.startswith("socket[") for hop in path)
        pcie = self.spec.pcie
        staged = through_host and pcie is not None and pcie.peers == "switch"
        # NCCL's shared-memory transport keeps its buffers on the receiving side: written there once, read there once
        return self._along(path, [self._dram[socket_of(self.spec, target)]] * 2 if staged else [])

    def _find_host_route(self, device: int, to_host: bool) -> Route:
        socket = socket_of(self.spec, device)
        path = nx.shortest_path(self._graph, f"gpu[{device}]", f"socket[{socket}]")
        return self._along(path if to_host else path[::-1], [self._dram[socket]])

    def _along(self, path: list[str], memory: list[int]) -> Route:
        """Return the route along a path that also passes some memory."""
        edges: list[Edge] = [self._graph.edges[a, b]["edge"] for a, b in pairwise(path)]
        passed = [*(self._index[resource.name] for edge in edges for resource in edge.resources), *memory]
        return Route(
            tuple(passed),
            min(self.resources[index].capacity / passed.count(index) for index in passed),
            sum(edge.latency_s for edge in edges),
        )


def load_cluster(name: str) -> ClusterSpec:
    """Return the spec of a preset or of a TOML file; ``host`` is this machine. Raises InputError with the names."""
    spec = load_toml("cluster", name, ClusterSpec, "topology/hardware", "`cluster`")
    return with_facts(spec, host_facts()) if name == "host" else spec
