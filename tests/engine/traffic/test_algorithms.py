"""Algorithms of collectives that a cluster names, by hand; NICs have 10 us, links inside a node 1 us."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from itertools import permutations

import msgspec
import pytest

from longstep import InputError, predict
from sim.engine.traffic.algorithms import LinkTraffic, direct
from sim.engine.traffic.collectives import link_traffic
from sim.engine.traffic.least import least_seconds, needs
from sim.schedule.ir.ops import CollectiveName
from tests.engine.traffic.test_fabrics import FABRICS, cluster_of
from tests.helpers import make_cluster_spec
from topology.cluster import Cluster, load_cluster
from topology.collectives import CollectivesSpec
from topology.fabric.direct import closed_ways, direct_edges
from topology.kinds import CircuitsSpec, Direct, Fabric, FatTreeSpec, MeshSpec, RailOptimisedSpec, TorusSpec
from topology.specs import LinkSpec, NicSpec


def machine(nodes: int, gpus: int, *, fabric: Fabric | None = None, reduces: bool = False, **by: str) -> Cluster:
    spec = make_cluster_spec(
        gpus,
        nodes=nodes,
        nvlink=LinkSpec(bytes_per_s=1e9, latency_s=1e-6, reduces=reduces),
        nic=NicSpec(bytes_per_s=1e8, latency_s=1e-5),
        fabric=fabric,
        collectives=CollectivesSpec(**by),  # type: ignore[arg-type]
    )
    return Cluster(spec)


def of(kind: CollectiveName, nbytes: int, cluster: Cluster) -> LinkTraffic:
    return link_traffic(kind, tuple(range(len(cluster.devices))), nbytes, cluster)


def on(group: str, found: LinkTraffic, cluster: Cluster) -> set[float]:
    """Return the loads on links of a kind."""
    return {round(nbytes, 6) for link, nbytes in found.nbytes.items() if cluster.resources[link].group == group}


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_gathers_by_hierarchy(kind: CollectiveName) -> None:
    """4 nodes x 2: each NIC sends the parts of 3 nodes on, each NVLink then those of all 4 nodes."""
    cluster = machine(4, 2, **{kind: "hierarchical"})
    found = of(kind, 80, cluster)
    assert on("nic", found, cluster) == {3 * 80.0}
    assert on("nvlink", found, cluster) == {4 * 80.0}
    assert found.latency_s == pytest.approx(1e-6 + 3 * 1e-5)


def test_all_reduce_by_hierarchy() -> None:
    """Of 800 bytes each of 2 ranks of a node has half, which a ring of 4 nodes sums and tells in 2 x 3 steps of 100."""
    cluster = machine(4, 2, all_reduce="hierarchical")
    found = of("all_reduce", 800, cluster)
    assert on("nic", found, cluster) == {6 * 100.0}
    assert on("nvlink", found, cluster) == {2 * 400.0}
    assert found.latency_s == pytest.approx(2 * (1e-6 + 3 * 1e-5))
    ring = of("all_reduce", 800, machine(4, 2, all_reduce="ring"))
    assert on("nic", ring, cluster) == {14 * 100 / 2}
    assert ring.latency_s == pytest.approx(14 * (1e-6 + 1e-5) / 2)


def test_hierarchies_of_one_stage_are_rings() -> None:
    for nodes, gpus in ((1, 4), (4, 1)):
        hierarchical, ring = (
            of("all_reduce", 800, machine(nodes, gpus, all_reduce=by)) for by in ("hierarchical", "ring")
        )
        assert hierarchical == ring


def test_all_to_all_along_rails() -> None:
    """4 nodes x 2: over NVLink what the other GPU's rail takes to 4 nodes, over a NIC 2 parts to each of 3 nodes."""
    aligned, straight = (machine(4, 2, all_to_all=by) for by in ("rail-aligned", "direct"))
    found, usual = of("all_to_all", 10, aligned), of("all_to_all", 10, straight)
    assert on("nic", found, aligned) == on("nic", usual, straight) == {60.0}
    assert (on("nvlink", found, aligned), on("nvlink", usual, straight)) == ({40.0}, {10.0})
    assert found.latency_s == pytest.approx(1.1e-5)
    assert found.memory_bytes == 2 * usual.memory_bytes
    assert usual == of("all_to_all", 10, machine(4, 2))


def test_rail_aligned_all_to_all_leaves_the_spine_alone() -> None:
    rails = RailOptimisedSpec(below=(2, 2), above=(1,), pxn=False)
    aligned, straight = (machine(2, 2, fabric=rails, all_to_all=by) for by in ("rail-aligned", "direct"))
    assert on("fabric", of("all_to_all", 10, aligned), aligned) == set()
    assert on("fabric", of("all_to_all", 10, straight), straight) == {20.0}


