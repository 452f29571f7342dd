"""Collectives as loads on links, against an oracle that knows none of it: each message a flow of its own, max-min fair.

The oracle fills links progressively, lets the flows that are done go, and fills again; latencies are left out. Where
SimGrid is installed (Debian's python3-simgrid, PyPI's simgrid), it says whether the oracle is right.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from sim.base.overrides import override
from sim.engine.traffic.collectives import link_traffic
from sim.schedule.ir.ops import CollectiveName
from tests.helpers import slow_but
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


def ends_s(flows: list[Flow], cluster: Cluster) -> np.ndarray:
    """Return when each flow is done."""
    routes = [cluster.route(flow.source, flow.target).resources for flow in flows]
    uses = Uses(np.repeat(np.arange(len(flows)), [len(route) for route in routes]), np.concatenate(routes))
    capacity = np.array([resource.capacity for resource in cluster.resources])
    whole = np.array([flow.nbytes for flow in flows])
    left, now_s, ends = whole.copy(), 0.0, np.zeros(len(flows))
    while (left > 0).any():
        going = left > 0
        rates = fair_rates(uses, capacity, going)
        step_s = (left[going] / rates[going]).min()
        left = np.where(going, left - rates * step_s, left)
        left[left < 1e-9 * whole] = 0
        now_s += step_s
        ends[going & (left == 0)] = now_s
    return ends


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


NBYTES = 2**36
"""What every rank has: so much that all-reduce runs as rings."""


def a100(nodes: int, *changes: tuple[str, str]) -> Cluster:
    return Cluster(override(load_cluster("dgx-a100"), [("nodes", str(nodes)), *changes], "--set"))


def messages(kind: CollectiveName, cluster: Cluster) -> list[Flow]:
    if kind == "all_to_all":
        return all_to_all(cluster, NBYTES // len(cluster.devices))
    return ring_all_reduce(cluster, NBYTES)


def on_links_s(kind: CollectiveName, cluster: Cluster) -> float:
    ranks = tuple(range(len(cluster.devices)))
    traffic = link_traffic(kind, ranks, NBYTES // len(ranks) if kind == "all_to_all" else NBYTES, cluster)
    return traffic.seconds(cluster) - traffic.latency_s


@pytest.mark.parametrize("nodes", slow_but({1, 8}, [1, 8, 64]))
def test_collectives_take_what_their_messages_take(nodes: int) -> None:
    """8, 64 and 512 A100."""
    cluster = a100(nodes)
    ranks = len(cluster.devices)
    port = cluster.route(0, 1).bytes_per_s if nodes == 1 else cluster.route(0, 8).bytes_per_s

    found_s = on_links_s("all_to_all", cluster)
    away = ranks - (1 if nodes == 1 else 8)
    assert found_s >= away * (NBYTES // ranks) / port * (1 - 1e-9)
    assert found_s == pytest.approx(ends_s(messages("all_to_all", cluster), cluster).max(), rel=0.1)

    found_s = on_links_s("all_reduce", cluster)
    shared = 1 if nodes == 1 else 8  # a node sends what it has to through all of its NICs at once
    assert found_s >= 2 * (nodes - 1 or 7) / (nodes if nodes > 1 else 8) * NBYTES / (port * shared) * (1 - 1e-9)
    assert found_s == pytest.approx(ends_s(messages("all_reduce", cluster), cluster).max(), rel=0.1)


@pytest.mark.parametrize("kind", ["all_to_all", "all_reduce"])
@pytest.mark.parametrize(("nics", "stripe", "slower"), [("4", "1", 2), ("2", "1", 4), ("4", "2", 2), ("8", "4", 1)])
def test_messages_share_nics_as_collectives_do(kind: CollectiveName, nics: str, stripe: str, slower: int) -> None:
    """4 nodes of 8 A100: half of the NICs take twice as long, in stripes or not."""
    cluster = a100(4, ("nic.per_node", nics), ("nic.stripe", stripe))
    found_s = on_links_s(kind, cluster)
    assert found_s == pytest.approx(slower * on_links_s(kind, a100(4)))
    assert found_s == pytest.approx(ends_s(messages(kind, cluster), cluster).max(), rel=0.1)


def test_the_oracle_itself() -> None:
    """Two flows out of one port share it; a third one has its own and is done first, without helping them."""
    cluster = a100(1)
    rate = cluster.route(0, 1).bytes_per_s
    flows = [Flow(0, 1, rate), Flow(0, 2, 2 * rate), Flow(3, 4, rate)]
    assert ends_s(flows, cluster) == pytest.approx(np.array([2.0, 3.0, 1.0]))
    uses = Uses(np.array([0, 1, 1, 2]), np.array([0, 0, 1, 1]))  # the second flow over both links
    assert fair_rates(uses, np.array([1.0, 10.0]), np.array([True] * 3)) == pytest.approx(np.array([0.5, 0.5, 9.5]))


SIMGRID = """
import json, sys
from simgrid import Actor, Comm, Engine

