"""Kinds of fabrics, as the table ``[fabric]`` of a cluster file states them: its ``kind``, and the keys of that kind.

    mesh, torus, full-mesh      nodes linked to nodes, see ``direct``
    optical-circuits            the same, over circuits that are set for a job
    fat-tree, rail-optimised    tiers of switches over all ports, see ``switches``
    rail-only                   tiers of switches for each rail by itself; the rest goes through the nodes
    dragonfly+                  groups of two tiers, each linked to all others

A port is what a node has of the fabric: a NIC, or a stripe of several. Rates that are not stated are those of a port.
"""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta

from topology.base import Count, NotNegative, Positive, Spec

Dims = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=6)]
Tiers = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=4)]


class _GridSpec(Spec, frozen=True, kw_only=True):
    dims: Dims
    """Nodes along each dimension; numbers count along the last one first."""

    def wrong(self, nodes: int, _: int) -> str:
        """Return what is wrong with it for so many nodes; empty if nothing is."""
        if math.prod(self.dims) == nodes:
            return ""
        dims = " x ".join(map(str, self.dims))
        return f"dims {dims} are {math.prod(self.dims)} nodes, there are {nodes}; set it or `nodes`"


class MeshSpec(_GridSpec, frozen=True, kw_only=True, tag_field="kind", tag="mesh"):
    """Nodes in a grid without switches, each linked to the next along every dimension; one dimension is a chain."""


class TorusSpec(_GridSpec, frozen=True, kw_only=True, tag_field="kind", tag="torus"):
    """The same, and the last of each dimension linked to the first."""


class FullMeshSpec(_GridSpec, frozen=True, kw_only=True, tag_field="kind", tag="full-mesh"):
    """The same, and each node linked to all others along every dimension: a HyperX (Ahn et al., SC 2009), the
    nD-FullMesh of UB-Mesh (arXiv:2503.20313 §3); with one dimension every node to every other.
    """


class CircuitsSpec(Spec, frozen=True, kw_only=True, tag_field="kind", tag="optical-circuits"):
    """Nodes joined by circuits of an optical switch, set once for a job: rings of strides, each node linked to those so
    many further and before, as TopoOpt has them (Wang et al., NSDI 2023 §4, arXiv:2202.00433). Nodes pass on what is
    for others.
    """

    strides: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=16)] = (1,)
    """Of the rings. A node has two ports for each, one for a stride of half of the nodes."""

    def wrong(self, nodes: int, _: int) -> str:
        """Return what is wrong with it for so many nodes; empty if nothing is."""
        far = [stride for stride in self.strides if 2 * stride > nodes]
        if far or len(set(self.strides)) < len(self.strides):
            return f"strides {_listed(self.strides)} of {nodes} nodes: expected different ones from 1 to {nodes // 2}"
        apart = math.gcd(nodes, *self.strides)
        if apart > 1:
            return (
                f"strides {_listed(self.strides)} of {nodes} nodes leave {apart} parts that no circuit joins; add one "
                f"that is no multiple of {apart}"
            )
        return ""

    def passing_all(self, nodes: int) -> list[int]:
        """Return the strides whose ring passes all of so many nodes before it closes."""
        return [stride for stride in self.strides if math.gcd(stride, nodes) == 1]