def test_parallel_aggregated_trees_take_a_logarithm_of_steps() -> None:
    """Of 6 nodes: 1 part to the next, 2 to the second next, the last 2 to the fourth next."""
    cluster = machine(6, 1, all_gather="pat")
    found = of("all_gather", 10, cluster)
    assert on("nic", found, cluster) == {5 * 10.0}
    assert found.latency_s == pytest.approx(3 * 1e-5)


def test_a_tree_in_one_node_is_a_chain() -> None:
    """Those in the middle send the whole up and down, the ends one way each."""
    cluster = machine(1, 4, all_reduce="tree")
    found = of("all_reduce", 800, cluster)
    assert on("nvlink", found, cluster) == {800.0, 1600.0}
    assert found.latency_s == pytest.approx(6e-6)


def test_switches_sum_where_they_are_asked_to() -> None:
    """Of 2 GPUs a ring carries less; of 4 a switch does: the whole and a part."""
    for gpus, nbytes in ((2, 1200.0), (4, 1000.0)):
        cluster = machine(1, gpus, reduces=True, all_reduce="switch")
        assert on("nvlink", of("all_reduce", 800, cluster), cluster) == {nbytes}


def test_rings_along_a_torus_use_both_ways() -> None:
    """4 x 4: 15 parts, half of them each way, over two links of each node; every hop is one link. By number a ring
    goes one way only, and its hops at the ends of rows are two links in a torus, four in a mesh.
    """
    for fabric, longer in ((TorusSpec(dims=(4, 4)), 4 * 1), (MeshSpec(dims=(4, 4)), 3 * 3 + 5)):
        cluster = machine(16, 1, fabric=fabric, all_gather="neighbour-ring")
        found = of("all_gather", 16, cluster)
        assert on("nic", found, cluster) == {15 * 16 / 2}
        assert len(found.nbytes) == 32
        assert found.latency_s == pytest.approx(15 * 1e-5)
        ring = machine(16, 1, fabric=fabric, all_gather="ring")
        assert max(on("nic", of("all_gather", 16, ring), ring)) == 15 * 16
        assert of("all_gather", 16, ring).hop_s == pytest.approx((16 + longer) / 16 * 1e-5)


def test_rings_over_circuits_share_their_strides() -> None:
    """8 nodes: strides 1 and 3 pass all of them, 2 does not: 7 parts over 4 ways."""
    cluster = machine(8, 1, fabric=CircuitsSpec(strides=(1, 2, 3)), all_reduce="neighbour-ring")
    found = of("all_reduce", 80, cluster)
    assert on("nic", found, cluster) == {14 * 10 / 4}
    assert {cluster.resources[link].name for link in found.nbytes if "node[0]" in cluster.resources[link].name} == {
        f"node[0].to[{node}]" for node in (1, 3, 5, 7)
    }


GRIDS = [(4,), (2, 2), (4, 4), (3, 4), (5, 2), (2, 1, 3), (2, 3, 3), (3, 3, 4), (1, 6), (2, 2, 2, 2)]


@pytest.mark.parametrize("dims", GRIDS)
def test_closed_ways_follow_links(dims: tuple[int, ...]) -> None:
    """In a torus all of these close; in a mesh those that are no chain."""
    for fabric in (TorusSpec(dims=dims), MeshSpec(dims=dims)):
        spec = make_cluster_spec(1, nodes=math.prod(dims), nic=NIC, fabric=fabric)
        (order,) = closed_ways(fabric, spec.nodes)
        assert sorted(order) == list(range(spec.nodes))
        linked = direct_edges(spec)
        closes = not (isinstance(fabric, MeshSpec) and sum(size > 1 for size in dims) == 1)
        for one, other in zip(order, (*order[1:], order[0]) if closes else order[1:], strict=closes):
            assert f"gpu[{other}]" in linked[f"gpu[{one}]"]


