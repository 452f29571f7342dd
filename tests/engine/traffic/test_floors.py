"""Lower bounds: from totals of what is distinct, as from a pass over the ops."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import get_args

import msgspec
import pytest

from sim.engine.play.facts import part_bytes
from sim.engine.play.fold import Fold
from sim.engine.results.floors import floors
from sim.engine.traffic.collectives import link_traffic
from sim.engine.traffic.least import least_seconds, needs, rate
from sim.schedule.ir.ops import OFFLOAD, Collective, CollectiveName, HostCopy
from sim.schedule.proof.check import Checked
from sim.words.workload import Workload
from tests.helpers import OFFLOADED, VARIANTS, by_tier, checked_or_refused, make_cluster_spec, make_model
from topology.cluster import Cluster, load_cluster
from topology.specs import NicSpec


def floors_by_the_op(checked: Checked, cluster: Cluster) -> dict[str, float]:
    programs, least = checked.schedule.programs, Counter[frozenset[int]]()

    def passed(load: dict[int, float]) -> None:
        least.update({frozenset([link]): nbytes for link, nbytes in load.items()})  # type: ignore[dict-item]

    for transfer in checked.matching.transfers:
        passed(cluster.route(transfer.source[0], transfer.target[0]).load(transfer.nbytes))
    for group in checked.matching.groups:
        rank, index = group.members[0]
        op = programs[rank].ops[index]
        assert isinstance(op, Collective)
        ranks = tuple(member for member, _ in group.members)
        for links, nbytes in needs(op.name, ranks, part_bytes(programs, group.members), cluster):
            least[links] += nbytes  # type: ignore[assignment]
    for program in programs:
        for op in program.ops:
            if isinstance(op, HostCopy):
                passed(cluster.host_route(program.rank, to_host=op.stream == OFFLOAD).load(program.nbytes(op.source)))
    busy = [
        sum(use.flops / cluster.peak_flops_per_s(rank, use.dtype) for use in uses if use)
        for rank, uses in enumerate(checked.kernels)
    ]
    lower = {"compute": max(busy)}
    for links in least:
        nbytes = sum(nbytes for some, nbytes in least.items() if some <= links)
        kind = max((cluster.resources[link].capacity, cluster.resources[link].group) for link in links)[1]
        lower[kind] = max(lower.get(kind, 0.0), nbytes / sum(cluster.resources[link].capacity for link in links))
    return lower


@pytest.mark.parametrize(
    "name",
    by_tier(
        {"zigzag", "ulysses", "upipe, kept and offloaded"}, {"balanced-ring", "allgather"}, [*VARIANTS, *OFFLOADED]
    ),
)
def test_totals_are_the_sums_over_all_ops(name: str) -> None:
    workload = Workload(model=make_model(8, 4), seq=64, scope="layer", layers=2)
    for ranks in (1, 4):
        checked = checked_or_refused(name, workload, ranks)
        for machine in ("hgx-h100", "a100-pcie") if checked else ():
            spec = load_cluster(machine)
            cluster = Cluster(msgspec.structs.replace(spec, nodes=2, gpus_per_node=2) if spec.nic else spec)
            assert checked is not None
            assert floors(Fold(checked, cluster)) == pytest.approx(floors_by_the_op(checked, cluster), rel=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", get_args(CollectiveName))
@pytest.mark.parametrize("name", ["hgx-h100", "dgx-a100", "l20-pcie"])
@pytest.mark.parametrize("ranks", [range(2), range(8), range(16), range(0, 32, 8), range(2, 30)])
def test_no_algorithm_carries_less_than_is_needed(kind: CollectiveName, name: str, ranks: range) -> None:
    spec = load_cluster(name)
    nic = spec.nic or load_cluster("dgx-a100").nic
    cluster = Cluster(msgspec.structs.replace(spec, nodes=ranks[-1] // spec.gpus_per_node + 1, nic=nic))
    traffic = link_traffic(kind, tuple(ranks), 2**20, cluster)
    found = list(needs(kind, tuple(ranks), 2**20, cluster))
    assert bool(found) == (kind != "barrier")
    carried = {links: sum(traffic.nbytes.get(link, 0.0) for link in links) for links, _ in found}
    for links, nbytes in found:
        alike = [carried[some] for some, need in found if (need, len(some)) == (nbytes, len(links))]
        assert (max(alike) if kind == "all_reduce" else carried[links]) >= nbytes * (1 - 1e-12)
        assert rate(links, cluster) == pytest.approx(sum(cluster.resources[link].capacity for link in links))


def test_sums_over_two_nodes_of_eight_need_an_eighth_of_the_whole_from_each_nic() -> None:
    """By hierarchy: 1 GiB / 8 at 50 GB/s, and 1 GiB out of a rank by NVLink and PCIe together. A ring takes 1.875
    times as much from the NICs.
    """
    cluster, ranks = Cluster(msgspec.structs.replace(load_cluster("hgx-h100"), nodes=2)), tuple(range(16))
    found = {nbytes / len(links) for links, nbytes in needs("all_reduce", ranks, 2**30, cluster) if len(links) == 8}
    assert found == {2**30 / 8}
    assert least_seconds(needs("all_reduce", ranks, 2**30, cluster), cluster) == pytest.approx(2**27 / 50e9)


@pytest.mark.parametrize(
    ("kind", "nbytes"), [("all_gather", 2), ("reduce_scatter", 2), ("all_to_all", 2), ("all_reduce", 4 / 3)]
)
def test_a_rank_alone_on_its_node_needs_its_bytes_once(kind: CollectiveName, nbytes: float) -> None:
    """Three nodes of one GPU, without PCIe: the NIC is the rank's way out and the node's. 1 byte to or from each of two
    others, or 2 (3 - 1) / 3 of a sum.
    """
    nic = NicSpec(bytes_per_s=1e9, latency_s=0.0)
    cluster = Cluster(make_cluster_spec(1, nodes=3, nic=nic))
    found = [(cluster.resources[link].name, least) for (link,), least in needs(kind, (0, 1, 2), 1, cluster)]
    ways = {"all_gather": ("in",), "reduce_scatter": ("out",)}.get(kind, ("out", "in"))
    assert sorted(found) == sorted(
        (f"nic[{number}].nic.{way}", pytest.approx(nbytes)) for number in range(3) for way in ways
    )


@pytest.mark.parametrize(
    ("kind", "out", "into"),
    [("all_gather", set(), {8}), ("reduce_scatter", {8}, set()), ("all_to_all", {64}, {64})],
)
def test_what_leaves_and_enters_a_node(kind: CollectiveName, out: set[int], into: set[int]) -> None:
    """Parts of 1 byte on two nodes of 8: 8 parts of the others, or all 64 from each here to each there."""
    cluster, ranks = Cluster(msgspec.structs.replace(load_cluster("hgx-h100"), nodes=2)), tuple(range(16))
    found = {links: nbytes for links, nbytes in needs(kind, ranks, 1, cluster) if len(links) == 8}
    for way, expected in (("out", out), ("in", into)):
        nics = {f"nic[{number}].nic.{way}" for number in range(8)}
        some = [nbytes for links, nbytes in found.items() if {cluster.resources[one].name for one in links} == nics]
        assert set(some) == expected
    assert set(chain.from_iterable(found)) <= {i for i, one in enumerate(cluster.resources) if one.group == "nic"}