class _TreeSpec(Spec, frozen=True, kw_only=True):
    """Tiers of switches: an extended generalised fat tree (Öhring et al., IPPS 1995)."""

    below: Tiers
    """Ports below each switch of the lowest tier, the leaves; then per tier the switches of the one below, of which
    each reaches other ports."""
    above: Annotated[tuple[Count, ...], Meta(max_length=3)] = ()
    """Per tier but the highest the switches above each of its switches."""
    oversubscription: Annotated[tuple[Positive, ...], Meta(max_length=3)] = ()
    """Per tier but the highest what comes from below to what goes up: 2 is half of the rate; without it 1 in all."""
    latency_s: NotNegative = 0.0
    """What a link between two switches adds to the latency of the NICs, with the switch at its end."""

    def wrong(self, nodes: int, ports: int) -> str:
        """Return what is wrong with it for so many nodes with so many ports each; empty if nothing is."""
        tiers, has = len(self.below), math.prod(self.below)
        if len(self.above) != tiers - 1:
            return (
                f"`above` has {len(self.above)} numbers, `below` {tiers}: expected one less, none for the highest tier"
            )
        if self.oversubscription and len(self.oversubscription) != tiers - 1:
            return f"`oversubscription` has {len(self.oversubscription)} numbers, `above` {tiers - 1}: expected as many"
        needed = self.places(nodes, ports)
        if needed > has:
            product = " x ".join(map(str, self.below))
            return (
                f"`below` {product} has {has} places for ports, {needed} are needed; set a larger one, or fewer `nodes`"
            )
        return ""

    def places(self, nodes: int, ports: int) -> int:
        """Return how many places of one tree so many nodes take."""
        return nodes * ports


class FatTreeSpec(_TreeSpec, frozen=True, kw_only=True, tag_field="kind", tag="fat-tree"):
    """Every node on one leaf, with all of its ports."""


class RailOptimisedSpec(_TreeSpec, frozen=True, kw_only=True, tag_field="kind", tag="rail-optimised"):
    """The first ports of some nodes on one leaf, the second ones on the next: leaves are rails (NVIDIA DGX SuperPOD
    reference architecture).
    """

    pxn: bool = True
    """Whether data for another rail goes over NVLink to the GPU of that rail, and only then into the fabric: NCCL's
    PXN, which it uses by default (NCCL_P2P_PXN_LEVEL, from memory)."""

    def places(self, nodes: int, ports: int) -> int:
        """Return how many places of one tree so many nodes take: those of a leaf are for as many nodes."""
        return -(-nodes // self.below[0]) * self.below[0] * ports


class RailOnlySpec(_TreeSpec, frozen=True, kw_only=True, tag_field="kind", tag="rail-only"):
    """A tree for each rail and nothing between them (arXiv:2307.12169): data for another rail goes over NVLink to the
    GPU of that rail first.
    """

    def places(self, nodes: int, _: int) -> int:
        """Return how many places of one tree so many nodes take: one for each."""
        return nodes


class DragonflyPlusSpec(Spec, frozen=True, kw_only=True, tag_field="kind", tag="dragonfly+"):
    """Groups of leaves and spines, every leaf linked to every spine of its group; spines are linked to those of other
    groups, as many links between any two (Shpiner et al., HiPINEB 2017). Routes are the shortest ones.
    """

    below: Count
    """Ports below each leaf."""
    leaves: Count
    """Of a group."""
    spines: Count
    """Of a group."""
    global_links: Count
    """Of a spine, to spines of other groups; those that cannot be shared out evenly are left unused."""
    bytes_per_s: Positive | None = None
    """Of a link between a leaf and a spine."""
    global_bytes_per_s: Positive | None = None
    """Of a link between two groups."""
    latency_s: NotNegative = 0.0
    """What a link inside a group adds to the latency of the NICs, with the switch at its end."""
    global_latency_s: NotNegative = 0.0
    """The same of a link between two groups."""

    def groups(self, nodes: int, ports: int) -> int:
        """Return how many groups so many nodes fill."""
        return -(-nodes * ports // (self.below * self.leaves))

    def wrong(self, nodes: int, ports: int) -> str:
        """Return what is wrong with it for so many nodes with so many ports each; empty if nothing is."""
        groups, links = self.groups(nodes, ports), self.spines * self.global_links
        if links < groups - 1:
            return (
                f"{groups} groups of {self.leaves} x {self.below} ports, of which each has {links} global links: "
                f"expected one at least to every other; set more `global_links` or larger groups"
            )
        return ""


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


DIRECT = (MeshSpec, TorusSpec, FullMeshSpec, CircuitsSpec)
"""Kinds without switches."""
Direct = MeshSpec | TorusSpec | FullMeshSpec | CircuitsSpec
Switched = FatTreeSpec | RailOptimisedSpec | RailOnlySpec | DragonflyPlusSpec
Fabric = Direct | Switched
