"""Measured times of communication on other machines and in other groups than those that were measured."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from calibrate.published import PUBLISHED, between_nodes
from sim.base.overrides import override
from sim.engine.channels import peer_of
from sim.engine.costs.cost import CostModel
from sim.engine.costs.measured import measured_cluster
from sim.engine.costs.phases import Activity, Flow, Latency
from sim.engine.traffic.least import least_seconds, needs
from sim.words.profile import load_profile
from tests.engine.costs.test_measured_points import COLLECTIVES
from tests.helpers import slow_but
from topology.cluster import Cluster, load_cluster

SUM = COLLECTIVES["all_reduce"]
SIZES = tuple(2**n for n in range(10, 33))
GROUPS = [(1, 2), (1, 3), (1, 8), (2, 1), (2, 4), (2, 8), (3, 6), (5, 1), (5, 8), (16, 1)]
"""Nodes and ranks a node, measured and not."""
SLOWER_RINGS = {("gb200-nvl72", 2, 8, 2**26): 1.126, ("gb300-nvl72", 5, 8, 2**26): 1.1394}
"""How many times as long as an all-reduce a reduce-scatter takes, by profile, nodes, ranks a node and bytes, where that
is more: a ring of 15 steps, 71 us before any byte, of which a NIC gets 7.9 MB, and trees between switches that sum, 35
us and 8.4 MB. NCCL's own tuning has the same of as many H100 (rows ring and nvls_tree, SIMPLE, 2 nodes of 8: latencies
70 and 53 us)."""


def seconds(activity: Activity) -> float:
    return sum(phase.seconds for phase in activity if isinstance(phase, Flow | Latency))


class Machine:
    """One profile's machine, with so many ranks on each of so many nodes."""

    def __init__(self, name: str, nodes: int, per_node: int, *what_if: tuple[str, str]) -> None:
        profile = load_profile(name)
        spec = override(measured_cluster(profile), [("nodes", str(nodes)), *what_if], "--set")
        self.ranks = tuple(node * spec.gpus_per_node + place for node in range(nodes) for place in range(per_node))
        last = per_node - 1 if nodes > 1 else 0
        self._neighbours = self.ranks[last : last + 2]
        self._cost = CostModel(Cluster(spec), profile)

    def seconds(self, kind: str, nbytes: int) -> float:
        """Return how long the whole of so many bytes takes."""
        if kind == "exchange":
            source, target = self._neighbours
            return seconds(self._cost.transfer(source, target, nbytes, self.ranks))
        return seconds(self._cost.collective(COLLECTIVES[kind], self.ranks, self._part(kind, nbytes)))

    def busiest(self, nbytes: int) -> float:
        """Return the bytes of a message's busiest channel."""
        spec = self._cost._cluster.spec
        peer = peer_of(spec, len({rank // spec.gpus_per_node for rank in self.ranks}), len(self.ranks))
        return peer.busiest(nbytes) if peer else nbytes

    def least_s(self, kind: str, nbytes: int) -> float:
        """Return what no algorithm beats."""
        cluster = self._cost._cluster
        if kind == "exchange":
            return nbytes / cluster.route(*self._neighbours).bytes_per_s
        name = COLLECTIVES[kind].name
        return least_seconds(needs(name, self.ranks, self._part(kind, nbytes), cluster), cluster)

    def _part(self, kind: str, nbytes: int) -> int:
        return nbytes if kind == "all_reduce" else nbytes // len(self.ranks)


@pytest.mark.parametrize("mib", [1, 16, 64])
def test_a_wider_nic_reaches_what_was_measured_over_nics(mib: int) -> None:
    """Two nodes of 8: all but the latency goes by the rate of the way over NICs, which PCIe ends. Also where trees over
    NVLink's chains are what takes longest at the links' rates.
    """
    profile = load_profile("h100-sxm")
    rates, latencies_s, flows_s = [], [], []
    for factor in ("/2", "*1", "*1.1", "*2"):
        cluster = Cluster(override(measured_cluster(profile), [("nic.bytes_per_s", factor)], "--set"))
        *before, flow = CostModel(cluster, profile).collective(SUM, tuple(range(16)), mib * 2**20)
        assert isinstance(flow, Flow)
        rates.append(cluster.route(0, 8).bytes_per_s)
        latencies_s.append(seconds(tuple(before)))
        flows_s.append(flow.seconds)
    assert rates[:3] == pytest.approx([25e9, 50e9, 55e9])
    assert rates[2] < rates[3] <= 63e9, "PCIe"
    assert latencies_s == [latencies_s[0]] * 4
    assert [rate * flow_s for rate, flow_s in zip(rates, flows_s, strict=True)] == pytest.approx(
        [rates[1] * flows_s[1]] * 4
    )


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"a100-sxm", "h100-sxm"}, PUBLISHED))
def test_times_grow_with_bytes_and_not_faster(name: str) -> None:
    """Twice the bytes never take less, and 2.4 times as long at most: all-reduce of 4 MiB on 4 B200, in the table."""
    for nodes, per_node in GROUPS:
        machine = Machine(name, nodes, per_node)
        for kind in ("exchange", *COLLECTIVES):
            times = [machine.seconds(kind, nbytes) for nbytes in SIZES if nbytes >= 16 * nodes * per_node]
            for small, large in pairwise(times):
                assert small * (1 - 1e-9) <= large <= 2.4 * small, (nodes, per_node, kind)


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"h100-sxm"}, PUBLISHED))
def test_no_size_is_a_cliff(name: str) -> None:
    """A twelfth more bytes take no tenth longer than by that twelfth. Steps of the sources are inside: 4.8 % for short
    all-reduces on 16 A100 nodes. They take no less, but where all-reduces between measured groups turn from trees to
    rings, which put fewer bytes on the NICs, no tenth either; and where NCCL gives a message another channel, whose
    share of the bytes is what one takes that has fewer channels than measured ones.
    """
    for nodes, per_node in GROUPS:
        machine = Machine(name, nodes, per_node)
        for kind in ("exchange", *COLLECTIVES):
            sizes = [16 * len(machine.ranks) * round(2 ** (n / 8)) for n in range(3 * 8, 23 * 8)]
            times = [machine.seconds(kind, nbytes) for nbytes in sizes]
            for (few, short_s), (many, long_s) in pairwise(zip(sizes, times, strict=True)):
                least = 0.9 if kind == "all_reduce" and nodes > 1 else 1 - 1e-9
                if kind == "exchange" and machine.busiest(many) < machine.busiest(few):
                    least = 0.85
                assert least * short_s <= long_s <= 1.1 * many / few * short_s, (nodes, per_node, kind, many)


