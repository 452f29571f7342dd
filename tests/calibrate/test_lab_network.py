"""From clusters to the networks that a lab builds of them."""

from __future__ import annotations

import pytest

from calibrate.lab_network import lab_network
from runtime.lab.network import Network
from sim.base.errors import InputError
from topology.cluster import Cluster, load_cluster
from topology.lab import NETWORKS, PAYLOAD, lab_spec

RATE = 25e6


def built(name: str, ranks: int = 4) -> tuple[Cluster, Network]:
    cluster = Cluster(lab_spec(load_cluster("host"), name, ranks, RATE))
    return cluster, lab_network(cluster)


def test_flat_is_one_switch_and_a_chain_has_none() -> None:
    _, flat = built("flat")
    assert len(flat.switches) == 1
    assert [wire.bytes_per_s for wire in flat.wires] == [(RATE, RATE)] * 4
    assert not flat.forwards
    _, chain = built("chain")
    assert chain.switches == ()
    assert len(chain.wires) == 3
    assert chain.forwards
    _, torus = built("torus")
    assert len(torus.wires) == 4


def test_a_thin_link_joins_two_nodes_whose_own_links_are_wide() -> None:
    _, thin = built("thin")
    limited = [wire for wire in thin.wires if RATE in wire.bytes_per_s]
    assert all(not set(wire.ends) & set(thin.ranks) for wire in limited)
    wide = [wire for wire in thin.wires if 125e6 in wire.bytes_per_s]
    assert len(wide) == 4
    assert thin.ways[0] == ("gpu[0]", "loopback[0]", "nic[0]", "nic[0]")


@pytest.mark.parametrize("ranks", [4, 6])
@pytest.mark.parametrize("name", NETWORKS)
def test_data_takes_the_links_that_the_simulator_has_it_take(name: str, ranks: int) -> None:
    """Follow the ways from rank to rank; between switches there is one way only. The rates on it are the route's."""
    cluster, network = built(name, ranks)
    joined = {ends: rate for wire in network.wires for ends, rate in (
        (wire.ends, wire.bytes_per_s[0]), (wire.ends[::-1], wire.bytes_per_s[1]))}  # fmt: skip
    for source in range(ranks):
        for target in range(ranks):
            if source == target:
                continue
            came, place, rates = "", network.ranks[source], []
            while place != network.ranks[target]:
                if place in network.ranks:
                    ahead = network.ways[network.ranks.index(place)][target]
                else:
                    (ahead,) = ends_of(joined, place, network, came, target)
                rates.append(joined[place, ahead])
                came, place = place, ahead
            limits = [rate for rate in rates if rate is not None]
            route = cluster.route(source, target)
            assert [rate * PAYLOAD for rate in limits] == pytest.approx(
                [cluster.resources[index].capacity for index in route.resources]
            )


def ends_of(joined: dict, place: str, network: Network, came: str, target: int) -> list[str]:
    """Return where a switch forwards to: the target if it is next to it, else the other switch."""
    ahead = [end for start, end in joined if start == place and end != came]
    if network.ranks[target] in ahead:
        return [network.ranks[target]]
    return [end for end in ahead if end not in network.ranks]


def test_a_cluster_of_gpus_is_none() -> None:
    with pytest.raises(InputError, match="'hgx-h100' is of GPUs"):
        lab_network(Cluster(load_cluster("hgx-h100")))
