"""Nodes with other numbers of NICs than GPUs, by hand and as what-ifs of every profile."""

from __future__ import annotations

import msgspec
import pytest

from calibrate.published import PUBLISHED
from sim.base.errors import InputError
from sim.base.overrides import override
from sim.base.presets import preset_names
from sim.engine.costs.cost import CostModel
from sim.engine.costs.measured import measured_cluster
from sim.engine.play.clock import Clock
from sim.engine.play.network import Network
from sim.engine.traffic.collectives import link_traffic
from sim.engine.traffic.least import least_seconds, needs
from sim.words.profile import load_profile
from tests.engine.costs.test_measured_points import COLLECTIVES
from tests.engine.costs.test_transfers import GROUPS, SIZES, Machine
from tests.helpers import make_cluster_spec, slow_but
from topology.cluster import Cluster, load_cluster
from topology.specs import LinkSpec, NicSpec

MB = 10**6
KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")


def machine(per_node: int | None, stripe: int | None = None, gpus: int = 4, each: float = 1e8) -> Cluster:
    """Two nodes of toy GPUs with NICs of 100 MB/s."""
    nic = NicSpec(bytes_per_s=each, latency_s=0.0, per_node=per_node, stripe=stripe)
    return Cluster(make_cluster_spec(gpus, nodes=2, nvlink=LinkSpec(bytes_per_s=1e12, latency_s=0.0), nic=nic))


def ends_s(cluster: Cluster, *pairs: tuple[int, int]) -> list[float]:
    """Return when messages of 1 MB end that begin together."""
    clock, ends = Clock(), [0.0] * len(pairs)
    network, cost = Network(clock, cluster.resources), CostModel(cluster, None)
    for number, (source, target) in enumerate(pairs):

        def ended(at: int = number) -> None:
            ends[at] = clock.now

        network.run(cost.transfer(source, target, MB, tuple(range(8))), ended)
    clock.run()
    return ends


def test_gpus_share_the_nearest_nic() -> None:
    """1 MB at 100 MB/s: 10 ms. GPUs 0 and 1 have one of two NICs, 2 and 3 the other, in the other node as well."""
    cluster = machine(2)
    assert ends_s(cluster, (0, 4)) == pytest.approx([0.01])
    assert ends_s(cluster, (0, 4), (1, 5)) == pytest.approx([0.02, 0.02])
    assert ends_s(cluster, (0, 4), (2, 6)) == pytest.approx([0.01, 0.01])
    assert ends_s(cluster, (0, 4), (2, 5)) == pytest.approx([0.02, 0.02]), "into one NIC"
    assert ends_s(cluster, (0, 4), (4, 0)) == pytest.approx([0.01, 0.01]), "both ways"
    assert ends_s(machine(4), (0, 4), (1, 5)) == pytest.approx([0.01, 0.01])


def test_a_flow_in_stripes_has_the_rate_of_all_its_nics() -> None:
    """Two NICs carry half of it each: 5 ms alone, 10 when the neighbour sends, too, which is what both have apart."""
    cluster = machine(4, stripe=2)
    assert cluster.route(0, 4).bytes_per_s == 2e8
    assert ends_s(cluster, (0, 4)) == pytest.approx([0.005])
    assert ends_s(cluster, (0, 4), (1, 5)) == pytest.approx([0.01, 0.01])
    assert ends_s(cluster, (0, 4), (2, 6)) == pytest.approx([0.005, 0.005])
    assert ends_s(machine(2, stripe=2), (0, 4), (3, 7)) == pytest.approx([0.01, 0.01])


def test_a_gpu_with_several_nics_uses_them_all() -> None:
    """32 of 100 Gb/s are, for 8 GPUs, 8 of 400: an AWS P5 node."""
    plain = msgspec.structs.replace(load_cluster("hgx-h100"), nodes=2)
    assert plain.nic is not None
    many = msgspec.structs.replace(plain, nic=msgspec.structs.replace(plain.nic, bytes_per_s=12.5e9, per_node=32))
    one, other = Cluster(plain), Cluster(many)
    assert [resource._replace(name="") for resource in other.resources] == [
        resource._replace(name="") for resource in one.resources
    ]
    assert all(one.route(0, gpu) == other.route(0, gpu) for gpu in range(1, 16))
    assert {name for name in (one.name for one in other.resources) if name.endswith("nic.out")} == {
        f"nic[{number}].nic.out" for number in range(0, 64, 4)
    }


def test_what_is_held_to_pcie_is_not_faster_in_stripes() -> None:
    """A route of hgx-h100 has 55.3 GB/s of PCIe at most, however many NICs of 50 it may use."""
    spec = override(load_cluster("hgx-h100"), [("nodes", "2"), ("nic.stripe", "4")], "--set")
    assert Cluster(spec).route(0, 8).bytes_per_s == 63e9 * 0.877


