"""How many SMs communication holds: NCCL's rules by hand, and the steps in measured rates that they explain."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis.strategies import integers

import longstep
from calibrate.published.reading import rows
from calibrate.published.ultraattn import transfers
from sim.engine.channels import held_by_collective, held_by_messages, peer_of
from sim.engine.costs.cost import CostModel
from sim.words.profile import load_profile
from tests.helpers import make_cluster_spec
from topology.cluster import Cluster, load_cluster

MIB = 2**20


def machine(name: str, nodes: int = 1) -> Cluster:
    return Cluster(msgspec.structs.replace(load_cluster(name), nodes=nodes))


def hop(cluster: Cluster, ranks: int, nbytes: int) -> float:
    """Return the SMs of a hop among the first so many ranks."""
    return held_by_messages(cluster, tuple(range(ranks)), 1, nbytes)


def test_each_channel_of_a_ring_has_the_same_measured_rate() -> None:
    """Rings of 4 and 8 H100 have steps from 80 to 300 GB/s: 4, 8 or 16 channels of some 20 GB/s."""
    cluster, found = machine("hgx-h100"), []
    for row in rows("nccl_h100_multinode_all_collectives"):
        nbytes, gpus = int(row["bytes"]), int(row["gpus"])
        if row["collective"] == "sendrecv" and row["nodes"] == "1" and nbytes <= 256 * MIB:
            found.append(float(row["busbw_GBs_median"]) / hop(cluster, gpus, nbytes))
    assert len(found) == 8
    assert all(18.5 < rate < 21 for rate in found), found


def test_rings_over_nics_have_the_channels_that_their_rate_shows() -> None:
    """nccl-tests on 400 Gb/s: two channels at 2 nodes, 39 to 46 GB/s whatever the ranks; one at 10 nodes, 15 to 27.
    All-gathers send the same way around the 10 nodes at 42 to 48 GB/s, so it is not the fabric that is slow there.
    """
    spec, found = load_cluster("hgx-h100"), set()
    for row in rows("nccl_h100_multinode_all_collectives"):
        nodes, ranks, rate = int(row["nodes"]), int(row["gpus"]), float(row["busbw_GBs_median"])
        if row["cluster"] == "example-cluster01" and nodes > 1 and int(row["bytes"]) > 2**25:
            if row["collective"] == "sendrecv":
                peer = peer_of(spec, nodes, ranks)
                assert peer is not None
                found.add((nodes, peer.most))
                low, high = {1: (15, 27), 2: (39, 47)}[peer.channels(int(row["bytes"]))]
                assert low < rate < high, row
            elif (row["collective"], nodes, ranks) == ("all_gather", 10, 10):
                assert rate > 45, row
    assert found == {(2, 2), (10, 1)}


def test_more_nodes_slow_hops_only_by_the_channels_that_they_take() -> None:
    """A hop of 32 MiB over a NIC and inside a node, in rings of all GPUs of so many nodes. Two channels until there are
    32 ranks, one beyond; a ring whose neighbours have communicators of their own keeps two, and so its rate.
    """
    spec, profile = load_cluster("hgx-h100"), load_profile("h100-sxm")
    hops, notes = {}, {}
    for nodes in (2, 4, 8, 16):
        cluster = Cluster(msgspec.structs.replace(spec, nodes=nodes))
        cost, ranks = CostModel(cluster, profile), tuple(range(8 * nodes))
        for name, source, group in (("far", 7, ranks), ("near", 0, ranks), ("pair", 7, (7, 8))):
            activity = cost.transfer(source, source + 1, 2**25, group)
            hops[name, nodes] = sum(phase.seconds for phase in activity)  # type: ignore[union-attr]
        notes[nodes] = cost.warnings
    for name in ("far", "near"):
        assert hops[name, 2] == hops[name, 4] < hops[name, 8] == hops[name, 16]
    assert len({hops["pair", nodes] for nodes in (2, 4, 8, 16)}) == 1
    assert not notes[2]
    assert not notes[4]
    assert "exchange among 64 ranks: NCCL gives a message 1 channel, and 2 among fewer ranks" in str(notes[8])


def test_a_ring_that_was_not_measured_has_the_rate_of_its_channels() -> None:
    """Of A800 only pairs were measured, at 143 GB/s by 8 channels; a ring of 8 has 2, and a quarter of that rate."""
    spec, profile = load_cluster("a800"), load_profile("a800-ultraattn")
    cost = CostModel(Cluster(spec), profile)
    pair, ring = (cost.transfer(0, 1, 2**25, tuple(range(ranks)))[-1].seconds for ranks in (2, 8))  # type: ignore[union-attr]
    assert ring / pair == pytest.approx(4, rel=0.1)


@pytest.mark.sweep
@given(nbytes=integers(1, 2**34), more=integers(1, 2**34), ranks=integers(2, 600))
def test_a_busiest_channel_never_has_fewer_bytes_of_a_larger_message(nbytes: int, more: int, ranks: int) -> None:
    for nodes in {1, -(-ranks // 8)}:
        peer = peer_of(load_cluster("hgx-h100"), nodes, ranks)
        assert peer is not None
        assert nbytes / peer.channels(nbytes) <= peer.busiest(nbytes) <= peer.busiest(nbytes + more)


def test_a_pair_gets_faster_where_it_gets_more_channels() -> None:
    """Two A800: 143 GB/s at 128 MiB, 155 at 160, and no other step of more than 3 % from 32 MiB on."""
    cluster = machine("a800")
    pair = sorted((point.shape[1], point.median_s) for point in transfers("A800") if point.variant == "nvlink")
    steps = [(a, b, b * a_s / (a * b_s)) for (a, a_s), (b, b_s) in pairwise(pair) if a >= 32 * MIB]
    assert len(steps) > 10
    for before, after, ratio in steps:
        assert (ratio > 1.03) == (hop(cluster, 2, before) < hop(cluster, 2, after)), (before, after)


@pytest.mark.parametrize(
    ("name", "nodes", "ranks", "nbytes", "held"),
    [
        ("hgx-h100", 1, 8, 64 * 1024, 1),  # a channel for each eighth of a chunk of 512 KiB
        ("hgx-h100", 1, 8, 128 * 1024, 2),
        ("hgx-h100", 1, 8, 512 * MIB, 16),  # no more than 4 operations on one of 32 channels
        ("hgx-h100", 1, 2, 64 * MIB, 16),
        ("dgx-a100", 1, 8, 64 * MIB, 4),
        ("a800", 1, 8, 32 * MIB, 2),
        ("hgx-h100", 2, 16, 64 * MIB, 2),  # over a NIC, and to peers in the node of the same communicator
        ("hgx-h100", 8, 64, 64 * MIB, 1),
        ("a100-pcie", 1, 8, 4 * MIB, 1),
        ("a100-pcie", 1, 8, 8 * MIB, 2),
    ],
)
def test_hops_by_hand(name: str, nodes: int, ranks: int, nbytes: int, held: float) -> None:
    assert hop(machine(name, nodes), ranks, nbytes) == held


def test_collectives_by_hand() -> None:
    node, two = machine("hgx-h100"), machine("hgx-h100", 2)
    eight, sixteen = tuple(range(8)), tuple(range(16))
    assert held_by_collective(node, "all_gather", eight, MIB) == 24
    assert held_by_collective(node, "all_to_all", eight, MIB) == 32  # 4 to each rank
    assert held_by_collective(two, "all_to_all", sixteen, MIB) == 16
    assert held_by_collective(two, "reduce_scatter", sixteen, MIB) == 16  # 2 for each NIC of a node
    assert held_by_collective(two, "all_reduce", (0, 8), MIB) == 2
    assert held_by_collective(node, "all_reduce", eight, 10 * 2**15) == 10
    assert held_by_collective(node, "all_gather", eight, 2**15) == 8
    assert held_by_collective(node, "barrier", eight, 0) == 1
    assert held_by_collective(node, "all_gather", (0,), MIB) == 0  # a copy


def test_without_a_figure_of_the_link_messages_hold_what_collectives_do() -> None:
    spec = make_cluster_spec()
    gpu = msgspec.structs.replace(spec.gpu, communication_sms=12)
    plain = Cluster(msgspec.structs.replace(spec, gpu=gpu))
    assert hop(plain, 2, 1) == held_by_collective(plain, "all_to_all", (0, 1), MIB) == 12
    assert hop(Cluster(spec), 2, MIB) == spec.gpu.communication_sms == 0


def test_what_a_hop_holds_is_taken_from_the_kernels_beside_it() -> None:
    """Backward blocks of a ring over 16 nodes run beside hops, whose kernels hold 1, 2 or 24 of 132 SMs."""
    what: dict[str, Any] = {"cluster": "hgx-h100", "gpus": 16, "nodes": 2, "seq": "256K", "passes": "backward"}
    base = longstep.predict("zigzag", **what, scope="attention", profile="datasheet", jitter=0)

    def longest(**more: str) -> float:
        trace = base.replace(set=more).simulation.trace
        return max(row.busy_s for row in trace.rows if row.kind == "AttendBackward")

    found = [longest(**{"cluster.nic.peer_sms": number}) for number in ("1", "2", "16")]
    alone = longest(**{"cluster.gpu.communication_sms": "0"})
    for seconds, held in zip(found, (1, 2, 16), strict=True):
        assert alone < seconds <= alone * 132 / (132 - held) * (1 + 1e-9)
    assert found == sorted(set(found))
