"""Replicas that are equal are played once: every time and every figure is that of a play of all ranks."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from sim.accounts.memory import walks
from sim.engine.costs.cost import CostModel
from sim.engine.play.fold import Fold, fold
from sim.engine.play.simulate import STEADY, Jitter, Prepared
from sim.engine.results.report import report
from sim.engine.traffic.collectives import link_traffic
from sim.schedule.methods import ulysses
from sim.schedule.methods.hints import Hints
from sim.schedule.proof.check import Checked, check
from sim.setup import names
from sim.words.mesh import Mesh
from sim.words.profile import load_profile
from sim.words.workload import Workload
from tests.engine.play.equality import Cell, require_equal
from tests.helpers import make_model
from topology.cluster import Cluster, load_cluster
from topology.specs import ClusterSpec, LinkSpec, NicSpec, PerGpu


def machine(name: str, nodes: int, gpus_per_node: int) -> ClusterSpec:
    found = load_cluster(name)
    nic = found.nic or NicSpec(bytes_per_s=2.5e10, latency_s=1e-5)
    return msgspec.structs.replace(found, nodes=nodes, gpus_per_node=gpus_per_node, nic=nic)


def num_left_out(cell: Cell) -> int:
    """Hold a play to that of all ranks; return how many were left out."""
    return cell.checked.schedule.num_ranks - len(require_equal(cell).ranks)


@pytest.mark.sweep
def test_folded_stages_with_copies_are_those_of_all_ranks() -> None:
    entry, given = names.entry("ulysses"), {"pipeline_schedule": "dualpipe", "micro_batches": "4", "zero_stage": "1"}
    workload = Workload(model=make_model(8, 4, dtype="bf16"), seq=512, batch=4, dtype="bf16", scope="step", layers=2)
    options = names.options(entry, "ulysses", list(given.items()), "")
    checked = check(entry.schedule(workload, Mesh(pp=2, ulysses=2, dp=2), options, Hints()))
    cell = Cell(checked, Cluster(machine("hgx-h100", 4, 2)), load_profile("h100-sxm"), STEADY)
    assert num_left_out(cell) == 4


def test_every_rank_takes_the_memory_of_the_one_that_is_played_for_it() -> None:
    """Of two replicas one is played, and of four members two, the first of which has norms of its own."""
    workload = Workload(model=make_model(8, 4, dtype="bf16"), seq=512, dtype="bf16", scope="step", layers=2)
    entry = names.entry("ulysses")
    options = names.options(entry, "ulysses", [("zero_stage", "0")], "")
    checked = Checked(entry.schedule(workload, Mesh(dp=2, ulysses=2, tp=4), options, Hints()))
    found = fold(checked, Cluster(machine("hgx-h100", 2, 8)))
    assert found.played.keys() == {"dp", "tp"}
    played = walks(found.checked)
    assert [played[found.number_of(rank)].peak_bytes for rank in range(16)] == [
        one.peak_bytes for one in walks(checked)
    ]
    assert [found.number_of(rank) for rank in found.ranks] == [*range(len(found.ranks))]


def layers(dp: int, ranks: int = 2, seq: int = 1024) -> Checked:
    workload = Workload(model=make_model(8, 4, dtype="bf16"), seq=seq, dtype="bf16", scope="layer", layers=2)
    return check(ulysses.build(workload, Mesh(dp=dp, ulysses=ranks)))


@pytest.mark.sweep
def test_one_slow_gpu_splits_its_replica_off() -> None:
    """Of five replicas the fourth has a slow GPU: the first stands for the others, and all wait for the slow one."""
    checked, even = layers(5, seq=2**16), machine("hgx-h100", 5, 2)
    slow = msgspec.structs.replace(even, per_gpu={7: PerGpu(speed=0.5)})
    found = Prepared(checked).play(Cluster(slow), None)
    assert found.fold.played == {"dp": {0: [0, 1, 2, 4], 3: [3]}}
    assert list(found.trace.numbers) == [0, 1, 6, 7]
    assert report(found).critical_rank == 7
    assert any("numbers 0, 3" in note for note in report(found).evidence.notes)
    assert found.trace.step_time_s > Prepared(checked).play(Cluster(even), None).trace.step_time_s
    assert num_left_out(Cell(checked, Cluster(slow), None, STEADY)) == 6


def test_two_slow_gpus_at_one_place_are_one_class() -> None:
    slow = msgspec.structs.replace(machine("hgx-h100", 5, 2), per_gpu=dict.fromkeys((3, 7), PerGpu(speed=0.5)))
    assert Prepared(layers(5)).play(Cluster(slow), None).fold.played == {"dp": {0: [0, 2, 4], 1: [1, 3]}}


def replicas(checked: Checked, cluster: Cluster) -> tuple[int, ...]:
    """Return which replicas are played where not all are."""
    return tuple(fold(checked, cluster).played.get("dp", ()))


@pytest.mark.parametrize(
    ("per_node", "dp", "played"),
    [
        pytest.param(1, 4, (0,), id="a replica on two nodes"),
        pytest.param(4, 4, (0, 1), id="two replicas on a node are played together"),
        pytest.param(4, 3, (), id="a node that is half empty"),
        pytest.param(8, 4, (), id="all on one node"),
    ],
)
def test_replicas_fold_by_whole_nodes(per_node: int, dp: int, played: tuple[int, ...]) -> None:
    nodes = -(-2 * dp // per_node)
    assert replicas(layers(dp), Cluster(machine("hgx-h100", nodes, per_node))) == played


def test_a_placement_that_mixes_replicas_does_not_fold() -> None:
    checked, spec = layers(4), machine("hgx-h100", 4, 2)
    assert replicas(checked, Cluster(spec, [6, 7, 4, 5, 0, 1, 2, 3])) == (0,)
    assert not replicas(checked, Cluster(spec, [1, 0, 2, 3, 4, 5, 6, 7]))
    assert not replicas(checked, Cluster(spec, [0, 2, 1, 3, 4, 6, 5, 7]))


def test_replicas_on_a_cpu_host_are_all_played_and_that_is_said() -> None:
    checked = layers(2)
    found = Prepared(checked).play(Cluster(load_cluster("host")), None)
    assert found.trace.num_ranks == 4
    assert any("all 2 replicas were played" in note for note in report(found).evidence.notes)


def test_jitter_is_drawn_by_role_or_by_rank() -> None:
    """Replicas share the draws of their roles, which are those of one replica alone; each rank's own are an option."""
    spec, jitter = machine("hgx-h100", 4, 2), Jitter(0.1, seed=3)
    many, one = layers(4), layers(1)
    shared, own, alone = (
        np.array(given.stretch(Fold(one, Cluster(spec)), CostModel(Cluster(spec), None)))
        for given, one in ((jitter, many), (jitter._replace(per_rank=True), many), (jitter, one))
    )
    np.testing.assert_array_equal(shared, np.tile(alone, 4))
    np.testing.assert_array_equal(own[: len(alone)], alone)
    assert len(np.unique(own)) > 3 * len(np.unique(alone))
    found = Prepared(many).play(Cluster(spec), None, jitter._replace(per_rank=True))
    assert found.trace.num_ranks == 8
    assert "rank by rank" in " ".join(report(found).evidence.notes)
    assert "the same in every replica" in " ".join(
        report(Prepared(many).play(Cluster(spec), None, jitter)).evidence.notes
    )


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "barrier"])
@pytest.mark.parametrize(("nodes", "per_node"), [(3, 4), (4, 2), (5, 3), (7, 1), (6, 8)])
@pytest.mark.parametrize("name", ["hgx-h100", "l20-pcie"])
def test_links_of_some_alike_nodes_tell_those_of_all(kind: Any, nodes: int, per_node: int, name: str) -> None:
    """The loop over all rings and routes is the oracle: same bytes and latency, to the bit, and on every node."""
    cluster = Cluster(machine(name, nodes, per_node))
    ranks, nbytes = tuple(range(nodes * per_node)), 12_345
    whole = link_traffic(kind, ranks, nbytes, cluster)
    for first in range(1, nodes):
        near = link_traffic(kind, ranks, nbytes, cluster, first * per_node)
        assert near._replace(nbytes={}) == whole._replace(nbytes={})
        assert near.nbytes.items() <= whole.nbytes.items()
        if kind != "barrier":
            own = [cluster.resources[link].group for link in near.nbytes]
            assert {*own} == {cluster.resources[link].group for link in whole.nbytes}
            assert len(near.nbytes) * nodes == len(whole.nbytes) * max(2, first)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("change", "options", "played"),
    [
        pytest.param({}, {}, {0: [0], 1: [1, 2, 3]}, id="the first one counts norms"),
        pytest.param({"per_gpu": {6: PerGpu(speed=0.9)}}, {}, {0: [0], 1: [1, 3], 2: [2]}, id="a slow GPU"),
        pytest.param({"nodes": 4, "gpus_per_node": 2}, {}, {0: [0], 1: [1], 2: [2, 3]}, id="pairs on nodes"),
        pytest.param({"nodes": 8, "gpus_per_node": 1}, {}, {}, id="each on a node of its own"),
        pytest.param({"per_gpu": {6: PerGpu(link=0.9)}}, {}, {}, id="a slow port"),
        pytest.param({"nic": NicSpec(bytes_per_s=5e10, latency_s=1e-6, per_node=2)}, {}, {}, id="two GPUs on a NIC"),
        pytest.param(
            {"bridged_gpus": 4, "nvlink": LinkSpec(bytes_per_s=1e11, latency_s=1e-6)}, {}, {}, id="pairs linked"
        ),
        pytest.param({"nvlink": None}, {}, {}, id="PCIe switches"),
        pytest.param({}, {"optimiser": "host"}, {}, id="memory of the host"),
        pytest.param({}, {"tp_overlap": "shards"}, {}, id="unlike members"),
    ],
)
def test_members_fold_where_their_links_are_their_own(
    change: dict[str, Any], options: dict[str, str], played: dict[int, list[int]]
) -> None:
    workload = Workload(model=make_model(8, 4, dtype="bf16"), seq=512, dtype="bf16", scope="step", layers=1)
    entry = names.entry("ring")
    given = names.options(entry, "ring", list(options.items()), "")
    checked = Checked(entry.schedule(workload, Mesh(tp=4, ring=2), given, Hints()))
    cluster = Cluster(msgspec.structs.replace(machine("hgx-h100", 2, 4), **change))
    assert fold(checked, cluster).played.get("tp", {}) == played
    assert not fold(checked, cluster, members=False).played
