"""Routes by the structure of the fabrics, and the order of resources: both equal what the graph of the machine says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.base.errors import InputError
from sim.base.presets import preset_names
from tests.helpers import slow_but
from topology.cluster import Cluster, Route, load_cluster
from topology.fabric.fabrics import socket_of
from topology.specs import ClusterSpec, DramSpec, HostSpec, LinkSpec, NicSpec, PcieSpec, SocketSpec

RATES = st.sampled_from([1e9, 3e9, 25e9, 7.3e10])


@st.composite
def links(draw: st.DrawFn) -> LinkSpec:
    rate = draw(RATES)
    return LinkSpec(
        bytes_per_s=rate,
        latency_s=draw(st.sampled_from([0.0, 1e-6, 3.3e-6])),
        payload=draw(st.sampled_from([1.0, 0.9, 0.83])),
        both_ways_bytes_per_s=draw(st.sampled_from([None, 1.5 * rate])),
    )


@st.composite
def nics(draw: st.DrawFn, gpus: int) -> NicSpec:
    """Shared, one each, or several each; in stripes or not."""
    given = draw(st.sampled_from([None, *(n for n in range(1, gpus + 1) if gpus % n == 0), 2 * gpus, 6 * gpus]))
    count = given or gpus
    own = max(1, count // gpus)
    stripe = draw(st.sampled_from([None, *(n for n in range(own, count + 1, own) if count % n == 0)]))
    return NicSpec(**msgspec.structs.asdict(draw(links())), per_node=given, stripe=stripe)


@st.composite
def pcies(draw: st.DrawFn, peers: str) -> PcieSpec:
    return PcieSpec(
        **msgspec.structs.asdict(draw(links())),
        gpus_per_switch=draw(st.integers(1, 9)),
        uplink=draw(st.none() | links()),
        peers=peers,
    )


@st.composite
def sockets(draw: st.DrawFn) -> SocketSpec:
    dram = DramSpec(capacity_bytes=10**12, bytes_per_s=draw(RATES), write_bytes_per_s=draw(st.none() | RATES))
    return SocketSpec(per_node=draw(st.integers(1, 4)), dram=dram, link=draw(st.none() | links()))


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    """Any that fits together: with some kinds of links, and several of a kind."""
    nodes = draw(st.integers(1, 3))
    gpu, on_cpu = load_cluster("hgx-h100").gpu, draw(st.booleans())
    socket = draw(st.none() | sockets())
    pcie = draw(pcies(draw(st.sampled_from(["node", "switch"])))) if socket else draw(st.none() | pcies("node"))
    nvlink, loopback = draw(st.none() | links()), draw(links() if on_cpu else st.none() | links())
    gpus = draw(st.integers(1, 9)) if nvlink or pcie or loopback else 1
    per_switch = pcie.gpus_per_switch if pcie else 1
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0 and (size == gpus or per_switch % size == 0)]
    return ClusterSpec(
        name="any",
        nodes=nodes,
        gpus_per_node=gpus,
        gpu=msgspec.structs.replace(gpu, kind="cpu" if on_cpu else "cuda"),
        hbm=load_cluster("hgx-h100").hbm,
        nvlink=nvlink,
        bridged_gpus=draw(st.none() | st.sampled_from(sizes)) if nvlink and (pcie or gpus == 1) else None,
        pcie=pcie,
        socket=socket,
        nic=draw(nics(gpus) if nodes > 1 else st.none() | nics(gpus)),
        loopback=loopback,
        host=HostSpec(cores=4.0) if on_cpu else None,
    )


def require_what_the_graph_says(cluster: Cluster) -> None:
    """Every resource, every pair of devices, and both ways between every device and its host's memory."""
    assert [one.name for one in cluster.resources] == names_by_graph(cluster)
    numbers = range(len(cluster.devices))
    for source in numbers:
        for target in numbers:
            assert outcome(cluster.route, source, target) == outcome(cluster.search, source, target)
    for device in numbers if cluster.spec.socket else []:
        assert cluster.host_route(device, to_host=True) == host_route_by_graph(cluster, device, to_host=True)
        assert cluster.host_route(device, to_host=False) == host_route_by_graph(cluster, device, to_host=False)


def names_by_graph(cluster: Cluster) -> list[str]:
    """Resources of devices, of edges as networkx lists them, and of sockets, each where it comes up first."""
    spec = cluster.spec
    if spec.gpu.kind == "cpu":
        own = [f"node[{node}].{part}" for node in range(spec.nodes) for part in ("cores", "dram")]
    else:
        own = [f"gpu[{number}].{part}" for number in range(len(cluster.devices)) for part in ("sms", "hbm")]
    passed = [one.name for *_, edge in cluster.graph.edges(data="edge") for one in edge.resources]
    count = spec.nodes * spec.socket.per_node if spec.socket else 0
    writes = spec.socket is not None and spec.socket.dram.write_bytes_per_s is not None
    parts = ("dram", "dram.writes") if writes else ("dram",)
    drams = [f"socket[{number}].{part}" for number in range(count) for part in parts]
    return list(dict.fromkeys([*own, *passed, *drams]))


