"""Lower bounds: from totals of what is distinct, as from a pass over the ops."""

from __future__ import annotations

from collections import Counter

import pytest

from sim.engine.collectives import link_traffic
from sim.engine.lowered import part_bytes
from sim.engine.report import floors
from sim.schedule.ir.ops import OFFLOAD, Collective, HostCopy
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import Checked
from sim.workload import Workload
from tests.helpers import OFFLOADED, VARIANTS, by_tier, checked_or_refused, make_model
from topology.cluster import Cluster, load_cluster


def floors_by_the_op(checked: Checked, cluster: Cluster) -> dict[str, float]:
    programs, load = checked.schedule.programs, Counter[int]()
    for transfer in checked.matching.transfers:
        load.update(cluster.route(transfer.source[0], transfer.target[0]).load(transfer.nbytes))
    for group in checked.matching.groups:
        rank, index = group.members[0]
        op = programs[rank].ops[index]
        assert isinstance(op, Collective)
        ranks = tuple(member for member, _ in group.members)
        load.update(link_traffic(op.name, ranks, part_bytes(programs, group.members), cluster).nbytes)
    for program in programs:
        for op in program.ops:
            if isinstance(op, HostCopy):
                route = cluster.host_route(program.rank, to_host=op.stream == OFFLOAD)
                load.update(route.load(program.nbytes(op.source)))
    busy = [
        sum(use.flops / cluster.peak_flops_per_s(rank, use.dtype) for use in uses if use)
        for rank, uses in enumerate(checked.kernels)
    ]
    lower = {"compute": max(busy)}
    for link, nbytes in load.items():
        resource = cluster.resources[link]
        lower[resource.group] = max(lower.get(resource.group, 0.0), nbytes / resource.capacity)
    return lower


@pytest.mark.parametrize(
    "name", by_tier({"zigzag", "ulysses", "upipe, kept and offloaded"}, SCHEDULES, [*VARIANTS, *OFFLOADED])
)
def test_totals_are_the_sums_over_all_ops(name: str) -> None:
    workload = Workload(model=make_model(8, 4), seq=64, scope="layer", layers=2)
    for ranks in (1, 4):
        checked = checked_or_refused(name, workload, ranks)
        for machine in ("hgx-h100", "a100-pcie") if checked else ():
            cluster = Cluster(load_cluster(machine))
            assert checked is not None
            assert floors(checked, cluster) == pytest.approx(floors_by_the_op(checked, cluster), rel=1e-12)
