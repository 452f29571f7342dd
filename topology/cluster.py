"""A cluster, built and sealed: devices, the resources that they share, and one fixed route for every pair."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import networkx as nx

from sim.errors import InputError
from sim.presets import load_toml
from topology.fabrics import Edge, wire
from topology.host import host_facts, with_facts
from topology.specs import ClusterSpec


class Resource(NamedTuple):
    """Something that activities share: SMs, cores, memory bandwidth, one direction of a link."""

    name: str
    group: str
    """Class of the resource: compute, hbm, nvlink, pcie, nic, loopback."""
    capacity: float
    """SMs or cores; bytes per second for memory and links."""


class Device(NamedTuple):
    """One GPU (or one process of a CPU host): where it computes and which memory it works on."""

    number: int
    node: int
    compute: int
    """Index of the resource that its kernels occupy: its own SMs, or the cores of its host."""
    compute_units: float
    """How much of that resource a kernel takes when alone."""
    hbm: int
    speed: float


class Route(NamedTuple):
    """The way from one device to another."""

    resources: tuple[int, ...]
    bytes_per_s: float
    """Rate of the slowest link on the way."""
    latency_s: float


class Cluster:
    """The machine that a schedule is simulated on. Built once from a spec, never changed."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self._graph = wire(spec)
        self.resources: list[Resource] = []
        self.devices = [self._device(index) for index in range(spec.nodes * spec.gpus_per_node)]
        self._link_index: dict[str, int] = {}
        for _, _, edge in self._graph.edges(data="edge"):
            if edge.resource:
                self._link_index[edge.resource] = self._add(edge.resource, edge.group, edge.bytes_per_s)
        self._paths_from = cache(lambda source: nx.single_source_shortest_path(self._graph, f"gpu[{source}]"))
        self._route = cache(self._find_route)

    def route(self, source: int, target: int) -> Route:
        """Return the route between two different devices, the same on every call and in every run."""
        return self._route(source, target)

    def peak_flops_per_s(self, device: int, dtype: str) -> float:
        """Return the peak rate of one device; raises InputError for a data type that it has no peak for."""
        peaks = self.spec.gpu.peak_flops_per_s
        if dtype not in peaks:
            raise InputError(
                f"{self.spec.gpu.name} has no peak for {dtype}: its data types are {', '.join(peaks)}; "
                f"set --dtype, or cluster.gpu.peak_flops_per_s.{dtype} in a cluster file"
            )
        return peaks[dtype] * self.devices[device].speed

    def _device(self, index: int) -> Device:
        spec, node = self.spec, index // self.spec.gpus_per_node
        special = spec.per_gpu.get(index)
        speed = special.speed if special else 1.0
        if spec.gpu.kind == "cpu":
            assert spec.host is not None
            first = index % spec.gpus_per_node == 0
            compute = self._add(f"node[{node}].cores", "compute", spec.host.cores) if first else self._shared(node, 0)
            hbm = self._add(f"node[{node}].dram", "hbm", spec.hbm.bytes_per_s) if first else self._shared(node, 1)
        else:
            compute = self._add(f"gpu[{index}].sms", "compute", spec.gpu.sms)
            hbm = self._add(f"gpu[{index}].hbm", "hbm", spec.hbm.bytes_per_s)
        return Device(index, node, compute, float(spec.gpu.sms), hbm, speed)

    def _shared(self, node: int, which: int) -> int:
        """Return the index of a resource that the ranks of a CPU host share: 0 its cores, 1 its memory."""
        return 2 * node + which

    def _add(self, name: str, group: str, capacity: float) -> int:
        self.resources.append(Resource(name, group, float(capacity)))
        return len(self.resources) - 1

    def _find_route(self, source: int, target: int) -> Route:
        path = self._paths_from(source).get(f"gpu[{target}]")
        if path is None or source == target:
            raise InputError(f"no link leads from gpu[{source}] to gpu[{target}] of cluster {self.spec.name!r}")
        edges: list[Edge] = [self._graph.edges[a, b]["edge"] for a, b in pairwise(path)]
        links = [edge for edge in edges if edge.resource]
        return Route(
            tuple(self._link_index[edge.resource] for edge in links),
            min(edge.bytes_per_s for edge in links),
            sum(edge.latency_s for edge in edges),
        )


def load_cluster(name: str) -> ClusterSpec:
    """Return the spec of a preset or of a TOML file; ``host`` is this machine. Raises InputError with the names."""
    spec = load_toml("cluster", name, ClusterSpec, "topology/hardware", "--cluster")
    return with_facts(spec, host_facts()) if name == "host" else spec
