"""One pair of GPUs in two servers, whose flow takes all NICs: over NVLink to the GPU beside each, as FuseLink does."""

from __future__ import annotations

from typing import Any

import msgspec
import networkx as nx

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from topology.cluster import Cluster
from topology.kinds import RailOnlySpec
from topology.specs import ClusterSpec

QUESTION = "How fast is one pair of GPUs in two servers if its flow takes all NICs?"
ANSWER = 2
_MACHINES = ("h800", "hgx-h100", "hgx-b200", "dgx-a100")
_NICS = (1, 2, 4, 8)
_NIC_BYTES_PER_S = 50e9
"""400 Gb/s, as claimed. A node of A100 has half of that, so its 400 Gb/s are assumed, in its slots of PCIe 4.0."""
_CLAIM_GB_PER_S = 212.0
"""With 8 NICs of 400 Gb/s: FuseLink, OSDI 2025, abstract. Which GPUs is not said there."""


def _servers(name: str) -> ClusterSpec:
    """Return two servers of a machine, NIC number i of one linked to that of the other."""
    spec = longstep.cluster(name).spec
    assert spec.nic is not None
    nic = msgspec.structs.replace(spec.nic, bytes_per_s=_NIC_BYTES_PER_S)
    return msgspec.structs.replace(spec, nodes=2, nic=nic, fabric=RailOnlySpec(below=(2,)))


def best_bytes_per_s(cluster: Cluster, nics: int) -> tuple[float, set[str]]:
    """Return the most that flows from the first GPU to that of the other server over so many of the first NICs of both,
    and which kinds of links bound it: the least cut of the machine's graph, without ways through PCIe switches.
    """
    per_node, usable = cluster.spec.gpus_per_node, nx.DiGraph()
    closed = {f"nic[{node * per_node + number}]" for node in (0, 1) for number in range(nics, per_node)}
    for start, end, edge in cluster.graph.edges(data="edge"):
        if not (closed & {start, end} or any(hub.startswith(("switch[", "socket[")) for hub in (start, end))):
            usable.add_edge(start, end, **({"capacity": round(edge.resources[0].capacity)} if edge.resources else {}))
    rate, (near, far) = nx.minimum_cut(usable, "gpu[0]", f"gpu[{per_node}]")
    cut = [edge.resources[0].group for start, end, edge in cluster.graph.edges(data="edge")
           if usable.has_edge(start, end) and start in near and end in far]  # fmt: skip
    return float(rate), set(cut)


def even_bytes_per_s(cluster: Cluster, nics: int) -> float:
    """Return the rate with an equal part over each NIC: the busiest link on all their ways sets it."""
    per_node, load = cluster.spec.gpus_per_node, dict[int, float]()
    for number in range(nics):
        hops = [(0, per_node + number)] + [(per_node + number, per_node)] * (number > 0)
        for hop in hops:
            for link, part in cluster.route(*hop).load(1.0).items():
                load[link] = load.get(link, 0.0) + part / nics
    return min(cluster.resources[link].capacity / part for link, part in load.items() if part)


def find(jobs: int | None) -> Finding:  # noqa: ARG001 - flows are solved, not played
    """Return what one pair gets by the NICs that its flow takes, for each machine: with parts as links allow, and with
    equal parts.
    """
    rows: list[dict[str, Any]] = []
    series = []
    for name in _MACHINES:
        cluster, points = Cluster(_servers(name)), []
        for nics in _NICS:
            best, bound = best_bytes_per_s(cluster, nics)
            best, even = best / 1e9, even_bytes_per_s(cluster, nics) / 1e9
            points.append((float(nics), best, f"{nics} NICs: {best:.3g} GB/s, in equal parts {even:.3g}"))
            rows.append({"machine": name, "nics": nics, "gigabytes_per_s": best, "equal_parts_gigabytes_per_s": even,
                         "bound_by": " and ".join(sorted(bound))})  # fmt: skip
        series.append(Line(name, points))
    own = {row["machine"]: row["gigabytes_per_s"] for row in rows if row["nics"] == 1}
    whole = [row for row in rows if row["nics"] == _NICS[-1]]
    rates = [row[key] for row in whole for key in ("gigabytes_per_s", "equal_parts_gigabytes_per_s")]
    times = [row[key] / own[row["machine"]]
             for row in whole for key in ("gigabytes_per_s", "equal_parts_gigabytes_per_s")]  # fmt: skip
    told = "; ".join(
        f"{row['machine']} {row['gigabytes_per_s']:.0f} GB/s, {row['equal_parts_gigabytes_per_s']:.0f} in equal parts, "
        f"bound by {row['bound_by']}"
        for row in whole
    )
    near = ", ".join(row["machine"] for row in whole if abs(row["gigabytes_per_s"] / _CLAIM_GB_PER_S - 1) <= 0.05)
    conclusion = (
        f"Two servers of 8 GPUs with 8 NICs of 400 Gb/s each. What is for another NIC than its own goes over NVLink to "
        f"the GPU beside that, and on the other side back. With parts as the links allow one pair gets over all NICs: "
        f"{told}; {min(times):.2f} to {max(times):.2f} times what its own NIC gives. Claimed are "
        f"{_CLAIM_GB_PER_S:.0f} GB/s (FuseLink, OSDI 2025), without saying of which GPUs: within 5 % of it are "
        f"{near or 'none'}. Sourced are the rates of all links; assumed are the 400 Gb/s of the A100's NICs. A server "
        f"has no other flows here, and GPUs that pass data on need no memory and no SMs for it. A step is at most that "
        f"many times as fast, if it waits for one pair only: collectives of all GPUs use all NICs anyway."
    )
    picture = lines(
        series, about="GB/s of one pair of GPUs in two servers, by the NICs that its flow takes", x_label="NICs",
        y_label="GB/s", x_name=lambda nics: f"{nics:g}",
    )  # fmt: skip
    figures = {"gigabytes_per_s": (min(rates), max(rates)), "times_as_fast": (1.0, max(times))}
    return Finding(conclusion, picture, rows, figures)
