"""Fabrics of switches: which leaf a port is on, and the links between switches. All else follows from these two.

    fat-tree           leaf of a0 a1, leaf of b0 b1      every leaf linked to every spine above
    rail-optimised     leaf of a0 b0, leaf of a1 b1      the same
    rail-only          leaf of a0 b0, leaf of a1 b1      nothing between rails
    dragonfly+         group of leaves and spines        spines of any two groups linked

a0 and a1 are the ports of one node. Each direction of a link is a resource of its own. Of many flows an equal part
takes each of the shortest ways (ECMP), so a flow here takes all of them, an equal part over every link that leads
nearer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, assert_never

from topology.fabric.fabrics import Edge, Resource
from topology.kinds import DragonflyPlusSpec, FatTreeSpec, RailOnlySpec, RailOptimisedSpec, Switched
from topology.specs import ClusterSpec

GROUP = "fabric"
"""What resources of links between switches are called."""


class Trunk(NamedTuple):
    """A link between two switches, or several side by side."""

    lower: str
    upper: str
    bytes_per_s: float
    """Of all together, per direction, headers included."""
    latency_s: float
    links: int = 1

    def edges(self, payload: float) -> tuple[Edge, Edge]:
        """Return both directions, up and down."""
        name, rate = f"{self.lower}.{self.upper}", self.bytes_per_s * payload
        up, down = (Edge((Resource(f"{name}.{way}", GROUP, rate),), self.latency_s) for way in ("out", "in"))
        return up, down


def switched(spec: ClusterSpec) -> Switched | None:
    """Return the fabric of a cluster if it is one of switches."""
    found = spec.fabric
    switches = (FatTreeSpec, RailOptimisedSpec, RailOnlySpec, DragonflyPlusSpec)
    return found if isinstance(found, switches) else None


def forwards(fabric: Switched) -> bool:
    """Return whether what is for another rail goes through the node to a port of that rail first."""
    return isinstance(fabric, RailOnlySpec) or (isinstance(fabric, RailOptimisedSpec) and fabric.pxn)


def leaf(spec: ClusterSpec, fabric: Switched, node: int, rail: int) -> str:
    """Return the switch that a port of a node is linked to; ``rail`` is the port's number in its node."""
    below = fabric.below if isinstance(fabric, DragonflyPlusSpec) else fabric.below[0]
    if isinstance(fabric, RailOptimisedSpec):
        number = node // below * spec.ports_per_node + rail
    elif isinstance(fabric, RailOnlySpec):
        return f"rail[{rail}].tier1[{node // below}]"
    else:
        number = (node * spec.ports_per_node + rail) // below
    if isinstance(fabric, DragonflyPlusSpec):
        return f"group[{number // fabric.leaves}].leaf[{number % fabric.leaves}]"
    return f"tier1[{number}]"


def trunks(spec: ClusterSpec, fabric: Switched) -> Iterator[Trunk]:
    """Yield the links between the switches of a fabric, as far as there are ports below them."""
    nic = spec.nic
    assert nic is not None
    port = nic.bytes_per_s * spec.nics_per_flow
    if isinstance(fabric, DragonflyPlusSpec):
        yield from _dragonfly(fabric, fabric.groups(spec.nodes, spec.ports_per_node), port)
    elif isinstance(fabric, RailOnlySpec):
        for rail in range(spec.ports_per_node):
            yield from _tree(fabric, f"rail[{rail}].", spec.nodes, port)
    elif isinstance(fabric, FatTreeSpec | RailOptimisedSpec):
        yield from _tree(fabric, "", fabric.places(spec.nodes, spec.ports_per_node), port)
    else:
        assert_never(fabric)


def _tree(
    fabric: FatTreeSpec | RailOptimisedSpec | RailOnlySpec, prefix: str, places: int, port: float
) -> Iterator[Trunk]:
    """Yield the links of a tree over so many places for ports, tier by tier.

    The switches of a tier that reach the same ports are copies of each other. Each is linked to ``above`` switches of
    the next tier, which are copies too: what a copy is linked to no other one is.
    """
    copies, rate = 1, port
    for tier, above in enumerate(fabric.above):
        oversubscription = fabric.oversubscription[tier] if fabric.oversubscription else 1.0
        rate = rate * fabric.below[tier] / (oversubscription * above)
        for part in range(-(-places // math.prod(fabric.below[: tier + 1]))):
            for copy in range(copies):
                for way in range(above):
                    number = part // fabric.below[tier + 1] * copies * above + way * copies + copy
                    lower, upper = f"tier{tier + 1}[{part * copies + copy}]", f"tier{tier + 2}[{number}]"
                    yield Trunk(prefix + lower, prefix + upper, rate, fabric.latency_s)
        copies *= above


def _dragonfly(fabric: DragonflyPlusSpec, groups: int, port: float) -> Iterator[Trunk]:
    """Yield the links of groups, then those between them: to each other group as many, from spines in turn."""
    for group in range(groups):
        for one in range(fabric.leaves):
            for other in range(fabric.spines):
                lower, upper = f"group[{group}].leaf[{one}]", f"group[{group}].spine[{other}]"
                yield Trunk(lower, upper, fabric.bytes_per_s or port, fabric.latency_s)
    each = fabric.spines * fabric.global_links // max(1, groups - 1)
    rate = fabric.global_bytes_per_s or port
    for group in range(groups):
        for further in range(group + 1, groups):
            side_by_side: dict[tuple[int, int], int] = {}
            for link in range(each):
                here = ((further - group - 1) * each + link) % fabric.spines
                there = ((group - further) % groups - 1) * each + link
                ends = here, there % fabric.spines
                side_by_side[ends] = side_by_side.get(ends, 0) + 1
            for (here, there), links in side_by_side.items():
                lower, upper = f"group[{group}].spine[{here}]", f"group[{further}].spine[{there}]"
                yield Trunk(lower, upper, rate * links, fabric.global_latency_s, links)