@pytest.mark.parametrize("name", slow_but({"a100-sxm", "h100-sxm"}, PUBLISHED))
def test_what_collectives_cost_beside_each_other(name: str) -> None:
    """Sums that every rank gets take no less than those of which it gets a part; of an all-to-all half leaves a node of
    two, of an all-gather a sixteenth of that from each NIC. Smaller reduce-scatters are rings of many steps, where an
    all-reduce is a tree.
    """
    for nodes, per_node in GROUPS:
        machine = Machine(name, nodes, per_node)
        for nbytes in (2**26, 2**28, 2**30):
            times = {kind: machine.seconds(kind, nbytes) for kind in COLLECTIVES}
            slower = SLOWER_RINGS.get((name, nodes, per_node, nbytes))
            assert times["reduce_scatter"] <= 1.01 * (slower or 1.0) * times["all_reduce"], (nodes, per_node, nbytes)
            if slower:
                assert times["reduce_scatter"] == pytest.approx(slower * times["all_reduce"], rel=1e-3)
            if nodes > 1 and per_node == 8:
                assert times["all_to_all"] > 1.3 * times["all_gather"], (nodes, per_node, nbytes)


def test_nccl_takes_longer_for_the_parts_of_sums_than_for_sums() -> None:
    """Of 64 MiB on 2 nodes of 8 H100, by its tuning: what ``SLOWER_RINGS`` rests on; of 1 GiB it does not."""
    of = between_nodes._Group(2, 8)
    parts, whole = (
        [between_nodes._tuned_s(kind, of, n) for n in (2**26, 2**30)] for kind in ("reduce_scatter", "all_reduce")
    )
    assert parts[0] == pytest.approx(310.9e-6, rel=1e-3)
    assert whole[0] == pytest.approx(304.6e-6, rel=1e-3)
    assert parts[1] < 0.8 * whole[1]