def host_route_by_graph(cluster: Cluster, device: int, *, to_host: bool) -> Route:
    socket = socket_of(cluster.spec, device)
    path = nx.shortest_path(cluster.graph, f"gpu[{device}]", f"socket[{socket}]")
    edges = [cluster.graph.edges[pair]["edge"] for pair in pairwise(path if to_host else path[::-1])]
    index = {one.name: number for number, one in enumerate(cluster.resources)}
    memory = [name for name in (f"socket[{socket}].dram", f"socket[{socket}].dram.writes") if name in index]
    passed = [*(index[one.name] for edge in edges for one in edge.resources)]
    passed += [index[name] for name in (memory if to_host else memory[:1])]
    rate = min(cluster.resources[one].capacity for one in passed)
    return Route(tuple(passed), rate, sum(edge.latency_s for edge in edges))


def outcome(route: Callable[[int, int], Route], source: int, target: int) -> Route | str:
    try:
        return route(source, target)
    except InputError as error:
        return str(error)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    slow_but(
        set(preset_names("topology/hardware")) - {"gb200-nvl72", "gb300-nvl72"}, preset_names("topology/hardware")
    ),
)
def test_structure_and_graph_agree_on_every_preset(name: str) -> None:
    spec = load_cluster(name)
    for nodes in (1, 2) if spec.nic else (1,):
        require_what_the_graph_says(Cluster(msgspec.structs.replace(spec, nodes=nodes)))


@pytest.mark.sweep
@given(clusters())
def test_structure_and_graph_agree_on_any_cluster(spec: ClusterSpec) -> None:
    require_what_the_graph_says(Cluster(spec))


def test_where_no_link_joins_two_sockets_there_is_no_route() -> None:
    spec = load_cluster("a100-pcie")
    assert spec.socket is not None
    cluster = Cluster(msgspec.structs.replace(spec, socket=msgspec.structs.replace(spec.socket, link=None)))
    assert cluster.route(0, 3) == cluster.search(0, 3)
    with pytest.raises(InputError, match=r"no link leads from gpu\[0\] to gpu\[7\] of cluster 'a100-pcie'"):
        cluster.route(0, 7)
    with pytest.raises(InputError, match=r"no link leads from gpu\[5\] to gpu\[5\]"):
        cluster.route(5, 5)


@pytest.mark.parametrize("per_node", [1, 2, 4, 16])
def test_a_nic_that_gpus_share_is_no_way_between_them(per_node: int) -> None:
    """Though it is fewer hops away than the socket, or the switch."""
    nic = NicSpec(bytes_per_s=25e9, latency_s=0.0, per_node=per_node)
    cluster = Cluster(msgspec.structs.replace(load_cluster("a100-pcie"), nodes=2, nic=nic))
    require_what_the_graph_says(cluster)
    assert not any("nic" in cluster.resources[index].name for index in cluster.route(0, 7).resources)


def test_routes_of_a_placement_are_those_of_its_devices() -> None:
    spec = msgspec.structs.replace(load_cluster("hgx-h100"), nodes=2)
    plain, placed = Cluster(spec), Cluster(spec, [12, 3, 8])
    assert placed.route(0, 1) == plain.route(12, 3)
    assert placed.route(2, 0) == plain.route(8, 12)
    assert placed.host_route(1, to_host=True) == plain.host_route(3, to_host=True)
    assert placed.devices == [plain.devices[number] for number in (12, 3, 8)]
    with pytest.raises(InputError, match=r"expected different devices among 0 to 15"):
        Cluster(spec, [3, 3])


@pytest.mark.sweep
def test_the_largest_cluster() -> None:
    spec = msgspec.structs.replace(load_cluster("hgx-h100"), nodes=2048)
    cluster = Cluster(spec)
    assert len(cluster.devices) == 16_384
    names = [cluster.resources[index].name for index in cluster.route(16_381, 4_000).resources]
    assert names == ["gpu[16381].pcie.out", "nic[16381].nic.out", "nic[4000].nic.in", "gpu[4000].pcie.in"]
    assert (
        len({one.name for one in cluster.resources}) == len(cluster.resources) == 16_384 * (2 + 2 * 3 + 3) + 2_048 * 6
    )
