"""From a cluster to the network that a lab builds: it has the links of the simulator's graph, at their rates."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import networkx as nx

from runtime.lab.network import Network, Wire
from sim.base.errors import InputError
from topology.cluster import Cluster
from topology.fabric.fabrics import Edge
from topology.specs import ClusterSpec


class _Ends(NamedTuple):
    """Rates of both directions of a link; None where nothing limits it."""

    there: float | None
    back: float | None


def lab_network(cluster: Cluster) -> Network:
    """Return the network of a cluster of CPU ranks: a rank for each, a switch for each hub, and the ways that the
    simulator's routes take. Raises InputError for a cluster of GPUs.
    """
    spec = cluster.spec
    if spec.gpu.kind != "cpu":
        raise InputError(
            f"cluster {spec.name!r} is of GPUs, and ranks of a lab are processes: name a network of it, or a cluster "
            f'file with gpu.kind = "cpu"'
        )
    ranks = tuple(f"gpu[{number}]" for number in range(spec.nodes * spec.gpus_per_node))
    capacities = {resource.name: resource.capacity for resource in cluster.resources}
    links = {
        (start, end): _Ends(
            _rate(spec, there["edge"], capacities), _rate(spec, cluster.graph.edges[end, start]["edge"], capacities)
        )
        for start, end, there in cluster.graph.edges(data=True)
    }
    paths = {
        (source, target): cluster.path(source, target)
        for source in range(len(ranks)) for target in range(len(ranks)) if source != target
    }  # fmt: skip
    used = {hop for path in paths.values() for hop in pairwise(path)}
    graph = nx.Graph([hop for hop in links if hop in used])
    merged = _merged(graph, links, set(ranks))
    wires = tuple(Wire(ends, (rates.there, rates.back)) for ends, rates in merged.items())
    places = {place for wire in wires for place in wire.ends}
    ways = tuple(
        tuple(
            name if target == source else next(place for place in paths[source, target][1:] if place in places)
            for target in range(len(ranks))
        )
        for source, name in enumerate(ranks)
    )
    return Network(ranks, tuple(sorted(places - set(ranks))), wires, ways)


def _rate(spec: ClusterSpec, edge: Edge, capacities: dict[str, float]) -> float | None:
    """Return the rate of an edge with headers, which data gets the payload of."""
    if not edge.resources:
        return None
    resource = edge.resources[0]
    link = spec.nic if resource.group == "nic" else spec.loopback
    assert link
    return capacities[resource.name] / link.payload


def _merged(graph: nx.Graph, links: dict[tuple[str, str], _Ends], ranks: set[str]) -> dict[tuple[str, str], _Ends]:
    """Return the links without hubs that only pass on from one link to another, where at most one of the two limits."""
    found = {hop: links[hop] for hop in graph.edges}
    while True:
        for hub in sorted(set(graph) - ranks):
            around = list(graph[hub])
            if len(around) != 2:
                continue
            one, other = (_towards(found, place, hub) for place in around)
            if all(one) and all(other):
                continue
            graph.remove_node(hub)
            graph.add_edge(*around)
            for place in around:
                found.pop((place, hub), None)
                found.pop((hub, place), None)
            found[around[0], around[1]] = _Ends(one.there or other.back, one.back or other.there)
            break
        else:
            return found


def _towards(found: dict[tuple[str, str], _Ends], place: str, hub: str) -> _Ends:
    """Return the rates from a place to a hub next to it, and back."""
    if (place, hub) in found:
        return found[place, hub]
    back, there = found[hub, place]
    return _Ends(there, back)
