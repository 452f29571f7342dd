"""Random machines: how GPUs of a node are joined, how nodes are, what they share, and which GPUs differ."""

from __future__ import annotations

import math
from random import Random

import msgspec

from topology.cluster import load_cluster
from topology.collectives import CollectivesSpec
from topology.kinds import (
    CircuitsSpec,
    DragonflyPlusSpec,
    Fabric,
    FatTreeSpec,
    FullMeshSpec,
    MeshSpec,
    RailOnlySpec,
    RailOptimisedSpec,
    TorusSpec,
)
from topology.specs import ClusterSpec, NicSpec, PerGpu

SWITCHED = ("hgx-h100", "hgx-h100", "hgx-h200", "hgx-b200", "dgx-a100", "h800", "gb200-nvl72")
"""A switch joins all GPUs of a node, and each has its own NIC."""
SHARED = ("a100-pcie", "l20-pcie", "rtx-4090", "h100-nvl", "mi300x", "host")
"""GPUs share PCIe switches and sockets, have bridges to some neighbours, or are threads of one host."""
COLLECTIVES = (
    CollectivesSpec(all_gather="hierarchical", reduce_scatter="hierarchical", all_reduce="hierarchical"),
    CollectivesSpec(all_gather="direct", reduce_scatter="direct", all_to_all="rail-aligned"),
    CollectivesSpec(all_reduce="tree", all_gather="ring"),
)


def machine(draw: Random, ranks: int, of_replica: int) -> ClusterSpec:
    """Return a machine for so many ranks, of which so many neighbours are those of a stage of a replica."""
    found = load_cluster(draw.choice(SWITCHED if draw.random() < 0.6 else SHARED))
    if found.gpu.kind == "cpu":
        return _with_unlike(draw, found, ranks)
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= found.gpus_per_node]
    fitting = [size for size in sizes if of_replica % size == 0] * 3 + sizes
    per_node = draw.choice(fitting)
    nodes = -(-ranks // per_node)
    nic = found.nic or NicSpec(bytes_per_s=2.5e10, latency_s=1e-5)
    spec = msgspec.structs.replace(
        found,
        nodes=nodes,
        gpus_per_node=per_node,
        bridged_gpus=found.bridged_gpus and math.gcd(found.bridged_gpus, per_node),
        nic=msgspec.structs.replace(nic, **_nics(draw, per_node)),
    )
    if nodes > 1 and draw.random() < 0.15:
        spec = msgspec.structs.replace(spec, fabric=_fabric(draw, nodes, spec.ports_per_node, per_node))
    if draw.random() < 0.1:
        spec = msgspec.structs.replace(spec, collectives=draw.choice(COLLECTIVES))
    return _with_unlike(draw, spec, ranks)


def _nics(draw: Random, per_node: int) -> dict[str, int | None]:
    """Return how many NICs a node has, and how many of them carry a flow: mostly one for each GPU."""
    own: dict[str, int | None] = {"per_node": None, "stripe": None}
    few = [{"per_node": per_node // 2, "stripe": None}, {"per_node": 1, "stripe": None}] if per_node > 1 else []
    return draw.choice(
        [*[own] * 8, {"per_node": 2 * per_node, "stripe": None}, {"per_node": per_node, "stripe": per_node}, *few]
    )


def _fabric(draw: Random, nodes: int, ports: int, per_node: int) -> Fabric:
    """Return what joins nodes: switches that block, or no switches where each node has one GPU."""
    half = -(-nodes // 2)
    switched: list[Fabric] = [
        FatTreeSpec(below=(2 * ports, half), above=(1,), oversubscription=(2.0,)),
        FatTreeSpec(below=(ports, nodes), above=(max(1, ports // 2),), latency_s=1e-6),
        RailOptimisedSpec(below=(2, half * ports), above=(2,), oversubscription=(1.5,), pxn=draw.random() < 0.5),
        RailOnlySpec(below=(2, half), above=(1,)),
        DragonflyPlusSpec(below=ports, leaves=2, spines=2, global_links=half),
    ]
    if per_node > 1 or ports > 1:
        return draw.choice(switched)
    wide = max(size for size in range(1, math.isqrt(nodes) + 1) if nodes % size == 0)
    dims = (wide, nodes // wide) if wide > 1 else (nodes,)
    return draw.choice(
        [MeshSpec(dims=dims), TorusSpec(dims=dims), FullMeshSpec(dims=dims), CircuitsSpec(strides=(1,)), *switched]
    )


def _with_unlike(draw: Random, spec: ClusterSpec, ranks: int) -> ClusterSpec:
    """Return a machine of which some GPUs, mostly none, are slower or have slower links."""
    unlike = draw.choice([*[[]] * 8, [PerGpu(speed=0.8)], [PerGpu(speed=0.9)] * 2, [PerGpu(link=0.5)]])
    which = draw.sample(range(ranks), min(len(unlike), ranks))
    return msgspec.structs.replace(spec, per_gpu=dict(zip(which, unlike, strict=False)))
