"""Rails without a spine: what an all-to-all takes on fat trees, rails and rails alone, and what these need."""

from __future__ import annotations

from typing import Any

import msgspec

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from sim.engine.collectives import link_traffic
from topology.cluster import Cluster
from topology.kinds import Fabric, FatTreeSpec, RailOnlySpec, RailOptimisedSpec

QUESTION = "What does it cost to leave out the spine, and to have rails only?"
_NODES = (4, 8, 16, 32)
_LARGEST = 64
"""Nodes for which switches are counted: as many as a switch of each rail has ports."""
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
    shapes = {name: longstep.fabric(msgspec.structs.replace(h100, nodes=_LARGEST, fabric=fabric))
              for name, fabric in _fabrics(_LARGEST).items()}  # fmt: skip
    full, bare = shapes["fat tree"], shapes["rails alone"]
    links = sum(one.number * one.bytes_per_s for one in full.links) / (full.injection_bytes_per_s * 2 / full.ports)
    conclusion = (
        f"All-to-all over {8 * _NODES[0]} to {8 * _NODES[-1]} H100: with the relay over NVLink beside the NICs rails "
        f"alone take at most {overlapped:.2g} % longer than a full fat tree, with all of it before them "
        f"{in_turn[0]:.3g} to {in_turn[-1]:.3g} %. The claimed 8.2 to 11.2 % (arXiv:2307.12169) {verdict}. Uplinks of "
        f"4 to 1 cost the same all-to-all up to {thin['fat tree, 4 to 1']:.0f} % without rails, "
        f"{thin['rails, 4 to 1']:.2g} % on rails, whose leaves reach all of these nodes. For {8 * _LARGEST} GPUs a "
        f"full fat tree has {full.switches} switches of 64 ports and {links:.0f} links between them, rails alone "
        f"{bare.switches} switches and no such link. That costs fall by 38 to 77 % and power by 37 to 75 % is not "
        f"testable from what is published: the abstract has no prices and watts of switches and transceivers."
    )
    picture = lines(
        series, about="Time of an all-to-all over all GPUs, by what the NICs need", x_label="nodes of 8 H100",
        y_label="times what the NICs need", x_name=lambda nodes: f"{nodes:g}",
    )  # fmt: skip
    return Finding(conclusion, picture, rows)
