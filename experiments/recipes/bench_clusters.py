"""What building a cluster of 1,024 GPUs takes, by the fabric that joins them; part of ``make bench``."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import msgspec

from topology.cluster import Cluster, load_cluster
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
from topology.specs import ClusterSpec

TARGET_S = 2.0
FABRICS: dict[str, tuple[Fabric | None, int]] = {
    "one switch": (None, 8),
    "fat tree of two tiers": (FatTreeSpec(below=(32, 32), above=(16,)), 8),
    "fat tree of three tiers": (FatTreeSpec(below=(8, 8, 16), above=(8, 8)), 8),
    "rail-optimised": (RailOptimisedSpec(below=(32, 32), above=(16,)), 8),
    "rail-only": (RailOnlySpec(below=(32, 4), above=(16,)), 8),
    "dragonfly+": (DragonflyPlusSpec(below=16, leaves=8, spines=8, global_links=7), 8),
    "mesh of 32 x 32": (MeshSpec(dims=(32, 32)), 1),
    "torus of 32 x 32": (TorusSpec(dims=(32, 32)), 1),
    "torus of 16 x 8 x 8": (TorusSpec(dims=(16, 8, 8)), 1),
    "full mesh of 32 x 32": (FullMeshSpec(dims=(32, 32)), 1),
    "full mesh of one dimension": (FullMeshSpec(dims=(1024,)), 1),
    "circuits of 16 strides": (CircuitsSpec(strides=tuple(range(1, 32, 2))), 1),
}
"""What joins 1,024 H100, and how many are in a node."""


def building(rounds: int) -> Iterator[tuple[str, float]]:
    """Yield the CPU time of a cluster with a route from its first GPU to its last one, the least of some rounds, by
    fabric.
    """
    h100 = load_cluster("hgx-h100")
    specs = {name: msgspec.structs.replace(h100, nodes=1024 // gpus, gpus_per_node=gpus, fabric=fabric)
             for name, (fabric, gpus) in FABRICS.items()}  # fmt: skip
    specs["15 racks of 72 GPUs"] = msgspec.structs.replace(load_cluster("gb200-nvl72"), nodes=15)
    for name, spec in specs.items():
        yield name, min(_built_s(spec) for _ in range(rounds))


def _built_s(spec: ClusterSpec) -> float:
    gc.collect()
    begin = time.process_time()
    Cluster(spec).route(0, spec.nodes * spec.gpus_per_node - 1)
    return time.process_time() - begin
