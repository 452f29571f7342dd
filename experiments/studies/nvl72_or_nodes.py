"""Domains of NVLink from 8 to 64 GPUs: the same 64 GB200 and NICs, of which more or fewer share an NVLink switch."""

from __future__ import annotations

from typing import Any

import msgspec

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from sim.base.units import length
from topology.specs import ClusterSpec, SocketSpec

QUESTION = "How much faster than nodes of 8 is a rack whose 64 GPUs all share NVLink?"
ANSWER = 1
_GPUS = 64
_DOMAINS = (8, 16, 32, 64)
_LENGTHS = (64 * 1024, 256 * 1024, 1024**2)
_NODE = 8


def _cluster(domain: int) -> ClusterSpec:
    """Return 64 GPUs of the rack's kind in such domains; two GPUs have a socket, as there."""
    rack = longstep.cluster("gb200-nvl72").spec
    assert rack.socket is not None
    socket: SocketSpec = msgspec.structs.replace(rack.socket, per_node=domain // 2)
    return msgspec.structs.replace(rack, nodes=_GPUS // domain, gpus_per_node=domain, socket=socket)


_LAYER = longstep.Setup(model="llama3-8b", scope="layer", layers=1, jitter=0.0, gpus=_GPUS)
_CANDIDATES = {
    "zigzag": _LAYER.replace(schedule="zigzag"),
    "USP 8x8": _LAYER.replace(schedule="usp", ulysses_degree=8, ring_degree=8),
    "USP 32x2": _LAYER.replace(schedule="usp", ulysses_degree=32, ring_degree=2),
}


def find(jobs: int | None) -> Finding:
    """Return the time of a layer by the size of a domain, for several lengths, with the fastest schedule of each."""
    best: dict[tuple[int, int], tuple[float, str]] = {}
    for domain in _DOMAINS:
        for name, setup in _CANDIDATES.items():
            of = setup.replace(cluster=_cluster(domain))
            for row in longstep.explore(of, {"seq": _LENGTHS}, intervals=False, bounds=False, jobs=jobs):
                key = domain, row["seq"]
                best[key] = min(best.get(key, (row["step_time_s"], name)), (row["step_time_s"], name))
    rows: list[dict[str, Any]] = []
    series = []
    for seq in _LENGTHS:
        points = []
        for domain in _DOMAINS:
            time_s, fastest = best[domain, seq]
            times = best[_NODE, seq][0] / time_s
            points.append((float(domain), times, f"{domain} GPUs a domain: {times:.3f} times as fast, {fastest}"))
            rows.append({"seq": seq, "domain": domain, "times_as_fast": times, "fastest": fastest,
                         "step_time_s": time_s})  # fmt: skip
        series.append(Line(f"{length(seq)} tokens", points))
    rack = {seq: best[_NODE, seq][0] / best[_GPUS, seq][0] for seq in _LENGTHS}
    told = ", ".join(f"{times:.2f} at {length(seq)}" for seq, times in rack.items())
    most = max(rack.values())
    conclusion = (
        f"64 GB200, each with a NIC of 400 Gb/s, one layer of Llama-3-8B, the fastest of zigzag, USP 8x8 and USP 32x2 "
        f"on each machine. Times as fast as nodes of 8 a domain of 64 is: {told}. Claimed: an MFU of 3.37 times that "
        f"of nodes of 8 (InfiniteHBD, arXiv:2502.03885), and a time to train of 1/2.7 with domains 8 times as large "
        f"(3D CPO, arXiv:2510.15893). Not testable from what is published: the abstracts have no model, degrees or "
        f"rate outside of a domain. Where only sequences are split, no more than {most:.2f} comes out; tensor or "
        f"expert parallelism over nodes was not looked at."
    )
    picture = lines(
        series, about="Times as fast as nodes of 8, by GPUs that share an NVLink switch", x_label="GPUs a domain",
        y_label="times as fast", x_name=lambda domain: f"{domain:g}",
    )  # fmt: skip
    return Finding(conclusion, picture, rows, {"times_as_fast": (min(rack.values()), most)})