@pytest.mark.parametrize("kind", KINDS)
def test_half_of_the_nics_carry_twice_as_much_each(kind: str) -> None:
    """Also by what is needed at least. Stripes change neither, where all GPUs of a node send."""
    loads, least = [], []
    for cluster in (machine(8, gpus=8), machine(4, gpus=8), machine(4, stripe=2, gpus=8), machine(1, gpus=8)):
        ranks = tuple(range(16))
        traffic = link_traffic(COLLECTIVES[kind].name, ranks, MB, cluster)
        loads.append(
            max(n / one.capacity for i, n in traffic.nbytes.items() if (one := cluster.resources[i]).group == "nic")
        )
        least.append(least_seconds(needs(COLLECTIVES[kind].name, ranks, MB, cluster), cluster))
    for found in (loads, least):
        assert found == pytest.approx([found[0], 2 * found[0], 2 * found[0], 8 * found[0]])


WHAT_IFS = {8: [[("nic.per_node", "4")], [("nic.per_node", "2")], [("nic.per_node", "1")]],
            72: [[("nic.per_node", "36")], [("nic.per_node", "18")]]}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"h100-sxm"}, PUBLISHED))
def test_fewer_nics_are_not_faster(name: str) -> None:
    """Where it was measured over NICs; all are no faster than any algorithm at the NICs' rates."""
    profile = load_profile(name)
    measured = {point.kernel for point in profile.points if point.variant == "nic"}
    what_ifs = WHAT_IFS[measured_cluster(profile).gpus_per_node]
    for nodes, per_node in GROUPS:
        machines = [Machine(name, nodes, per_node, *changes) for changes in ([], *what_ifs)]
        for kind in ("exchange", *KINDS):
            for nbytes in SIZES[6::4]:
                times = [one.seconds(kind, nbytes) for one in machines]
                if kind in measured or nodes == 1:
                    assert sorted(times) == pytest.approx(times, rel=1e-9), (nodes, per_node, kind, nbytes)
                for one, took in zip(machines, times, strict=True):
                    assert took >= one.least_s(kind, nbytes) * (1 - 1e-9)


@pytest.mark.parametrize("name", slow_but({"h100-sxm"}, PUBLISHED))
def test_stripes_help_who_sends_alone(name: str) -> None:
    """Between whole nodes all NICs are busy without them, too: collectives take what they took."""
    plain, striped = (Machine(name, 2, 8, *changes) for changes in ([], [("nic.stripe", "2")]))
    for kind in KINDS:
        for nbytes in SIZES[6:]:
            assert striped.seconds(kind, nbytes) == pytest.approx(plain.seconds(kind, nbytes), rel=1e-9), (kind, nbytes)
    for nbytes in SIZES[6:]:
        assert striped.seconds("exchange", nbytes) <= plain.seconds("exchange", nbytes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("nic.per_node", "0")], r"nic.per_node=0: expected a whole number >= 1"),
        ([("nic.per_node", "3")], r"nic.per_node 3 of cluster 'hgx-h100': expected a divisor or a multiple of its 8"),
        ([("nic.per_node", "12")], r"nic.per_node 12 of cluster"),
        ([("nic.stripe", "0")], r"nic.stripe=0: expected a whole number >= 1"),
        ([("nic.stripe", "3")], r"nic.stripe 3 of .* 8 NICs for 8 GPUs .* set it to one of 1, 2, 4, 8$"),
        ([("nic.stripe", "16")], r"nic.stripe 16 of .* one of 1, 2, 4, 8$"),
        ([("nic.per_node", "4"), ("nic.stripe", "8")], r"nic.stripe 8 .* of 4 NICs .* one of 1, 2, 4$"),
        ([("nic.per_node", "32"), ("nic.stripe", "2")], r"nic.stripe 2 .* one of 4, 8, 16, 32$"),
        ([("gpus_per_node", "6"), ("nic.per_node", "4")], r"nic.per_node 4 of .* its 6 GPUs a node"),
    ],
)
def test_counts_that_make_no_sense_are_refused(changes: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        override(load_cluster("hgx-h100"), changes, "--set cluster.")


@pytest.mark.parametrize("name", sorted({*preset_names("topology/hardware")} - {"a10g"}))
def test_presets_have_a_nic_per_gpu(name: str) -> None:
    """But the servers of A10G, which have one."""
    spec = load_cluster(name)
    assert load_cluster("a10g").nics_per_node == 1
    assert (spec.nics_per_node, spec.nics_per_flow, spec.stripe_width) == (spec.gpus_per_node, 1, 1)
