"""Which algorithm each kind of collective runs, as the table ``[collectives]`` of a cluster file states it.

Names are NCCL's where it has the algorithm (NCCL_ALGO: Ring, Tree, NVLS and NVLSTree, PAT; src/device of NVIDIA/nccl,
from memory). ``fastest`` is the fastest of those that libraries choose from by themselves.
"""

from __future__ import annotations

from typing import Literal

from topology.base import Spec
from topology.kinds import DIRECT, CircuitsSpec, Fabric

GatherAlgorithm = Literal["fastest", "ring", "neighbour-ring", "hierarchical", "pat", "direct"]
SumAlgorithm = Literal["fastest", "ring", "neighbour-ring", "tree", "hierarchical", "switch", "direct"]


class CollectivesSpec(Spec, frozen=True, kw_only=True):
    """Algorithms by kind. ``ring``: by number, each node left by another NIC. ``neighbour-ring``: both ways along the
    links of nodes without switches. ``tree``: two over the nodes. ``hierarchical``: inside nodes, and between GPUs of
    the same place in theirs. ``switch``: summed in the switches of nodes. ``pat``: in a logarithm of steps, for one GPU
    a node. ``direct``: straight between all. ``rail-aligned``: over NVLink to the GPU of the rail first.
    """

    all_gather: GatherAlgorithm = "fastest"
    reduce_scatter: GatherAlgorithm = "fastest"
    all_reduce: SumAlgorithm = "fastest"
    all_to_all: Literal["fastest", "direct", "rail-aligned"] = "fastest"

    def wrong(self, fabric: Fabric | None, nodes: int, *, sums: bool) -> str:
        """Return which of them a cluster has no links for, and what to set; empty if none."""
        for kind in self.__struct_fields__:
            chosen = getattr(self, kind)
            if chosen == "neighbour-ring" and not isinstance(fabric, DIRECT):
                return f"{kind} = {chosen!r} follows links between nodes, which are joined by switches here: set ring"
            if chosen == "neighbour-ring" and isinstance(fabric, CircuitsSpec) and not fabric.passing_all(nodes):
                strides = ", ".join(map(str, fabric.strides))
                return f"{kind} = {chosen!r}: no stride of {strides} passes all {nodes} nodes: set another, or ring"
            if chosen == "switch" and not sums:
                return f"{kind} = {chosen!r} needs switches that sum: set nvlink.reduces, or tree"
        return ""