@pytest.mark.parametrize("name", slow_but({"a100-sxm", "b200-sxm", "h100-sxm"}, PUBLISHED))
def test_sums_over_nodes_take_no_less_than_in_one(name: str) -> None:
    """Each node has to sum its own, too, though of a ring's hops one of all ranks' passes NICs in place of a port: 64
    MiB take 278 us in one node of 8 B200, where the NICs of two would take 203.
    """
    for nodes, per_node in GROUPS:
        within, over = Machine(name, 1, per_node), Machine(name, nodes, per_node)
        for nbytes in (2**20, 2**24, 2**26, 2**28, 2**30):
            least_s = (1 - 1 / (nodes * per_node)) * within.seconds("all_reduce", nbytes)
            assert over.seconds("all_reduce", nbytes) >= least_s, (nodes, per_node, nbytes)


@pytest.mark.parametrize("name", slow_but({"a100-sxm", "h100-sxm"}, PUBLISHED))
@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_one_rank_a_node_never_sees_nvlink(name: str, nodes: int) -> None:
    """Its time is that of the NICs at least, and ten times the NVLink changes nothing."""
    machine, faster = Machine(name, nodes, 1), Machine(name, nodes, 1, ("nvlink.bytes_per_s", "*10"))
    nic = measured_cluster(load_profile(name)).nic
    assert nic is not None
    for kind in ("exchange", *COLLECTIVES):
        for nbytes in (2**16, 2**24, 2**30):
            across = nbytes * {"exchange": 1.0, "all_reduce": 2 * (nodes - 1) / nodes}.get(kind, (nodes - 1) / nodes)
            assert machine.seconds(kind, nbytes) >= across / nic.bytes_per_s
            assert faster.seconds(kind, nbytes) == machine.seconds(kind, nbytes)


def test_hops_of_h100_take_what_their_ring_is_given() -> None:
    """32 MiB: 103 us between two ranks of a node (Vidur, 34 MB), 421 in a ring of 8 (nccl-tests), which NCCL gives a
    quarter of the channels; 1401 around 10 nodes with one rank each, 2272 with all 8 of each.
    """
    expected = {(1, 2): 101e-6, (1, 8): 421.45e-6, (10, 1): 1400.87e-6, (10, 8): 2271.7e-6}
    for (nodes, per_node), took in expected.items():
        assert Machine("h100-sxm", nodes, per_node).seconds("exchange", 2**25) == pytest.approx(took, rel=0.02)


@pytest.mark.parametrize("name", ["hgx-h100", "a100-pcie", "dgx-a100"])
def test_a_message_costs_what_it_costs_alone(name: str) -> None:
    """Messages between like places are costed once: to the last bit what each is by itself, over its own way."""
    spec = load_cluster(name)
    cluster = Cluster(msgspec.structs.replace(spec, nodes=3 if spec.nic else 1))
    ranks = tuple(range(len(cluster.devices)))
    profile = load_profile(spec.profile) if spec.profile else None
    together = CostModel(cluster, profile)
    for source in ranks:
        for target in ranks:
            if source != target:
                alone = CostModel(cluster, profile).transfer(source, target, 2**20, ranks)
                assert together.transfer(source, target, 2**20, ranks) == alone


@pytest.mark.parametrize("name", ["hgx-h100", "a100-pcie", "dgx-a100"])
def test_a_collective_costs_what_it_costs_alone(name: str) -> None:
    """Collectives of groups in like places are costed once; where only those of the first node are played, too."""
    spec = load_cluster(name)
    cluster = Cluster(msgspec.structs.replace(spec, nodes=4 if spec.nic else 1))
    profile = load_profile(spec.profile) if spec.profile else None
    together, per_node, count = CostModel(cluster, profile), spec.gpus_per_node, len(cluster.devices)
    groups = [tuple(range(first, first + size)) for size in (2, per_node) for first in range(0, count, size)]
    across = [tuple(range(place, count, per_node)) for place in range(per_node)] if spec.nic else []
    groups += [*across, (1, 0), (per_node + 1, per_node), (0, per_node, 1), (2 * per_node, 0, 1)] if spec.nic else []
    for op in COLLECTIVES.values():
        for group in groups:
            played = per_node if group in across else None
            alone = CostModel(cluster, profile).collective(op, group, 2**20, played)
            assert together.collective(op, group, 2**20, played) == alone, (op.name, group)
