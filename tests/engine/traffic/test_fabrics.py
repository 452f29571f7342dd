"""Contention in fabrics, solved by hand for each kind; and on random ones against an oracle that solves it otherwise.

All are of GPUs with NICs of 10 GB/s; a message is of 10 GB, so that it takes a second alone.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from sim.engine.costs.cost import CostModel
from sim.engine.play.clock import Clock
from sim.engine.play.network import Network
from sim.engine.traffic.collectives import link_traffic
from sim.schedule.ir.ops import CollectiveName
from tests.helpers import slow_but
from topology.cluster import Cluster, load_cluster
from topology.kinds import (
    CircuitsSpec,
    DragonflyPlusSpec,
    Fabric,
    FatTreeSpec,
    FullMeshSpec,
    MeshSpec,
    RailOnlySpec,
    RailOptimisedSpec,
    TorusSpec,
)
from topology.specs import LinkSpec, NicSpec, PerGpu

RATE = 10e9
NBYTES = 10**10


def cluster_of(fabric: Fabric | None, nodes: int, gpus: int = 1, *, per_node: int | None = None) -> Cluster:
    """Return nodes of H100 with NICs of 10 GB/s and an NVLink of 100 GB/s, without latencies."""
    return Cluster(
        msgspec.structs.replace(
            load_cluster("hgx-h100"),
            nodes=nodes,
            gpus_per_node=gpus,
            nvlink=LinkSpec(bytes_per_s=100e9, latency_s=0.0),
            nic=NicSpec(bytes_per_s=RATE, latency_s=0.0, per_node=per_node),
            fabric=fabric,
        )
    )


class Message(NamedTuple):
    source: int
    target: int
    nbytes: int = NBYTES


def played_s(cluster: Cluster, messages: list[Message]) -> list[float]:
    """Return when each of several messages is there that are sent at once."""
    clock, cost, ends = Clock(), CostModel(cluster, None), [0.0] * len(messages)
    network = Network(clock, cluster.resources)
    group = tuple(range(len(cluster.devices)))

    def ended(number: int) -> None:
        ends[number] = clock.now

    for number, one in enumerate(messages):
        network.run(cost.transfer(*one, group), lambda number=number: ended(number))  # type: ignore[misc]
    clock.run()
    return ends


def collective_s(kind: CollectiveName, cluster: Cluster, nbytes: int = NBYTES) -> float:
    traffic = link_traffic(kind, tuple(range(len(cluster.devices))), nbytes, cluster)
    return traffic.seconds(cluster) - traffic.latency_s


TREE = FatTreeSpec(below=(2, 2), above=(2,))


def thin(fabric: FatTreeSpec | RailOptimisedSpec | RailOnlySpec, by: float) -> Fabric:
    return msgspec.structs.replace(fabric, oversubscription=(by,))


def test_a_full_fat_tree_blocks_nobody_and_a_thin_one_its_uplinks() -> None:
    """Nodes 0 and 1 are on one leaf, 2 and 3 on the other. Two messages that cross take the 20 GB/s of two uplinks, or
    half of them; one that stays on its leaf takes none. Of an all-to-all a node sends 3 parts, a leaf 4 parts up.
    """
    crossing = [Message(0, 2), Message(1, 3)]
    assert played_s(cluster_of(TREE, 4), crossing) == pytest.approx([1, 1])
    assert played_s(cluster_of(thin(TREE, 2), 4), crossing) == pytest.approx([2, 2])
    assert played_s(cluster_of(thin(TREE, 2), 4), [Message(0, 2), Message(1, 0)]) == pytest.approx([1, 1])
    assert collective_s("all_to_all", cluster_of(TREE, 4)) == pytest.approx(3)
    assert collective_s("all_to_all", cluster_of(thin(TREE, 2), 4)) == pytest.approx(4)
    assert collective_s("all_gather", cluster_of(thin(TREE, 2), 4)) == pytest.approx(3), "one hop up from each leaf"


def test_of_three_tiers_each_has_its_own_oversubscription() -> None:
    """8 ports, 2 a leaf, 2 leaves a pod, 2 pods; 7 to 1 above the leaves' switches as in arXiv:2407.21783 §3.3.1: what
    4 ports of a pod send to the other one shares 4/7 of one port's rate each, what stays in the pod shares nothing.
    """
    cluster = cluster_of(FatTreeSpec(below=(2, 2, 2), above=(2, 2), oversubscription=(1.0, 7.0)), 8)
    assert played_s(cluster, [Message(node, node + 4) for node in range(4)]) == pytest.approx([7.0] * 4)
    assert played_s(cluster, [Message(node, node ^ 2) for node in range(4)]) == pytest.approx([1.0] * 4)
    assert played_s(cluster, [Message(0, 4)]) == pytest.approx([7 / 4]), "one alone is slower than its NIC, too"


def test_rails_keep_what_they_can_off_the_spine() -> None:
    """Two nodes of two GPUs: GPUs 0 and 2 on the first leaf, 1 and 3 on the second, uplinks of a tenth. With PXN what
    GPU 0 has for GPU 3 goes over NVLink to GPU 1, on whose rail GPU 3 is; without it over the spine, by one uplink of
    20 GB/s / 10.
    """
    rails = RailOptimisedSpec(below=(2, 2), above=(1,), oversubscription=(10.0,))
    assert played_s(cluster_of(rails, 2, 2), [Message(0, 2), Message(1, 3)]) == pytest.approx([1, 1])
    assert played_s(cluster_of(rails, 2, 2), [Message(0, 3)]) == pytest.approx([1])
    without = msgspec.structs.replace(rails, pxn=False)
    assert played_s(cluster_of(without, 2, 2), [Message(0, 3)]) == pytest.approx([5])
    assert played_s(cluster_of(without, 2, 2), [Message(0, 2)]) == pytest.approx([1])


def test_rails_alone_send_all_to_all_through_the_nodes() -> None:
    """GPU 1's NIC carries what GPUs 0 and 1 have for GPU 3. So all NICs carry 2 parts of the all-to-all, as with a
    switch for all; and NVLink to GPU 1 two of GPU 0: its own and that for GPU 3.
    """
    alone = cluster_of(RailOnlySpec(below=(2,)), 2, 2)
    assert played_s(alone, [Message(0, 3), Message(1, 3)]) == pytest.approx([2, 2])
    traffic = link_traffic("all_to_all", (0, 1, 2, 3), NBYTES, alone).nbytes
    named = {alone.resources[link].name: nbytes / NBYTES for link, nbytes in traffic.items()}
    assert named["nic[0].nic.out"] == named["nic[3].nic.in"] == 2
    assert named["gpu[1].nvlink.in"] == named["gpu[0].nvlink.out"] == 2
    everyone = cluster_of(None, 2, 2)
    assert collective_s("all_to_all", alone) == pytest.approx(collective_s("all_to_all", everyone))


def test_nics_that_gpus_share_are_one_rail() -> None:
    """4 GPUs on 2 NICs: 0 and 1 are on the first rail. What 0 sends to 5 needs no NVLink; to 6 it goes over GPU 2."""
    cluster = cluster_of(RailOnlySpec(below=(2,)), 2, 4, per_node=2)
    names = [[cluster.resources[one].name for one in cluster.route(0, target).resources] for target in (5, 6)]
    assert names[0] == ["gpu[0].pcie.out", "nic[0].nic.out", "nic[2].nic.in", "gpu[5].pcie.in"]
    assert names[1] == [
        "gpu[0].nvlink.out", "gpu[2].nvlink.in", "gpu[2].pcie.out", "nic[1].nic.out", "nic[3].nic.in", "gpu[6].pcie.in"
    ]  # fmt: skip


DRAGONFLY = DragonflyPlusSpec(below=2, leaves=1, spines=2, global_links=1)


def test_groups_of_a_dragonfly_share_the_links_between_them() -> None:
    """3 groups of 2 ports, each with 2 global links: one to each other group. What both ports send to the same group
    shares one link, to different ones nothing. With 2 links each spine there are two to each group.
    """
    cluster = cluster_of(DRAGONFLY, 6)
    assert played_s(cluster, [Message(0, 2), Message(1, 3)]) == pytest.approx([2, 2])
    assert played_s(cluster, [Message(0, 2), Message(1, 4)]) == pytest.approx([1, 1])
    wide = cluster_of(msgspec.structs.replace(DRAGONFLY, global_links=2), 6)
    assert played_s(wide, [Message(0, 2), Message(1, 3)]) == pytest.approx([1, 1])
    slow = cluster_of(msgspec.structs.replace(DRAGONFLY, global_bytes_per_s=RATE / 4), 6)
    assert played_s(slow, [Message(0, 2)]) == pytest.approx([4])


def test_a_full_mesh_has_a_link_for_each_pair_of_a_dimension() -> None:
    """2 x 3 nodes. Along a dimension nobody shares a link; 0 to 4 goes over 1, whose link to 4 is also that of 1 to 4.
    Of an all-to-all such a link carries the parts of 0, 1 and 2 for 4, each a second.
    """
    cluster = cluster_of(FullMeshSpec(dims=(2, 3)), 6)
    assert cluster.path(0, 4) == ["gpu[0]", "gpu[1]", "gpu[4]"]
    assert played_s(cluster, [Message(0, 1), Message(0, 2), Message(0, 3)]) == pytest.approx([1, 1, 1])
    assert played_s(cluster, [Message(0, 4), Message(1, 4)]) == pytest.approx([2, 2])
    assert collective_s("all_to_all", cluster) == pytest.approx(3)
    alone = cluster_of(FullMeshSpec(dims=(6,)), 6)
    assert collective_s("all_to_all", alone) == pytest.approx(1)
    # straight to the owners over five links each, where a ring takes one of them five times
    assert collective_s("all_gather", alone) == collective_s("reduce_scatter", alone) == pytest.approx(1)
    assert collective_s("all_reduce", alone) == pytest.approx(2 / 6)
    assert collective_s("all_gather", cluster_of(TorusSpec(dims=(6,)), 6)) == pytest.approx(5)


def test_circuits_are_rings_of_their_strides() -> None:
    """8 nodes. A ring of stride 1 alone carries a message of 0 to 2 over 1; a second one of stride 2 carries it at
    once. An all-to-all over one ring is 8 nodes' 16 hops (1+1+2+2+3+3+4) over 16 links, but of the 4 steps the way up
    is taken: 1+2+3+4 parts over each link upwards.
    """
    ring = cluster_of(CircuitsSpec(), 8)
    assert ring.path(0, 2) == ["gpu[0]", "gpu[1]", "gpu[2]"]
    assert played_s(ring, [Message(0, 2), Message(1, 2)]) == pytest.approx([2, 2])
    assert collective_s("all_to_all", ring) == pytest.approx(1 + 2 + 3 + 4)
    two = cluster_of(CircuitsSpec(strides=(1, 2)), 8)
    assert two.path(0, 2) == ["gpu[0]", "gpu[2]"]
    assert played_s(two, [Message(0, 2), Message(1, 2)]) == pytest.approx([1, 1])
    assert len([one for one in two.resources if one.group == "nic"]) == 8 * 4


FABRICS: list[tuple[Fabric, int, int]] = [
    (FatTreeSpec(below=(8,)), 4, 2),
    (TREE, 4, 1),
    (FatTreeSpec(below=(4, 4), above=(4,)), 8, 2),
    (FatTreeSpec(below=(2, 2, 4), above=(2, 2)), 8, 2),
    (RailOptimisedSpec(below=(4, 4), above=(4,)), 8, 2),
    (RailOptimisedSpec(below=(4, 4), above=(4,), pxn=False), 8, 2),
    (RailOnlySpec(below=(4, 2), above=(4,)), 8, 2),
    (DragonflyPlusSpec(below=2, leaves=2, spines=2, global_links=2), 8, 2),
    (DragonflyPlusSpec(below=4, leaves=2, spines=4, global_links=3), 12, 2),
    (FullMeshSpec(dims=(3, 4)), 12, 1),
    (MeshSpec(dims=(3, 4)), 12, 1),
    (TorusSpec(dims=(2, 2, 3)), 12, 1),
    (CircuitsSpec(strides=(1, 5)), 12, 1),
]  # fmt: skip
"""Of which no link between switches is narrower than what one port sends over it, so that all messages between nodes
are as fast alone: then fair shares of speed, which the engine gives, are fair shares of bytes per second."""


def fair_rates(uses: np.ndarray, capacity: np.ndarray, alone: np.ndarray) -> np.ndarray:
    """Return rates that are max-min fair, as shares of what each flow has ``alone``: all rise together until a link is
    full. ``uses``: (links, flows), the share of each flow that a link carries. What comes out is held against what
    defines it: every flow passes a full link on which none is faster (Bertsekas and Gallager, Data Networks, 6.5.2).
    """
    speeds, rising, load = np.zeros(len(alone)), np.ones(len(alone), dtype=bool), uses * alone
    while rising.any():
        asked, left = load @ rising, capacity - load @ np.where(rising, 0.0, speeds)
        level = np.divide(left, asked, out=np.full(len(capacity), np.inf), where=asked > 1e-12 * capacity)
        full = level <= level.min() * (1 + 1e-9)
        stopped = rising & (uses[full] > 0).any(0)
        speeds[stopped] = level.min()
        rising &= ~stopped
    full = load @ speeds >= capacity * (1 - 1e-6)
    assert (load @ speeds <= capacity * (1 + 1e-6)).all()
    fastest = np.where(uses > 0, speeds, 0.0).max(1)
    bottlenecks = full[:, None] & (uses > 0) & (speeds >= fastest[:, None] * (1 - 1e-6))
    assert bottlenecks.any(0).all()
    return speeds * alone


def oracle_s(cluster: Cluster, messages: list[Message], *, of_speed: bool) -> np.ndarray:
    """Return when each message is there, if rates are max-min fair at any time, or speeds are."""
    routes = [cluster.route(one.source, one.target) for one in messages]
    links = sorted({link for route in routes for link in route.load(1)})
    uses = np.array([[route.load(1).get(link, 0.0) for route in routes] for link in links])
    capacity = np.array([cluster.resources[link].capacity for link in links])
    alone = 1 / (uses / capacity[:, None]).max(0) if of_speed else np.ones(len(messages))
    left, now_s, ends = np.array([float(one.nbytes) for one in messages]), 0.0, np.zeros(len(messages))
    while (left > 0).any():
        going = left > 0
        rates = np.zeros(len(messages))
        rates[going] = fair_rates(uses[:, going], capacity, alone[going])
        step_s = (left[going] / rates[going]).min()
        left = np.where(going, left - rates * step_s, 0.0)
        left[left < 1.0] = 0.0  # byte
        now_s += step_s
        ends[going & (left == 0)] = now_s
    return ends


def drawn(rng: np.random.Generator, cluster: Cluster, *, far: bool) -> list[Message]:
    """Return 4 to 24 messages of 1 to 20 GB, between any GPUs or those of different nodes."""
    found: list[Message] = []
    while len(found) < 4 or rng.random() < 0.95:
        source, target = rng.choice(len(cluster.devices), 2, replace=False).tolist()
        if not far or cluster.devices[source].node != cluster.devices[target].node:
            found.append(Message(source, target, int(rng.integers(10**9, 2 * 10**10))))
        if len(found) == 24:
            break
    return found


@pytest.mark.parametrize("seed", slow_but(range(13), range(100)))
def test_random_messages_between_nodes_share_links_as_the_oracle_says(seed: int) -> None:
    """To 1 %, all kinds in turn: their rates are max-min fair."""
    cluster = cluster_of(*FABRICS[seed % len(FABRICS)])
    messages = drawn(np.random.default_rng(seed), cluster, far=True)
    assert played_s(cluster, messages) == pytest.approx(oracle_s(cluster, messages, of_speed=False).tolist(), rel=0.01)


@pytest.mark.parametrize("seed", slow_but(range(13), range(100)))
def test_random_messages_on_random_platforms_share_links_as_the_oracle_says(seed: int) -> None:
    """To 1 %, at random rates of all links and inside nodes, too: the speeds relative to alone are max-min fair."""
    rng = np.random.default_rng(seed)
    spec = cluster_of(*FABRICS[seed % len(FABRICS)]).spec
    per_gpu = {gpu: PerGpu(link=0.25 + rng.random()) for gpu in range(spec.nodes * spec.gpus_per_node)}
    fabric = spec.fabric
    if isinstance(fabric, DragonflyPlusSpec):
        inside, between = (RATE * (0.1 + rng.random()) for _ in range(2))
        fabric = msgspec.structs.replace(fabric, bytes_per_s=inside, global_bytes_per_s=between)
    if isinstance(fabric, FatTreeSpec | RailOptimisedSpec | RailOnlySpec):
        by = tuple(float(1 + 7 * rng.random()) for _ in fabric.above)
        fabric = msgspec.structs.replace(fabric, oversubscription=by)
    cluster = Cluster(msgspec.structs.replace(spec, fabric=fabric, per_gpu=per_gpu))
    messages = drawn(rng, cluster, far=False)
    assert played_s(cluster, messages) == pytest.approx(oracle_s(cluster, messages, of_speed=True).tolist(), rel=0.01)


def test_the_oracle_itself() -> None:
    """Two flows over a link of 1, the second also over one of 10 that a third one has but for it. Two over one of 3,
    with half of the first; and the same where the first has twice the rate of the second alone.
    """
    uses, capacity = np.array([[1.0, 1, 0], [0, 1, 1]]), np.array([1.0, 10.0])
    assert fair_rates(uses, capacity, np.ones(3)) == pytest.approx([0.5, 0.5, 9.5])
    assert fair_rates(np.array([[0.5, 1.0]]), np.array([3.0]), np.ones(2)) == pytest.approx([2, 2])
    assert fair_rates(np.array([[0.5, 1.0]]), np.array([3.0]), np.array([6.0, 3.0])) == pytest.approx([3, 1.5])


@pytest.mark.sweep
@pytest.mark.parametrize(("fabric", "nodes", "gpus"), FABRICS)
@pytest.mark.parametrize("kind", ["all_to_all", "all_gather", "all_reduce"])
def test_collectives_never_beat_their_bound(fabric: Fabric, nodes: int, gpus: int, kind: CollectiveName) -> None:
    from sim.engine.traffic.least import least_seconds, needs

    cluster = cluster_of(fabric, nodes, gpus)
    ranks = tuple(range(nodes * gpus))
    assert least_seconds(needs(kind, ranks, NBYTES, cluster), cluster) <= collective_s(kind, cluster) * (1 + 1e-12)
