"""Replicas that are equal are played once: every time and every figure is that of a play of all ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from sim.accounts.memory import walks
from sim.base.errors import InputError
from sim.engine.costs.cost import CostModel
from sim.engine.play.fold import Fold, fold
from sim.engine.play.simulate import STEADY, Engine, Jitter, Prepared, Simulation
from sim.engine.results.figures import HOST, figures_of
from sim.engine.results.report import report
from sim.engine.results.sensitivity import played_s
from sim.engine.results.worlds import Change, worlds
from sim.engine.traffic.collectives import link_traffic
from sim.schedule.methods import ulysses
from sim.schedule.methods.hints import Hints
from sim.schedule.proof.check import Checked, check
from sim.setup import names
from sim.words.mesh import Mesh
from sim.words.profile import Profile, load_profile
from sim.words.workload import Workload, load_model
from tests.helpers import DRAWN, OFFLOADED, VARIANTS, make_model, uses_host_memory
from topology.cluster import Cluster, load_cluster
from topology.specs import ClusterSpec, LinkSpec, NicSpec, PerGpu


def machine(name: str, nodes: int, gpus_per_node: int, slow: tuple[int, ...] = ()) -> ClusterSpec:
    found = load_cluster(name)
    return msgspec.structs.replace(
        found,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        nic=found.nic or NicSpec(bytes_per_s=2.5e10, latency_s=1e-5),
        per_gpu={gpu: PerGpu(speed=0.7 + gpu / 100) for gpu in slow},
    )


class Cell(NamedTuple):
    """Replicas of one schedule on one machine."""

    checked: Checked
    spec: ClusterSpec
    profile: Profile | None
    jitter: Jitter


def cells(seed: int, count: int) -> Iterator[Cell]:
    """Random schedules in 2 to 4 replicas, on nodes that hold half of one, one, two or parts of several."""
    draw = random.Random(seed)
    machines: list[tuple[str, str]] = [
        ("hgx-h100", "h100-sxm"),
        ("dgx-a100", "a100-sxm"),
        ("a100-pcie", ""),
        ("l20-pcie", ""),
    ]
    while count:
        name, ranks, dp = draw.choice(DRAWN), draw.choice([1, 2, 4]), draw.choice([2, 3, 4])
        variant = (VARIANTS | OFFLOADED)[name]
        cluster, profile = draw.choice(machines)
        whole = name in OFFLOADED or draw.random() < 0.6
        model = draw.choice([load_model("llama3-8b"), make_model(8, 4, dtype="bf16")])
        per_node = draw.choice([size for size in (1, 2, 4, 8) if size <= load_cluster(cluster).gpus_per_node])
        nodes = -(-ranks * dp // per_node)
        slow = tuple(draw.sample(range(ranks * dp), draw.choice([0, 0, 1, 2])))
        spec = machine(cluster, nodes, per_node, slow)
        if uses_host_memory(name) and spec.socket is None:
            continue
        try:
            workload = Workload(
                model=model,
                seq=ranks * draw.choice([64, 1024, 8192]),
                batch=draw.choice([1, 1, 2]),
                dtype="bf16",
                scope="layer" if whole else "attention",
                layers=draw.choice([1, 2]) if whole else 1,
                passes=draw.choice(["both", "both", "forward"]),
                mask=draw.choice(["causal", "full"]),
            )
            mesh = msgspec.structs.replace(variant.mesh(ranks, model), dp=dp)
            checked = check(variant.build(workload, mesh))
        except InputError:
            continue
        count -= 1
        jitter = draw.choice([STEADY, Jitter(0.1, draw.randrange(100))])
        yield Cell(checked, spec, load_profile(profile) if profile and draw.random() < 0.7 else None, jitter)


SHARDED = ({}, {"zero_stage": "2", "micro_batches": "2"}, {"zero_stage": "1"}, {"optimiser": "host"},
           {"zero_stage": "3", "weight_communicators": "two", "reduce": "model"})  # fmt: skip


INNER = Mesh(ulysses=2, order=("pp", "ring", "ulysses", "tp", "dp"))
"""Ranks of one place are neighbours, whichever replicas they are of."""


def sharded(seed: int, count: int) -> Iterator[Cell]:
    """Random training steps whose weights are sharded over the ranks of 2 to 8 replicas, on nodes of whole ones."""
    draw = random.Random(seed)
    while count:
        name, mesh = draw.choice(
            [("ulysses", Mesh(ulysses=2)), ("usp", Mesh(ring=2, ulysses=2)), ("ring", Mesh(ring=4)),
             ("ulysses", Mesh(pp=2, ulysses=2)), ("single", Mesh(pp=2, tp=2)), ("ulysses", INNER)]
        )  # fmt: skip
        dp, entry = draw.choice([2, 4, 8]), names.entry(name)
        chosen = names.options(entry, name, list(draw.choice(SHARDED).items()), "")
        workload = Workload(
            model=make_model(8, 4, dtype="bf16"), seq=64 * draw.choice([1, 64]), batch=2, dtype="bf16", scope="step",
            layers=mesh.pp * draw.choice([1, 3]),
        )  # fmt: skip
        checked = check(entry.schedule(workload, msgspec.structs.replace(mesh, dp=dp), chosen, Hints()))
        cluster, profile = draw.choice([("hgx-h100", load_profile("h100-sxm")), ("l20-pcie", None)])
        slow = tuple(draw.sample(range(mesh.size * dp), draw.choice([0, 1])))
        spec = machine(cluster, mesh.pp * dp, mesh.size // mesh.pp, slow)
        yield Cell(checked, spec, profile, draw.choice([STEADY, Jitter(0.1, seed)]))
        count -= 1


MEMBERS: tuple[dict[str, str], ...] = (
    {}, {"tp_sequence": "false"}, {"tp_overlap": "gradients"}, {"tp_overlap": "shards"}, {"checkpoint": "full"},
    {"pipeline_schedule": "zb-h1"}, {"loss": "chunked"},
)  # fmt: skip
PARALLEL = (
    ("single", Mesh(tp=4)), ("ring", Mesh(tp=4, ring=2)), ("zigzag", Mesh(pp=2, tp=4, ring=2)), ("single", Mesh(tp=8)),
    ("ulysses", Mesh(tp=2, ulysses=2, dp=2)), ("usp", Mesh(tp=4, ring=2, ulysses=2)),
    ("single", Mesh(pp=2, tp=4, dp=2)), ("allgather", Mesh(tp=4, ring=2, dp=2)),
    ("single", Mesh(tp=4, dp=4, order=("pp", "ring", "ulysses", "tp", "dp"))),
)  # fmt: skip


def parallel(seed: int, count: int) -> Iterator[Cell]:
    """Random layers and steps of tensor-parallel groups, which lie in a node, over nodes or beside another one."""
    draw = random.Random(seed)
    while count:
        (name, mesh), sharded = draw.choice(PARALLEL), draw.choice(SHARDED[:-1])
        entry, step, more = names.entry(name), draw.random() < 0.8, draw.choice(MEMBERS)
        chosen = names.options(entry, name, list((sharded | more).items()) if step else [], "")
        workload = Workload(
            model=make_model(8, draw.choice([2, 4, 8, 8, 8]), dtype="bf16"), seq=512 * draw.choice([1, 16]),
            batch=2, dtype="bf16", scope="step" if step else "layer", layers=mesh.pp * draw.choice([1, 2]),
        )  # fmt: skip
        try:
            checked = Checked(entry.schedule(workload, mesh, chosen, Hints()))
        except InputError:
            continue
        cluster = draw.choice(["hgx-h100", "hgx-h100", "hgx-h100", "gb200-nvl72", "l20-pcie"])
        found = load_cluster(cluster)
        fit = [size for size in (1, 2, 4, 8, 16) if size <= min(mesh.size, found.gpus_per_node)]
        per_node = draw.choice([size for size in fit if size >= mesh.tp or draw.random() < 0.1] or fit)
        slow = tuple(draw.sample(range(mesh.size), draw.choice([0, 0, 1])))
        spec = machine(cluster, mesh.size // per_node, per_node, slow)
        if "optimiser" in sharded and spec.socket is None:
            continue
        profile = load_profile(found.profile) if found.profile and draw.random() < 0.7 else None
        yield Cell(checked, spec, profile, draw.choice([*[STEADY] * 5, Jitter(0.1, seed)]))
        count -= 1


def both(cell: Cell, engine: Engine) -> tuple[Simulation, Simulation]:
    """Return a schedule as it is played, and all of its ranks."""
    checked, spec, profile, jitter = cell
    folded = Prepared(checked).play(Cluster(spec), profile, jitter, engine)
    whole = Prepared(checked).play(Cluster(spec), profile, jitter, engine, every_rank=True)
    assert whole.trace.num_ranks == checked.schedule.num_ranks
    return folded, whole


def require_equal(cell: Cell, engine: Engine) -> int:
    """Hold a folded play to one of all ranks; return how many ranks were left out."""
    folded, meant = both(cell, engine)
    starts, what = meant.trace.ops.starts, str((cell.checked.schedule.header, cell.spec))
    ops = np.concatenate([np.arange(starts[rank], starts[rank + 1]) for rank in folded.trace.numbers])
    for name in ("posted_s", "begun_s", "ended_s"):
        np.testing.assert_array_equal(getattr(folded.trace, name), getattr(meant.trace, name)[ops], what)
    found, expected = (msgspec.structs.asdict(report(one, with_interval=True)) for one in (folded, meant))
    notes = [set(one.pop("evidence").notes) for one in (found, expected)]
    saves = [one.pop("saves") for one in (found, expected)]
    if saves[0] != pytest.approx(saves[1], rel=1e-12):
        require_same_where_others_win(folded, meant, what)
    assert found == expected, what
    assert len(notes[0] - notes[1]) == len(folded.fold.played)
    return meant.trace.num_ranks - folded.trace.num_ranks


def require_same_where_others_win(folded: Simulation, meant: Simulation, what: str) -> None:
    """Assert that machines with a figure doubled, which worlds follow up to where SMs go to others, say that they stop
    there, and are alike to the last bit when they are played.
    """
    figures = figures_of(folded.cluster.spec, folded.profile)
    changes = [Change((figure,), 2.0) for figure in figures if figure not in HOST]
    apart = [
        change
        for change, one, other in zip(changes, worlds(folded, changes), worlds(meant, changes), strict=True)
        if one.step_time_s != pytest.approx(other.step_time_s, rel=1e-12)
        if one.turned and other.turned
    ]
    assert apart, what
    for change in apart:
        assert played_s(folded, change) == played_s(meant, change), what


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("seed", "count"), [(6, 10), *(pytest.param(seed, 150, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_folded_times_and_figures_are_those_of_all_ranks(seed: int, count: int) -> None:
    engines: tuple[Engine, ...] = ("auto", "simpy")
    left_out = [require_equal(cell, engines[number % 2]) for number, cell in enumerate(cells(seed, count))]
    assert sum(map(bool, left_out)) > count / 5


@pytest.mark.sweep
@pytest.mark.parametrize(("seed", "count"), [(0, 3), pytest.param(1, 150, marks=pytest.mark.slow)])
def test_folded_steps_with_shards_over_replicas_are_those_of_all_ranks(seed: int, count: int) -> None:
    engines: tuple[Engine, ...] = ("auto", "simpy")
    left_out = [require_equal(cell, engines[number % 2]) for number, cell in enumerate(sharded(seed, count))]
    assert sum(map(bool, left_out)) > count / 2


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("seed", "count"), [(15, 2), *(pytest.param(seed, 150, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_folded_members_of_tensor_parallel_groups_are_those_of_all_ranks(seed: int, count: int) -> None:
    engines: tuple[Engine, ...] = ("auto", "simpy")
    left_out = [require_equal(cell, engines[number % 2]) for number, cell in enumerate(parallel(seed, count))]
    assert sum(map(bool, left_out)) > count / 5


@pytest.mark.sweep
def test_folded_stages_with_copies_are_those_of_all_ranks() -> None:
    entry, given = names.entry("ulysses"), {"pipeline_schedule": "dualpipe", "micro_batches": "4", "zero_stage": "1"}
    workload = Workload(model=make_model(8, 4, dtype="bf16"), seq=512, batch=4, dtype="bf16", scope="step", layers=2)
    options = names.options(entry, "ulysses", list(given.items()), "")
    checked = check(entry.schedule(workload, Mesh(pp=2, ulysses=2, dp=2), options, Hints()))
    cell = Cell(checked, machine("hgx-h100", 4, 2), load_profile("h100-sxm"), STEADY)
    assert require_equal(cell, "simpy") == 4


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
    assert require_equal(Cell(checked, slow, None, STEADY), "simpy") == 6


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
