"""How many SMs communication holds: NCCL's rules by hand, and the steps in measured rates that they explain."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

import longstep
from calibrate.published.reading import rows
from calibrate.published.ultraattn import transfers
from sim.engine.channels import held_by_collective, held_by_messages
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
