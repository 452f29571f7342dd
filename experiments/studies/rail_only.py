"""Rails without a spine: what an all-to-all takes on fat trees, rails and rails alone, and what these need."""

from __future__ import annotations

from typing import Any

import msgspec

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from sim.engine.traffic.collectives import link_traffic
from topology.cluster import Cluster
from topology.fabric.switches import leaf, trunks
from topology.kinds import Fabric, FatTreeSpec, RailOnlySpec, RailOptimisedSpec
from topology.specs import ClusterSpec

QUESTION = "What does it cost to leave out the spine, and to have rails only?"
_NODES = (4, 8, 16, 32)
_COUNTED = (64, 256, 512, 2048)
"""Nodes for which switches and transceivers are counted. At 64 a switch of each rail has all ports."""
_LEAF = 32
"""Ports below a switch of 64."""
_PART = 2**20
"""Bytes of a part of the all-to-all: 1 MiB for each pair, so that latencies are small."""
_CLAIM = (8.2, 11.2)
"""Per cent that the all-to-all of experts takes longer on rails alone: arXiv:2307.12169, abstract."""


def _fabrics(nodes: int) -> dict[str, Fabric]:
    """Return fabrics for so many nodes of 8, of switches with 64 ports, half of a leaf's for NICs."""
    leaves = -(-nodes * 8 // _LEAF)
    on_rails = -(-nodes // _LEAF) * 8
    thin = 4.0
    return {
        "fat tree": FatTreeSpec(below=(_LEAF, leaves), above=(-(-leaves // 2),)),
        "fat tree, 4 to 1": FatTreeSpec(below=(_LEAF, leaves), above=(-(-leaves // 8),), oversubscription=(thin,)),
        "rails, 4 to 1": RailOptimisedSpec(
            below=(_LEAF, on_rails), above=(-(-on_rails // 8),), oversubscription=(thin,)
        ),
        "rails alone": RailOnlySpec(below=(2 * _LEAF,)),
    }


def _full(ports: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `below` and `above` of a full tree over so many ports, of the fewest tiers of switches with 64 ports."""
    if ports <= 2 * _LEAF:
        return (2 * _LEAF,), ()
    leaves = -(-ports // _LEAF)
    if leaves <= 2 * _LEAF:
        return (_LEAF, leaves), (-(-leaves // 2),)
    pods = -(-leaves // _LEAF)
    return (_LEAF, _LEAF, pods), (_LEAF, -(-pods // 2))


def _parts(spec: ClusterSpec, fabric: FatTreeSpec | RailOnlySpec) -> tuple[int, float]:
    """Return how many switches a network has, and how many links, those of NICs among them."""
    assert spec.nic is not None
    between = list(trunks(spec, fabric))
    switches = {leaf(spec, fabric, node, rail) for node in range(spec.nodes) for rail in range(spec.ports_per_node)}
    switches |= {switch for one in between for switch in (one.lower, one.upper)}
    links = sum(one.bytes_per_s for one in between) / spec.nic.bytes_per_s
    return len(switches), links + spec.nodes * spec.ports_per_node


def find(jobs: int | None) -> Finding:  # noqa: ARG001 - collectives are costed, not played
    """Return how much longer than on a full fat tree an all-to-all over all GPUs takes, by nodes of 8 H100."""
    h100 = longstep.cluster("hgx-h100").spec
    rows: list[dict[str, Any]] = []
    for nodes in _NODES:
        times: dict[str, float] = {}
        for name, fabric in _fabrics(nodes).items():
            cluster = Cluster(msgspec.structs.replace(h100, nodes=nodes, fabric=fabric))
            traffic = link_traffic("all_to_all", tuple(range(8 * nodes)), _PART, cluster)
            busy = {kind: max(n / cluster.resources[link].capacity for link, n in traffic.nbytes.items()
                              if cluster.resources[link].group == kind) for kind in ("nic", "nvlink")}  # fmt: skip
            times[name] = traffic.seconds(cluster)
            in_turn_s = busy["nic"] + busy["nvlink"]
            rows.append({"nodes": nodes, "fabric": name, "all_to_all_s": times[name], "nic_s": busy["nic"],
                         "nvlink_s": busy["nvlink"], "longer_percent": 100 * (times[name] / times["fat tree"] - 1),
                         "in_turn_longer_percent": 100 * (in_turn_s / times["fat tree"] - 1)})  # fmt: skip
    order = list(_fabrics(1))
    rows.sort(key=lambda row: order.index(row["fabric"]))
    series = [
        Line(name, [(float(row["nodes"]), row["all_to_all_s"] / row["nic_s"],
                     f"{row['nodes']} nodes: {row['longer_percent']:.3g} % longer")
                    for row in rows if row["fabric"] == name])
        for name in order
    ]  # fmt: skip
    alone = [row for row in rows if row["fabric"] == "rails alone"]
    overlapped = max(row["longer_percent"] for row in alone)
    in_turn = sorted(row["in_turn_longer_percent"] for row in alone)
    between = overlapped <= _CLAIM[0] and in_turn[-1] >= _CLAIM[1]
    verdict = "lies between, so it holds where the relay partly waits: qualified" if between else "contradicted"
    thin = {name: max(row["longer_percent"] for row in rows if row["fabric"] == name)
            for name in ("fat tree, 4 to 1", "rails, 4 to 1")}  # fmt: skip
    saved: list[tuple[float, float]] = []
    told = []
    for nodes in _COUNTED:
        spec = msgspec.structs.replace(h100, nodes=nodes)
        (below, above), (of_rail, over_rail) = _full(8 * nodes), _full(nodes)
        tree, rails = (_parts(spec, one) for one in (FatTreeSpec(below=below, above=above),
                                                     RailOnlySpec(below=of_rail, above=over_rail)))  # fmt: skip
        fewer = sorted(100 * (1 - few / many) for few, many in zip(rails, tree, strict=True))
        saved.append((fewer[0], fewer[1]))
        told.append(f"{8 * nodes} GPUs {rails[0]} of {tree[0]} switches and {rails[1]:.0f} of {tree[1]:.0f} links")
    least, most = min(low for low, _ in saved), max(high for _, high in saved)
    conclusion = (
        f"All-to-all over {8 * _NODES[0]} to {8 * _NODES[-1]} H100: with the relay over NVLink beside the NICs rails "
        f"alone take at most {overlapped:.2g} % longer than a full fat tree, with all of it before them "
        f"{in_turn[0]:.3g} to {in_turn[-1]:.3g} %. The claimed 8.2 to 11.2 % (arXiv:2307.12169) {verdict}. Uplinks of "
        f"4 to 1 cost the same all-to-all up to {thin['fat tree, 4 to 1']:.0f} % without rails, "
        f"{thin['rails, 4 to 1']:.2g} % on rails, whose leaves reach all of these nodes. Of the "
        f"parts of a full fat tree, of switches with 64 ports, rails alone need: {'; '.join(told)}. So "
        f"whatever a switch and a link with its transceivers cost, and whatever they draw, rails alone save "
        f"{least:.0f} to {most:.0f} % by the number of GPUs, NICs left out. Claimed are 38 to 77 % of cost and 37 to "
        f"75 % of power, without prices, watts or numbers of GPUs in the abstract."
    )
    picture = lines(
        series, about="Time of an all-to-all over all GPUs, by what the NICs need", x_label="nodes of 8 H100",
        y_label="times what the NICs need", x_name=lambda nodes: f"{nodes:g}",
    )  # fmt: skip
    longer = min(row["longer_percent"] for row in alone), in_turn[-1]
    figures = {"all_to_all_longer_percent": longer, "fewer_parts_percent": (least, most)}
    return Finding(conclusion, picture, rows, figures)
