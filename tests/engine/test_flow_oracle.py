"""Collectives as loads on links, against an oracle that knows none of it: each message a flow of its own, max-min fair.

The oracle fills links progressively, lets the flows that are done go, and fills again; latencies are left out.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from sim.engine.collectives import LinkTraffic, link_traffic
from topology.cluster import Cluster, load_cluster


class Flow(NamedTuple):
    source: int
    target: int
    nbytes: float


class Uses(NamedTuple):
    """Which flow uses which link, one entry each."""

    flow: np.ndarray
    link: np.ndarray

    def on_links(self, of_flows: np.ndarray, links: int) -> np.ndarray:
        """Return the sum over its flows, per link."""
        return np.bincount(self.link, of_flows[self.flow], links)

    def of_flows(self, on_links: np.ndarray, flows: int) -> np.ndarray:
        """Return the sum over its links, per flow."""
        return np.bincount(self.flow, on_links[self.link], flows)


def completion_s(flows: list[Flow], cluster: Cluster) -> float:
    """Return when the last flow is done."""
    routes = [cluster.route(flow.source, flow.target).resources for flow in flows]
    uses = Uses(np.repeat(np.arange(len(flows)), [len(route) for route in routes]), np.concatenate(routes))
    capacity = np.array([resource.capacity for resource in cluster.resources])
    whole = np.array([flow.nbytes for flow in flows])
    left, now_s = whole.copy(), 0.0
    while (left > 0).any():
        going = left > 0
        rates = fair_rates(uses, capacity, going)
        step_s = (left[going] / rates[going]).min()
        left = np.where(going, left - rates * step_s, left)
        left[left < 1e-9 * whole] = 0
        now_s += step_s
    return now_s


def fair_rates(uses: Uses, capacity: np.ndarray, going: np.ndarray) -> np.ndarray:
    """Return the max-min fair rates of the flows that are going: the tightest link's share first."""
    rates, rising, left = np.zeros(len(going)), going.copy(), capacity.copy()
    while rising.any():
        users = uses.on_links(rising.astype(float), len(capacity))
        shares = np.where(users > 0, left / np.maximum(users, 1), np.inf)
        level = shares.min()
        tight = (shares <= level * (1 + 1e-9)).astype(float)
        stopped = rising & (uses.of_flows(tight, len(going)) > 0)
        rates[stopped] = level
        left = np.maximum(left - uses.on_links(stopped * level, len(capacity)), 0)
        rising &= ~stopped
    return rates


def all_to_all(cluster: Cluster, part: float) -> list[Flow]:
    ranks = range(len(cluster.devices))
    return [Flow(source, target, part) for source in ranks for target in ranks if source != target]


def ring_all_reduce(cluster: Cluster, nbytes: float) -> list[Flow]:
    """Every ring passes its share of the tensor around twice, but for one hop each; it leaves a node by one NIC."""
    width, ranks = cluster.spec.gpus_per_node, len(cluster.devices)
    flows = []
    for ring in range(width):
        order = []
        for node in range(cluster.spec.nodes):
            order += [node * width + (ring - node + member) % width for member in range(width)]
        flows += [Flow(*hop, 2 * (ranks - 1) / ranks * nbytes / width) for hop in pairwise([*order, order[0]])]
    return flows


def flow_s(traffic: LinkTraffic, cluster: Cluster) -> float:
    return traffic.seconds(cluster) - traffic.latency_s


@pytest.mark.parametrize("nodes", [1, 8, 64])
def test_collectives_take_what_their_messages_take(nodes: int) -> None:
    """8, 64 and 512 A100; so much data that all-reduce runs as rings."""
    cluster = Cluster(msgspec.structs.replace(load_cluster("dgx-a100"), nodes=nodes))
    ranks, nbytes = tuple(range(8 * nodes)), 2**36
    port = cluster.route(0, 1).bytes_per_s if nodes == 1 else cluster.route(0, 8).bytes_per_s

    part = nbytes // len(ranks)
    found_s = flow_s(link_traffic("all_to_all", ranks, part, cluster), cluster)
    away = len(ranks) - (1 if nodes == 1 else 8)
    assert found_s >= away * part / port * (1 - 1e-9)
    assert found_s == pytest.approx(completion_s(all_to_all(cluster, part), cluster), rel=0.1)

    found_s = flow_s(link_traffic("all_reduce", ranks, nbytes, cluster), cluster)
    shared = 1 if nodes == 1 else 8  # a node sends what it has to through all of its NICs at once
    assert found_s >= 2 * (nodes - 1 or 7) / (nodes if nodes > 1 else 8) * nbytes / (port * shared) * (1 - 1e-9)
    assert found_s == pytest.approx(completion_s(ring_all_reduce(cluster, nbytes), cluster), rel=0.1)


def test_the_oracle_itself() -> None:
    """Two flows out of one port share it; a third one has its own and is done first, without helping them."""
    cluster = Cluster(msgspec.structs.replace(load_cluster("dgx-a100"), nodes=1))
    rate = cluster.route(0, 1).bytes_per_s
    flows = [Flow(0, 1, rate), Flow(0, 2, 2 * rate), Flow(3, 4, rate)]
    assert completion_s(flows, cluster) == pytest.approx(3.0)
    uses = Uses(np.array([0, 1, 1, 2]), np.array([0, 0, 1, 1]))  # the second flow over both links
    assert fair_rates(uses, np.array([1.0, 10.0]), np.array([True] * 3)) == pytest.approx(np.array([0.5, 0.5, 9.5]))
