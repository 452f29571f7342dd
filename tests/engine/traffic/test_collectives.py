"""What collectives put on links, by hand: 4 nodes x 2 GPUs, 1 us inside a node, 10 us across."""

from __future__ import annotations

from typing import get_args

import pytest

from sim.base.errors import InputError
from sim.engine.traffic.collectives import LinkTraffic, link_name, link_traffic
from sim.schedule.ir.ops import CollectiveName
from tests.helpers import make_cluster_spec
from topology.cluster import Cluster
from topology.specs import LinkSpec, NicSpec


def machine(nodes: int, gpus: int = 2) -> Cluster:
    spec = make_cluster_spec(
        gpus,
        nodes=nodes,
        nvlink=LinkSpec(bytes_per_s=1e9, latency_s=1e-6),
        nic=NicSpec(bytes_per_s=1e8, latency_s=1e-5),
    )
    return Cluster(spec)


def on(kind: str, traffic: LinkTraffic, cluster: Cluster) -> set[float]:
    """Return the loads on links of a kind."""
    return {round(nbytes, 6) for index, nbytes in traffic.nbytes.items() if cluster.resources[index].group == kind}


def test_a_ring_takes_the_mean_of_its_hops() -> None:
    """Eight ranks: four hops inside nodes and four across; each of two rings leaves each node by another NIC."""
    cluster, ranks = machine(4), tuple(range(8))
    found = link_traffic("all_gather", ranks, 80, cluster)
    assert found.latency_s == pytest.approx(7 * (4 * 1e-6 + 4 * 1e-5) / 8)
    assert on("nic", found, cluster) == {7 * 80 / 2}


def test_all_reduce_takes_trees_where_they_have_fewer_hops() -> None:
    """Four nodes: up and down are two hops across and one inside each; a node sends 800 bytes twice, over two NICs. A
    ring would take 14 hops of 5.5 us.
    """
    cluster = machine(4)
    found = link_traffic("all_reduce", tuple(range(8)), 800, cluster)
    assert found.latency_s == pytest.approx(2 * (1 * 1e-6 + 2 * 1e-5))
    assert on("nic", found, cluster) == {2 * 800 / 2}
    assert on("nvlink", found, cluster) == {800.0}


def test_all_reduce_inside_a_node_is_a_ring() -> None:
    cluster = machine(1, gpus=4)
    found = link_traffic("all_reduce", (0, 1, 2, 3), 800, cluster)
    assert found.latency_s == pytest.approx(6e-6)
    assert on("nvlink", found, cluster) == {6 * 200.0}


def test_a_switch_that_sums_carries_the_whole_and_a_part() -> None:
    """Of 4 GPUs: 800 and 200 bytes a port, against 1200 in a ring; of two, a ring carries less."""
    spec = make_cluster_spec(4, nvlink=LinkSpec(bytes_per_s=1e9, latency_s=1e-9, reduces=True))
    cluster = Cluster(spec)
    assert on("nvlink", link_traffic("all_reduce", (0, 1, 2, 3), 800, cluster), cluster) == {1000.0}
    assert on("nvlink", link_traffic("all_reduce", (0, 1), 800, cluster), cluster) == {800.0}


def test_headers_take_their_share_of_a_link() -> None:
    spec = make_cluster_spec(2, nvlink=LinkSpec(bytes_per_s=1e9, latency_s=0.0, payload=0.8))
    assert Cluster(spec).route(0, 1).bytes_per_s == pytest.approx(0.8e9)


@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_more_nodes_take_longer_only_by_their_hops(nodes: int) -> None:
    """The bytes that a NIC carries do not grow with the nodes."""
    cluster = machine(nodes)
    found = link_traffic("all_reduce", tuple(range(2 * nodes)), 800, cluster)
    assert on("nic", found, cluster) <= {800.0}
    one = link_traffic("all_reduce", tuple(range(4)), 800, machine(2))
    assert found.latency_s >= one.latency_s


@pytest.mark.parametrize("kind", get_args(CollectiveName))
def test_one_rank_moves_nothing(kind: CollectiveName) -> None:
    found = link_traffic(kind, (0,), 800, machine(1))
    assert not found.nbytes
    assert found.latency_s == 0


def test_a_way_over_a_new_kind_of_link_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = machine(1)
    links = cluster.route(0, 1).load(8)
    renamed = [one._replace(group="optical") if at in links else one for at, one in enumerate(cluster.resources)]
    monkeypatch.setattr(cluster, "resources", renamed)
    with pytest.raises(InputError, match="no name for a way over optical: they know nic, pcie, nvlink, loopback; add"):
        link_name(links, cluster)
