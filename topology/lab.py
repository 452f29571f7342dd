"""Networks of a laboratory: small ones that ``longstep lab`` builds on this machine, whose ranks all share its cores.

    flat    ranks on one switch, each by a link of the rate
    thin    two nodes of half of the ranks each, on switches of 1 Gbit/s, joined by one link of the rate
    tree    the same, but the ranks' own links are of the rate too: two to one oversubscribed with four ranks
    chain   ranks in a row, joined by links of the rate
    torus   ranks in two rings of half of them each, every rank joined to its like, by links of the rate

Any cluster file of ``kind = "cpu"`` describes one as well.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sim.base.errors import InputError, unknown
from topology.kinds import MeshSpec, TorusSpec
from topology.specs import ClusterSpec, LinkSpec, NicSpec

INSIDE_BYTES_PER_S = 125e6
"""Of a node's own links where a thin one joins nodes: 1 Gbit/s."""
PAYLOAD = 1448 / 1514
"""Share of a link's rate that data gets: a frame of Ethernet is 1514 bytes, of which 14 + 20 + 32 are headers of
Ethernet, IPv4 (RFC 791) and TCP with timestamps (RFC 9293, RFC 7323)."""

NETWORKS = ("flat", "thin", "tree", "chain", "torus")


def lab_spec(host: ClusterSpec, network: str, ranks: int, bytes_per_s: float) -> ClusterSpec:
    """Return a network of this machine as a cluster: ``host`` is the machine itself, whose loopback states what a hop
    takes. ``bytes_per_s`` is a link's rate, headers included.

    Raises InputError for a name or a number of ranks that there is no such network of.
    """
    if network not in NETWORKS:
        raise unknown("network", network, [*NETWORKS, "FILE.toml"], "`network`")
    assert host.host
    assert host.loopback
    if ranks < 2 or (network in {"thin", "tree", "torus"} and (ranks < 4 or ranks % 2)):
        least = "2" if network in {"flat", "chain"} else "4, and an even number"
        raise InputError(f"network {network} of {ranks} ranks: expected at least {least}; set `gpus`")
    latency_s = host.loopback.latency_s
    changes: dict[str, Any] = {"nodes": ranks, "gpus_per_node": 1, "nic": None, "fabric": None}
    inside = bytes_per_s
    if network == "flat":
        changes |= {"nodes": 1, "gpus_per_node": ranks}
    else:
        changes["nic"] = NicSpec(bytes_per_s=bytes_per_s, latency_s=latency_s, payload=PAYLOAD)
    if network in {"thin", "tree"}:
        changes |= {"nodes": 2, "gpus_per_node": ranks // 2, "nic": msgspec.structs.replace(changes["nic"], per_node=1)}
        inside = INSIDE_BYTES_PER_S if network == "thin" else bytes_per_s
    if network == "chain":
        changes["fabric"] = MeshSpec(dims=(ranks,))
    if network == "torus":
        changes["fabric"] = TorusSpec(dims=(2, ranks // 2))
    return msgspec.structs.replace(
        host,
        name=network,
        loopback=LinkSpec(bytes_per_s=inside, latency_s=latency_s, payload=PAYLOAD),
        host=msgspec.structs.replace(host.host, shared=True),
        **changes,
    )
