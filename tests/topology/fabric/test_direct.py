"""Nodes in grids without switches, and the networks of the lab: routes, what they share, what is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import networkx as nx
import numpy as np
import pytest

from sim.base.errors import InputError
from sim.engine.costs.cost import CostModel
from sim.engine.costs.phases import Flow, Latency
from sim.engine.play.simulate import simulate
from sim.engine.traffic.least import least_seconds, needs
from sim.schedule.ir.ops import AllToAll, Collective
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import check
from sim.words.workload import Workload, load_model
from topology.cluster import Cluster, load_cluster
from topology.kinds import CircuitsSpec, Fabric, FullMeshSpec, MeshSpec, TorusSpec
from topology.lab import NETWORKS, PAYLOAD, lab_spec
from topology.specs import ClusterSpec, NicSpec, PerGpu

RATE = 25e6


def grid(fabric: Fabric, nodes: int) -> ClusterSpec:
    nic = NicSpec(bytes_per_s=RATE, latency_s=1e-5)
    return msgspec.structs.replace(load_cluster("hgx-h100"), nodes=nodes, gpus_per_node=1, nic=nic, fabric=fabric)


@pytest.mark.parametrize("fabric", [
    MeshSpec(dims=(5,)), TorusSpec(dims=(5,)), MeshSpec(dims=(2, 3)), TorusSpec(dims=(2, 2)), TorusSpec(dims=(3, 4)),
    TorusSpec(dims=(2, 3, 2)),
])  # fmt: skip
def test_every_route_is_as_short_as_any_and_ends_where_it_should(fabric: MeshSpec | TorusSpec) -> None:
    nodes = 1
    for size in fabric.dims:
        nodes *= size
    cluster = Cluster(grid(fabric, nodes))
    for source in range(nodes):
        for target in range(nodes):
            if source == target:
                continue
            path, route = cluster.path(source, target), cluster.route(source, target)
            assert (path[0], path[-1]) == (f"gpu[{source}]", f"gpu[{target}]")
            assert len(path) == 1 + len(route.resources)
            assert len(route.resources) == nx.shortest_path_length(cluster.graph, path[0], path[-1])
            assert route == cluster.search(source, target), "along the edges of the graph"
            assert route.latency_s == pytest.approx(1e-5 * len(route.resources))


@pytest.mark.parametrize("fabric", [
    MeshSpec(dims=(2, 3)), TorusSpec(dims=(2, 3)), FullMeshSpec(dims=(2, 3)), FullMeshSpec(dims=(6,)),
    CircuitsSpec(strides=(2, 3)),
])  # fmt: skip
def test_links_are_made_as_the_graph_has_them(fabric: Fabric) -> None:
    """Each in its place, however it is asked for; those of GPU 1, at a quarter of the rate, are a quarter as fast."""
    spec = grid(fabric, 6)
    cluster = Cluster(msgspec.structs.replace(spec, per_gpu={1: PerGpu(link=0.25)}))
    all_of_them = list(cluster.resources)
    links = [one for one in all_of_them if one.group == "nic"]
    of_graph = [edge.resources[0] for _, _, edge in Cluster(spec).graph.edges(data="edge") if edge.resources]
    assert [one.name for one in links] == [one.name for one in of_graph if one.group == "nic"]
    assert {one.name for one in links if one.capacity == RATE / 4} == {one.name for one in links if "[1]" in one.name}
    assert [cluster.resources[index] for index in range(len(cluster.resources))] == all_of_them
    assert cluster.resources.capacities() == [one.capacity for one in all_of_them]
    assert [cluster.resources.number(one.name) for one in all_of_them] == [*range(len(all_of_them))]


def test_a_torus_of_two_by_two_is_a_ring_of_four_links() -> None:
    """Its diagonal goes along the last dimension first; the ways around are the links that there are."""
    cluster = Cluster(grid(TorusSpec(dims=(2, 2)), 4))
    assert cluster.path(0, 3) == ["gpu[0]", "gpu[1]", "gpu[3]"]
    assert cluster.path(3, 0) == ["gpu[3]", "gpu[2]", "gpu[0]"]
    assert len([one for one in cluster.resources if ".to[" in one.name]) == 8


@pytest.mark.parametrize(("fabric", "parts"), [(TorusSpec(dims=(2, 2)), 2), (MeshSpec(dims=(4,)), 4)])
def test_an_all_to_all_takes_what_its_busiest_link_carries(fabric: MeshSpec | TorusSpec, parts: int) -> None:
    """In a torus of 2 x 2 every link carries 2 parts: of 12 messages 8 take one link and 4 take two, over 8 links. Of a
    chain the middle links carry 4. Parts of 1 MB at 25 MB/s, after a latency of the longest route.
    """
    cluster = Cluster(grid(fabric, 4))
    hops = max(len(cluster.route(0, target).resources) for target in (1, 2, 3))
    latency, flow = CostModel(cluster, None).collective(an_all_to_all(), (0, 1, 2, 3), 10**6)
    assert isinstance(latency, Latency)
    assert isinstance(flow, Flow)
    assert latency.seconds == pytest.approx(1e-5 * hops)
    assert flow.seconds == pytest.approx(parts * 1e6 / RATE)
    bound_s = least_seconds(needs("all_to_all", (0, 1, 2, 3), 10**6, cluster), cluster)
    assert bound_s <= flow.seconds * (1 + 1e-12)


def an_all_to_all() -> Collective:
    """Return the op of Ulysses on one of four ranks."""
    model = load_model("tiny")
    entry = SCHEDULES["ulysses"]
    workload = Workload(model=model, seq=512, dtype="fp32")
    program = entry.schedule(workload, entry.mesh(4, model)).program(0)
    return next(op for op in program.ops if isinstance(op, AllToAll))


def test_messages_that_meet_on_a_link_of_a_chain_share_it() -> None:
    """Ring attention of four ranks in a chain: 3 to 0 passes all three links backwards, 0 to 1, 1 to 2 and 2 to 3 one
    each forwards, so nothing is shared, and all take as long. An all-to-all puts 3, 4 and 3 parts on the links of each
    direction: 1 to 2 carries those of 0 and 1 to 2 and 3.
    """
    spec = lab_spec(load_cluster("host"), "chain", 4, RATE)
    cluster = Cluster(spec)
    passed: dict[str, int] = {}
    for source in range(4):
        for target in range(4):
            if source != target:
                for index in cluster.route(source, target).resources:
                    name = cluster.resources[index].name
                    passed[name] = passed.get(name, 0) + 1
    assert passed == {
        "node[0].to[1]": 3, "node[1].to[2]": 4, "node[2].to[3]": 3, "node[1].to[0]": 3, "node[2].to[1]": 4,
        "node[3].to[2]": 3,
    }  # fmt: skip
    ring = [
        cluster.resources[index].name
        for pair in ((0, 1), (1, 2), (2, 3), (3, 0))
        for index in cluster.route(*pair).resources
    ]
    assert len(set(ring)) == len(ring) == 6


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["ring", "ulysses", "usp", "double-ring", "allgather"])
def test_whole_layers_play_whatever_transfers_take_of_the_cores(schedule: str) -> None:
    """Several communicators at once, of which none waits for what others hold; both engines alike."""
    host = load_cluster("host")
    assert host.host
    host = msgspec.structs.replace(host, host=msgspec.structs.replace(host.host, transfer_s_per_byte=1e-6, cores=1.0))
    model = load_model("tiny")
    workload = Workload(model=model, seq=512, dtype="fp32", scope="step", layers=1)
    entry = SCHEDULES[schedule]
    checked = check(entry.schedule(workload, entry.mesh(4, model)))
    cluster = Cluster(lab_spec(host, "thin", 4, RATE))
    native, reference = (simulate(checked, cluster, None, engine=engine) for engine in ("auto", "simpy"))
    assert native.trace.step_time_s == reference.trace.step_time_s > 0


@pytest.mark.sweep
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_the_lab_play_slower_the_slower_their_links(name: str) -> None:
    """At one rate for all of their links, thin excepted; all ranks compute on the same cores."""
    host = load_cluster("host")
    workload = Workload(model=load_model("tiny"), seq=1024, dtype="fp32", scope="layer", layers=1)
    checked = check(SCHEDULES["ring"].schedule(workload, SCHEDULES["ring"].mesh(4, workload.model)))
    times = []
    for rate in (6.25e6, 12.5e6, 125e6):
        cluster = Cluster(lab_spec(host, name, 4, rate))
        assert len({device.compute for device in cluster.devices}) == 1
        assert len({device.hbm for device in cluster.devices}) == 1
        times.append(simulate(checked, cluster, None).trace.step_time_s)
    assert times[0] > 1.5 * times[1] > 3 * times[2]
    of_link = next(one for one in Cluster(lab_spec(host, name, 4, RATE)).resources if one.group in {"nic", "loopback"})
    assert of_link.capacity in {RATE * PAYLOAD, 125e6 * PAYLOAD}


def test_threads_of_slow_links_take_cores_that_kernels_then_lack() -> None:
    """Two ranks on two cores: each sends and receives 12.5 MB/s x 1448/1514 at 2 ns a byte, which takes 0.0478 cores of
    each, so both kernels beside have 2 - 0.0956 of 2 cores, and take 1.05 times as long. Transfers take as ever.
    Kernels are always left something: with two ranks a third of the cores.
    """
    host = load_cluster("host")
    workload = Workload(model=load_model("tiny"), seq=4096, mask="full", dtype="fp32", passes="forward")
    checked = check(SCHEDULES["ring"].schedule(workload, SCHEDULES["ring"].mesh(2, workload.model)))

    def played(**figures: float) -> tuple[float, float]:
        """Return the seconds of the attention beside the transfer, and of the transfer."""
        spec = lab_spec(host, "flat", 2, 12.5e6)
        assert spec.host
        spec = msgspec.structs.replace(spec, host=msgspec.structs.replace(spec.host, cores=2.0, **figures), per_gpu={})
        rows = simulate(checked, Cluster(spec), None).trace.of_rank(0)
        attend, exchange = (next(row.busy_s for row in rows if row.kind == kind) for kind in ("Attend", "Exchange"))
        return attend, exchange

    alone_s, transfer_s = played()
    beside_s, as_long_s = played(transfer_s_per_byte=2e-9)
    assert beside_s == pytest.approx(alone_s * 2 / (2 - 4 * 2e-9 * 12.5e6 * PAYLOAD))
    assert as_long_s == pytest.approx(transfer_s)
    assert played(transfer_s_per_byte=1.0)[0] == pytest.approx(3 * alone_s)


@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
def test_threads_take_cores_once_for_all_that_a_rank_sends_and_only_while_it_moves(schedule: str) -> None:
    """A layer whose gradients are summed beside its hops: four ranks of which each way takes 0.1 of four cores leave
    3.2 to four kernels, however much a rank sends at once. None takes longer than that, some nearly, and one that
    nothing moves beside takes as long as without.
    """
    host = load_cluster("host")
    workload = Workload(model=load_model("tiny"), seq=1024, dtype="fp32", scope="layer", layers=1)
    checked = check(SCHEDULES[schedule].schedule(workload, SCHEDULES[schedule].mesh(4, workload.model)))

    def kernels(transfer_cores: float) -> dict[tuple[int, int], float]:
        spec = lab_spec(host, "flat", 4, 25e6)
        assert spec.host
        spec = msgspec.structs.replace(
            spec,
            host=msgspec.structs.replace(
                spec.host, cores=4.0, transfer_cores=transfer_cores, transfer_s_per_byte=0.0, wakeup_s=0.0
            ),
        )
        found = [simulate(checked, Cluster(spec), None, engine=engine) for engine in ("auto", "simpy")]
        assert np.array_equal(found[0].trace.ended_s, found[1].trace.ended_s)
        return {(row.rank, row.op): row.busy_s for row in found[0].trace.rows if row.kind == "Gemm"}

    alone, beside = kernels(0.0), kernels(0.1)
    longer = [beside[key] / alone[key] for key in alone]
    assert min(longer) == pytest.approx(1.0)
    assert 1.2 < max(longer) <= 4 / 3.2 * (1 + 1e-9)


def test_each_message_between_gpus_takes_its_own_route() -> None:
    """Over a chain: one hop of 10 us and three, and so many links. A port at a quarter slows the messages of its node,
    not those between the same places of another.
    """
    cost, group = CostModel(Cluster(grid(MeshSpec(dims=(4,)), 4)), None), (0, 1, 2, 3)
    for target in (1, 3):
        latency, flow = cost.transfer(0, target, 10**6, group)
        assert isinstance(latency, Latency)
        assert isinstance(flow, Flow)
        assert latency.seconds == pytest.approx(1e-5 * target)
        assert len(flow.demands) == target + 2, "links and both memories"
    slow = msgspec.structs.replace(load_cluster("hgx-h100"), nodes=2, per_gpu={9: PerGpu(link=0.25)})
    cost, group = CostModel(Cluster(slow), None), tuple(range(16))
    even, quarter = (cost.transfer(first, first + 1, 10**9, group)[-1] for first in (0, 8))
    assert quarter.seconds == pytest.approx(4 * even.seconds)


def test_what_is_no_grid_or_no_network_is_refused() -> None:
    with pytest.raises(InputError, match="2 x 3 are 6 nodes, there are 4; set it or `nodes`"):
        grid(MeshSpec(dims=(2, 3)), 4)
    with pytest.raises(InputError, match="nodes of one GPU each at the figures of"):
        msgspec.structs.replace(load_cluster("hgx-h100"), nodes=2, fabric=MeshSpec(dims=(2,)))
    with pytest.raises(InputError, match="unknown network 'chian'.*did you mean 'chain'"):
        lab_spec(load_cluster("host"), "chian", 4, RATE)
    with pytest.raises(InputError, match="network torus of 5 ranks: expected at least 4, and an even number"):
        lab_spec(load_cluster("host"), "torus", 5, RATE)


def test_a_cluster_file_names_a_fabric(tmp_path: Path) -> None:
    file = tmp_path / "chain.toml"
    file.write_text(
        'name = "chain"\nnodes = 4\ngpus_per_node = 1\n[gpu]\nname = "cpu"\nkind = "cpu"\nsms = 1\nlaunch_s = 2e-5\n'
        "peak_flops_per_s = { fp32 = 1e11 }\n[hbm]\ncapacity_bytes = 8_000_000_000\nbytes_per_s = 5e10\n"
        "[host]\ncores = 2\nshared = true\n[loopback]\nbytes_per_s = 1e9\nlatency_s = 1e-5\n"
        '[nic]\nbytes_per_s = 25e6\nlatency_s = 1e-4\npayload = 0.95\n[fabric]\nkind = "mesh"\ndims = [4]\n'
    )
    assert load_cluster(str(file)).fabric == MeshSpec(dims=(4,))
    file.write_text(file.read_text().replace("mesh", "dragonfly"))
    with pytest.raises(InputError, match="dragonfly"):
        load_cluster(str(file))


@pytest.mark.parametrize("name", ["flat", "chain"])
def test_a_slow_port_is_slow_for_all_that_pass_it(name: str) -> None:
    """Rank 1 at a quarter: what it sends or is sent takes four times as long. 2 to 3 does not pass it; 0 to 3 does
    in a chain.
    """
    spec = msgspec.structs.replace(lab_spec(load_cluster("host"), name, 4, RATE), per_gpu={1: PerGpu(link=0.25)})
    cluster = Cluster(spec)
    assert cluster.even.route(0, 1).bytes_per_s == RATE * PAYLOAD
    for source, target, slow in ((0, 1, True), (1, 0, True), (2, 3, False), (0, 3, name == "chain")):
        assert cluster.route(source, target).bytes_per_s == RATE * PAYLOAD * (0.25 if slow else 1.0)
    seconds = [
        CostModel(one, None).collective(an_all_to_all(), (0, 1, 2, 3), 10**6)[-1] for one in (cluster, cluster.even)
    ]
    assert seconds[0].seconds == pytest.approx(4 * seconds[1].seconds)