NIC = NicSpec(bytes_per_s=1e8, latency_s=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize(("fabric", "nodes", "gpus"), [(None, 4, 4), *FABRICS])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_none_beats_what_is_needed_nor_the_fastest(
    fabric: Fabric | None, nodes: int, gpus: int, kind: CollectiveName
) -> None:
    """``fastest`` is chosen of rings, trees and switches, in a full mesh of direct ones, too."""
    spec, ranks = cluster_of(fabric, nodes, gpus).spec, tuple(range(nodes * gpus))
    least_s = least_seconds(needs(kind, ranks, 10**9, Cluster(spec)), Cluster(spec))
    seconds = {}
    for by in ("fastest", "ring", "tree", "hierarchical", "pat", "direct", "neighbour-ring", "rail-aligned"):
        try:
            own = msgspec.convert({kind: by}, CollectivesSpec)
            cluster = Cluster(msgspec.structs.replace(spec, collectives=own))
            seconds[by] = link_traffic(kind, ranks, 10**9, cluster).seconds(cluster)
        except (InputError, msgspec.ValidationError):
            continue
        assert seconds[by] >= least_s * (1 - 1e-12)
    assert ("rail-aligned" if kind == "all_to_all" else "hierarchical") in seconds
    assert ("neighbour-ring" in seconds) == (kind != "all_to_all" and isinstance(fabric, Direct))
    assert seconds["fastest"] <= min(seconds.get(by, math.inf) for by in ("ring", "tree"))


@pytest.mark.parametrize("by", ["ring", "tree", "hierarchical"])
@pytest.mark.parametrize(("nodes", "per_node"), [(3, 4), (4, 2), (5, 3)])
def test_links_of_some_alike_nodes_tell_those_of_all(by: str, nodes: int, per_node: int) -> None:
    """As of the fastest ones, for replicas that are played once."""
    cluster, ranks = machine(nodes, per_node, all_reduce=by), tuple(range(nodes * per_node))
    whole = link_traffic("all_reduce", ranks, 12_345, cluster)
    for first in range(1, nodes):
        near = link_traffic("all_reduce", ranks, 12_345, cluster, first * per_node)
        assert near._replace(nbytes={}) == whole._replace(nbytes={})
        assert near.nbytes == pytest.approx({link: whole.nbytes[link] for link in near.nbytes}, rel=1e-12)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="'neighbour-ring' follows links between nodes, which are joined by switches"):
        machine(4, 1, fabric=FatTreeSpec(below=(8,)), all_gather="neighbour-ring")
    with pytest.raises(InputError, match=r"'switch' needs switches that sum: set nvlink\.reduces, or tree"):
        machine(1, 4, all_reduce="switch")
    with pytest.raises(InputError, match="'pat': a group has several ranks on a node"):
        of("all_gather", 10, machine(2, 2, all_gather="pat"))
    for kind, by in (("all_reduce", "hierarchical"), ("all_to_all", "rail-aligned")):
        with pytest.raises(InputError, match=f"{kind} = '{by}': a group has 1 and 2 ranks on its nodes"):
            link_traffic(kind, (0, 1, 2), 10, machine(2, 2, **{kind: by}))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no stride of 2, 3 passes all 6 nodes"):
        machine(6, 1, fabric=CircuitsSpec(strides=(2, 3)), all_gather="neighbour-ring")
    with pytest.raises(InputError, match="allowed are fastest, ring, neighbour-ring, hierarchical, pat, direct"):
        predict("ulysses", seq="8K", gpus=8, set={"cluster.collectives.all_gather": "tree"})


@pytest.mark.sweep
def test_measured_times_are_of_the_algorithm_that_ran() -> None:
    """Gathers over nodes were measured as rings; by hierarchy they take the measured efficiency, and that is said."""
    given = {"model": "llama3-8b", "seq": "64K", "cluster": "hgx-h100", "gpus": 16, "layers": 2, "scope": "layer"}
    usual, ring, other = (
        predict("allgather", **given, set={"cluster.collectives.all_gather": by})  # type: ignore[arg-type]
        for by in ("fastest", "ring", "hierarchical")
    )
    assert ring.step_time_s == usual.step_time_s
    assert other.step_time_s != usual.step_time_s
    assert any("all_gather by hierarchical over nic" in note for note in other.figures.evidence.notes)


def test_the_table_stands_in_a_cluster_file() -> None:
    spec = load_cluster("hgx-h100")
    assert "collectives" not in spec.figures(), "profiles keep their figures"
    named = msgspec.structs.replace(spec, collectives=CollectivesSpec(all_reduce="tree"))
    assert named.figures()["collectives"]["all_reduce"] == "tree"


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["hgx-h100", "a100-pcie", "h100-nvl", "l20-pcie", "mi300x", "rtx-4090", "host"])
@pytest.mark.parametrize("part", [12_345, 0.3, 1 << 50])
def test_what_an_all_to_all_puts_on_links_is_the_sum_over_all_pairs(name: str, part: float) -> None:
    """To the bit, of whole nodes, of some GPUs of some, of one node, and where ranks lie in another order."""
    spec = load_cluster(name)
    if name != "host":
        spec = msgspec.structs.replace(spec, nodes=3, nic=spec.nic or NicSpec(bytes_per_s=1e10, latency_s=1e-5))
    total = spec.nodes * spec.gpus_per_node
    draw = random.Random(7)
    for ranks in (tuple(range(total)), tuple(range(min(3, total))), tuple(draw.sample(range(total), total * 2 // 3))):
        cluster = Cluster(spec, draw.sample(range(total), total))
        load: dict[int, float] = defaultdict(float)
        longest_s = 0.0
        for source, target in permutations(ranks, 2):
            route = cluster.route(source, target)
            longest_s = max(longest_s, route.latency_s)
            for link in route.resources:
                load[link] += part
        found = direct(ranks, part, cluster)
        assert found.nbytes == load
        assert found.latency_s == longest_s