# No corrections for TCP: bandwidths as they are, nothing of a flow on the way back.
engine = Engine(["oracle", "--cfg=network/model:CM02", "--cfg=network/crosstraffic:0"])
engine.load_platform(sys.argv[1])

def send_all(flows):
    sent = [Comm.sendto_async(*map(engine.host_by_name, (a, b)), nbytes) for a, b, nbytes in flows]
    for comm in sent:
        comm.wait()
    print([comm.finish_time for comm in sent])

Actor.create("sender", engine.host_by_name("0"), send_all, json.load(sys.stdin))
engine.run()
"""
"""Prints when each flow is done. It takes a process of its own: an engine cannot be used twice."""


def simgrid_s(flows: list[Flow], cluster: Cluster, folder: Path) -> np.ndarray:
    """Return what ``ends_s`` does, from SimGrid: every direction of a link is one of its links."""
    routes = {flow[:2]: cluster.route(*flow[:2]).resources for flow in flows}
    links = sorted({link for route in routes.values() for link in route})
    platform = [
        '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">',
        '<platform version="4.1"><zone id="cluster" routing="Full">',
        *(f'<host id="{rank}" speed="1f"/>' for rank in range(len(cluster.devices))),
        *(f'<link id="{link}" bandwidth="{cluster.resources[link].capacity}Bps" latency="0s"/>' for link in links),
    ]
    for (source, target), route in routes.items():
        passed = "".join(f'<link_ctn id="{link}"/>' for link in route)
        platform.append(f'<route src="{source}" dst="{target}" symmetrical="NO">{passed}</route>')
    path = folder / "platform.xml"
    path.write_text("\n".join([*platform, "</zone></platform>"]))
    sent = json.dumps([(str(flow.source), str(flow.target), round(flow.nbytes)) for flow in flows])
    ended = subprocess.run(
        [sys.executable, "-c", SIMGRID, path], input=sent, stdout=subprocess.PIPE, text=True, check=True
    )
    return np.array(json.loads(ended.stdout))


@pytest.mark.parametrize(
    ("kind", "nodes"), [("all_to_all", 1), ("all_to_all", 8), ("all_reduce", 1), ("all_reduce", 8), ("all_reduce", 64)]
)
def test_simgrid_says_the_same_of_collectives(kind: CollectiveName, nodes: int, tmp_path: Path) -> None:
    """Not of an all-to-all of 512: its time grows with the square of the flows, which are 262 thousand."""
    pytest.importorskip("simgrid")
    cluster = a100(nodes)
    flows = messages(kind, cluster)
    wanted_s = simgrid_s(flows, cluster, tmp_path)
    assert ends_s(flows, cluster) == pytest.approx(wanted_s, rel=1e-6)
    assert on_links_s(kind, cluster) == pytest.approx(wanted_s.max(), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_simgrid_shares_links_as_the_oracle_does(seed: int, tmp_path: Path) -> None:
    """Flows of all sizes between any two GPUs: unlike those of a collective, each ends at a time of its own."""
    pytest.importorskip("simgrid")
    cluster, rng = a100(4), np.random.default_rng(seed)
    pairs = [rng.choice(len(cluster.devices), 2, replace=False).tolist() for _ in range(300)]
    flows = [Flow(*pair, float(rng.integers(2**20, 2**32))) for pair in pairs]
    assert ends_s(flows, cluster) == pytest.approx(simgrid_s(flows, cluster, tmp_path), rel=1e-6)
