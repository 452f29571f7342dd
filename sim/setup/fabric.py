"""What joins the nodes of a cluster: how far, by how many ways, and how much a half of them can send the other."""

from __future__ import annotations

from pathlib import Path

from sim.base.errors import InputError
from sim.setup import names
from sim.setup.names import Overrides
from topology.cluster import Cluster
from topology.fabric.shape import Shape, shape
from topology.specs import ClusterSpec


def fabric(
    cluster: str | Path | ClusterSpec | Cluster,
    *,
    nodes: int | None = None,
    set: Overrides = (),  # noqa: A002
) -> Shape:
    """Return the shape of a cluster's fabric; raises InputError where it has one node.

    >>> fabric("hgx-h100", nodes=4).bisection_bytes_per_s / 1e9
    800.0
    """
    spec = names.cluster(cluster, nodes=nodes, set=set).spec
    found = shape(spec)
    if found is None:
        raise InputError(f"cluster {spec.name!r} has one node, which no fabric joins to others; set `nodes`")
    return found
