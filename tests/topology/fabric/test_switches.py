"""Fabrics of switches, and of links between nodes: what is wired, which ways flows take, what is refused."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import networkx as nx
import pytest

from sim.base.errors import InputError
from sim.engine.costs.cost import CostModel
from sim.engine.costs.phases import Flow, Latency
from sim.engine.play.simulate import simulate
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import check
from sim.words.profile import load_profile
from sim.words.workload import Workload, load_model
from tests.helpers import slow_but
from topology.cluster import Cluster, load_cluster
from topology.fabric.switches import leaf, trunks
from topology.kinds import (
    CircuitsSpec,
    DragonflyPlusSpec,
    Fabric,
    FatTreeSpec,
    FullMeshSpec,
    MeshSpec,
    RailOnlySpec,
    RailOptimisedSpec,
    Switched,
    TorusSpec,
)
from topology.specs import ClusterSpec

TREES: list[tuple[Switched, int]] = [
    (FatTreeSpec(below=(64,)), 4),
    (FatTreeSpec(below=(16, 4), above=(3,), oversubscription=(2.0,)), 8),
    (FatTreeSpec(below=(8, 2, 4), above=(2, 3), oversubscription=(1.0, 7.0)), 8),
    (RailOptimisedSpec(below=(4, 16), above=(2,)), 8),
    (RailOnlySpec(below=(4, 2), above=(2,)), 8),
    (DragonflyPlusSpec(below=4, leaves=2, spines=3, global_links=5), 8),
]
SWITCHED = pytest.mark.parametrize(("fabric", "nodes"), TREES)


def spec_of(fabric: Fabric | None, nodes: int, gpus: int = 8) -> ClusterSpec:
    return msgspec.structs.replace(load_cluster("hgx-h100"), nodes=nodes, gpus_per_node=gpus, fabric=fabric)


@SWITCHED
def test_flows_take_shortest_ways_and_lose_nothing(fabric: Switched, nodes: int) -> None:
    """What enters a switch leaves it; all goes from the leaf of the one port to that of the other, by as many links as
    a shortest path has, and by all such links.
    """
    cluster = Cluster(spec_of(fabric, nodes))
    ends = {edge.resources[0].name: (a, b) for a, b, edge in cluster.graph.edges(data="edge") if edge.resources}
    for source, target in [(0, 8), (0, 8 * nodes - 1), (17, 28), (8 * nodes - 1, 0), (9, 8 * nodes - 15)]:
        route = cluster.route(source, target)
        balance: dict[str, float] = defaultdict(float)
        for link, share in route.shares:
            start, end = ends[cluster.resources[link].name]
            balance[start] -= share
            balance[end] += share
        first, last = (
            next(ends[cluster.resources[link].name] for link in order if cluster.resources[link].group == "nic")[way]
            for order, way in ((route.resources, 1), (route.resources[::-1], 0))
        )
        assert {switch: pytest.approx(left) for switch, left in balance.items() if abs(left) > 1e-12} == (
            {} if first == last else {first: -1, last: 1}
        )
        hops = nx.shortest_path_length(cluster.graph, first, last)
        assert sum(share for _, share in route.shares) == pytest.approx(hops)
        every = {link for path in nx.all_shortest_paths(cluster.graph, first, last) for link in pairwise(path)}
        assert {ends[cluster.resources[link].name] for link, _ in route.shares} == every


@SWITCHED
def test_each_tier_has_the_rate_that_is_asked(fabric: Switched, nodes: int) -> None:
    """64 ports of 50 GB/s, all places filled: above a tier it is that over the oversubscription so far; no two links
    join the same switches, and all have as many as `above` and `below` say.
    """
    if isinstance(fabric, DragonflyPlusSpec):
        pytest.skip("has no tiers")
    spec = spec_of(fabric, nodes if fabric.above else 8)
    found = list(trunks(spec, fabric))
    assert len({(one.lower, one.upper) for one in found}) == len(found)
    rate = 64 * 50e9
    for tier, above in enumerate(fabric.above):
        links = [one for one in found if f"tier{tier + 1}[" in one.lower]
        rate /= fabric.oversubscription[tier] if fabric.oversubscription else 1.0
        assert sum(one.bytes_per_s for one in links) == pytest.approx(rate)
        assert set(Counter(one.lower for one in links).values()) == {above}
        assert set(Counter(one.upper for one in links).values()) == {fabric.below[tier + 1]}


@pytest.mark.parametrize(("spines", "links"), [(2, 4), (3, 5), (4, 2), (8, 1)])
def test_any_two_groups_of_a_dragonfly_have_as_many_links(spines: int, links: int) -> None:
    """8 groups, and no spine with more than it may have."""
    fabric = DragonflyPlusSpec(below=4, leaves=2, spines=spines, global_links=links)
    between: Counter[tuple[str, str]] = Counter()
    used: Counter[str] = Counter()
    for one in trunks(spec_of(fabric, 8), fabric):
        groups = one.lower.split(".")[0], one.upper.split(".")[0]
        if groups[0] != groups[1]:
            between[groups] += one.links
            used[one.lower] += one.links
            used[one.upper] += one.links
    assert set(between.values()) == {spines * links // 7}
    assert len(between) == len(list(combinations(range(8), 2)))
    assert max(used.values()) <= links


def test_ports_are_on_leaves_by_nodes_or_by_rails() -> None:
    plain, rails = FatTreeSpec(below=(16, 4), above=(1,)), RailOptimisedSpec(below=(4, 16), above=(1,))
    spec = spec_of(plain, 8)
    assert {leaf(spec, plain, node, rail) for node in (0, 1) for rail in range(8)} == {"tier1[0]"}
    assert [leaf(spec, rails, node, 3) for node in range(8)] == ["tier1[3]"] * 4 + ["tier1[11]"] * 4
    assert leaf(spec, RailOnlySpec(below=(8,)), 7, 3) == "rail[3].tier1[0]"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fabric", "gpus", "links"),
    [
        (None, 8, 0),
        (FatTreeSpec(below=(64, 16), above=(32,), oversubscription=(2.0,)), 8, 2 * 16 * 32),
        (FatTreeSpec(below=(8, 8, 16), above=(8, 8)), 8, 2 * (128 * 8 + 128 * 8)),
        (RailOptimisedSpec(below=(32, 32), above=(16,)), 8, 2 * 32 * 16),
        (RailOnlySpec(below=(32, 4), above=(16,)), 8, 2 * 8 * 4 * 16),
        (DragonflyPlusSpec(below=16, leaves=8, spines=8, global_links=7), 8, 2 * (8 * 64 + 28 * 8)),
        (MeshSpec(dims=(32, 32)), 1, 0),
        (TorusSpec(dims=(16, 8, 8)), 1, 0),
        (FullMeshSpec(dims=(32, 32)), 1, 0),
        pytest.param(FullMeshSpec(dims=(1024,)), 1, 0, marks=pytest.mark.slow),
        (CircuitsSpec(strides=(1, 32)), 1, 0),
    ],
)
def test_1024_gpus_of_each_fabric(fabric: Fabric | None, gpus: int, links: int) -> None:
    cluster = Cluster(spec_of(fabric, 1024 // gpus, gpus))
    assert len(cluster.devices) == 1024
    assert sum(one.group == "fabric" for one in cluster.resources) == links
    assert cluster.route(0, 1023).bytes_per_s == 50e9


def test_measured_times_follow_what_is_between_the_nodes() -> None:
    """With the profile of H100: uplinks of a hundredth make a message a hundred times as long as the NIC needs, or
    more; a switch on the way adds its latency in proportion to what NICs were measured to have.
    """
    profile = load_profile("h100-sxm")
    plain = Cluster(spec_of(None, 4))
    group = tuple(range(32))

    def sent(fabric: Fabric | None, target: int = 16, nbytes: int = 2**28) -> tuple[float, float]:
        found = CostModel(Cluster(spec_of(fabric, 4)) if fabric else plain, profile).transfer(0, target, nbytes, group)
        latency, flow = found
        assert isinstance(latency, Latency)
        assert isinstance(flow, Flow)
        return latency.seconds, flow.seconds

    wide = FatTreeSpec(below=(16, 2), above=(1,))
    assert sent(wide) == sent(None)
    thin = msgspec.structs.replace(wide, oversubscription=(1600.0,))
    assert sent(thin, target=8) == sent(None), "on the same leaf"
    assert sent(thin)[1] >= 100 * 2**28 / 50e9
    far = msgspec.structs.replace(wide, latency_s=7e-6)
    assert sent(far)[0] == pytest.approx(2 * sent(None)[0]), "two links of 7 us beside 14 us of the NICs"


@pytest.mark.sweep
@pytest.mark.parametrize("fabric", [
    FatTreeSpec(below=(4, 2), above=(2,), oversubscription=(4.0,)), RailOnlySpec(below=(4,)),
    DragonflyPlusSpec(below=2, leaves=1, spines=1, global_links=3),
])  # fmt: skip
@pytest.mark.parametrize("schedule", slow_but({"ulysses"}, ["ring", "ulysses", "usp"]))
def test_schedules_play_alike_on_both_engines(fabric: Fabric, schedule: str) -> None:
    model = load_model("tiny")
    workload = Workload(model=model, seq=1024, dtype="bf16", scope="layer", layers=1)
    entry = SCHEDULES[schedule]
    checked = check(entry.schedule(workload, entry.mesh(8, model)))
    cluster = Cluster(spec_of(fabric, 4, 2))
    native, reference = (simulate(checked, cluster, None, engine=engine) for engine in ("auto", "simpy"))
    assert native.trace.step_time_s == reference.trace.step_time_s
    assert native.trace.step_time_s >= simulate(checked, Cluster(spec_of(None, 4, 2)), None).trace.step_time_s


@pytest.mark.parametrize(
    ("fabric", "gpus", "message"),
    [
        (FatTreeSpec(below=(4, 4)), 8, "`above` has 0 numbers, `below` 2: expected one less"),
        (FatTreeSpec(below=(4, 4), above=(1,), oversubscription=(1.0, 2.0)), 8, "`oversubscription` has 2 numbers"),
        (FatTreeSpec(below=(4, 4), above=(1,)), 8, "`below` 4 x 4 has 16 places for ports, 32 are needed"),
        (RailOptimisedSpec(below=(8, 6), above=(1,)), 8, "`below` 8 x 6 has 48 places for ports, 64 are needed"),
        (RailOnlySpec(below=(3,)), 8, "`below` 3 has 3 places for ports, 4 are needed"),
        (
            DragonflyPlusSpec(below=2, leaves=2, spines=2, global_links=3),
            8,
            "8 groups of 2 x 2 ports, of which each has 6 global links",
        ),
        (FullMeshSpec(dims=(2, 3)), 1, "2 x 3 are 6 nodes, there are 4; set it or `nodes`"),
        (FullMeshSpec(dims=(4,)), 8, "nodes of one GPU each at the figures of"),
        (CircuitsSpec(strides=(2,)), 1, "strides 2 of 4 nodes leave 2 parts that no circuit joins"),
        (CircuitsSpec(strides=(1, 3)), 1, "expected different ones from 1 to 2"),
        (CircuitsSpec(strides=(1, 1)), 1, "expected different ones from 1 to 2"),
    ],
)
def test_what_does_not_fit_is_refused(fabric: Fabric, gpus: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        spec_of(fabric, 4, gpus)


def test_a_fabric_needs_nics() -> None:
    spec = spec_of(None, 1)
    with pytest.raises(InputError, match=r"a \[fabric\] joins NICs, and there is no table \[nic\]"):
        msgspec.structs.replace(spec, nic=None, fabric=FatTreeSpec(below=(8,)))


@pytest.mark.parametrize(("keys", "expected"), [
    ('kind = "fat-tree"\nbelow = [16, 4]\nabove = [2]\noversubscription = [2.0]',
     FatTreeSpec(below=(16, 4), above=(2,), oversubscription=(2.0,))),
    ('kind = "rail-optimised"\nbelow = [4, 8]\nabove = [2]\npxn = false',
     RailOptimisedSpec(below=(4, 8), above=(2,), pxn=False)),
    ('kind = "rail-only"\nbelow = [4]', RailOnlySpec(below=(4,))),
    ('kind = "dragonfly+"\nbelow = 8\nleaves = 2\nspines = 2\nglobal_links = 4\nglobal_bytes_per_s = 25e9',
     DragonflyPlusSpec(below=8, leaves=2, spines=2, global_links=4, global_bytes_per_s=25e9)),
])  # fmt: skip
def test_a_cluster_file_names_each_kind(keys: str, expected: Fabric, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    preset = Path(__file__).parents[3] / "topology/hardware/hgx-h100.toml"
    file.write_text(preset.read_text().replace("nodes = 1\n", "nodes = 4\n") + f"\n[fabric]\n{keys}\n")
    assert load_cluster(str(file)).fabric == expected
    file.write_text(file.read_text() + "uplinks = 3\n")
    with pytest.raises(InputError, match="unknown key 'uplinks'"):
        load_cluster(str(file))
