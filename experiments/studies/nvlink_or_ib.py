"""Faster NVLink or faster InfiniBand: what each wins by length, with the schedule that is fastest on each machine."""

from __future__ import annotations

from typing import Any

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from sim.base.units import length

QUESTION = "What would NVLink of twice or four times the rate win, and what InfiniBand of 800 or 1600 Gb/s?"
ANSWER = 1
_LENGTHS = tuple(16 * 1024 << power for power in range(6))
_LAYER = longstep.Setup(model="llama3-8b", cluster="hgx-h100", nodes=2, scope="layer", layers=1, jitter=0.0)
_CANDIDATES = {
    "zigzag": _LAYER.replace(schedule="zigzag"),
    "Ulysses": _LAYER.replace(schedule="ulysses"),
    "USP 8x2": _LAYER.replace(schedule="usp", ulysses_degree=8, ring_degree=2),
}
_NVLINK, _NIC, _PCIE = "cluster.nvlink.bytes_per_s", "cluster.nic.bytes_per_s", "cluster.pcie.bytes_per_s"
_ALONE = "IB 1600, PCIe 5.0"
"""All of the way to a NIC is PCIe, which lets no more than 427 Gb/s through on this machine."""
_MACHINES: dict[str, dict[str, str]] = {
    "as it is": {},
    "NVLink x2": {_NVLINK: "*2"},
    "NVLink x4": {_NVLINK: "*4"},
    "IB 800, PCIe x2": {_NIC: "*2", _PCIE: "*2"},
    "IB 1600, PCIe x4": {_NIC: "*4", _PCIE: "*4"},
    _ALONE: {_NIC: "*4"},
}


def find(jobs: int | None) -> Finding:
    """Return how many per cent each machine is faster, by length."""
    best: dict[tuple[str, int], tuple[float, str]] = {}
    own: dict[tuple[str, str, int], float] = {}
    for machine, figures in _MACHINES.items():
        for name, setup in _CANDIDATES.items():
            found = longstep.explore(
                setup.replace(set=figures), {"seq": _LENGTHS}, intervals=False, bounds=False, jobs=jobs
            )
            for row in found:
                own[machine, name, row["seq"]] = row["step_time_s"]
    for machine in _MACHINES:
        for seq in _LENGTHS:
            best[machine, seq] = min((own[machine, name, seq], name) for name in _CANDIDATES)
    rows: list[dict[str, Any]] = []
    series = []
    for machine in [name for name in _MACHINES if _MACHINES[name]]:
        points = []
        for seq in _LENGTHS:
            (before_s, _), (time_s, fastest) = best["as it is", seq], best[machine, seq]
            faster = 100 * (before_s / time_s - 1)
            points.append((float(seq), max(faster, 0.0), f"{length(seq)} tokens: {faster:.3g} %, {fastest}"))
            rows.append({"machine": machine, "seq": seq, "faster_percent": faster, "fastest": fastest,
                         "step_time_s": time_s, "before_s": before_s})  # fmt: skip
        series.append(Line(machine, points))
    most = {machine: max((row for row in rows if row["machine"] == machine), key=lambda row: row["faster_percent"])
            for machine in _MACHINES if _MACHINES[machine]}  # fmt: skip
    ring = {machine: max(own["as it is", "zigzag", seq] / own[machine, "zigzag", seq] - 1 for seq in _LENGTHS)
            for machine in most}  # fmt: skip
    last = max(row["faster_percent"] for row in rows if row["seq"] == _LENGTHS[-1])
    told = "; ".join(f"{name} {row['faster_percent']:.2g} % ({length(row['seq'])})" for name, row in most.items())
    of_ring = "; ".join(f"{name} {100 * share:.2g} %" for name, share in ring.items())
    conclusion = (
        f"One layer on two nodes of 8 H100, the fastest of zigzag, Ulysses and USP 8x2 before and after. At most each "
        f"wins: {told}. At {length(_LENGTHS[-1])} tokens none wins more than {max(last, 0):.2g} %. With the zigzag "
        f"ring alone the most is: {of_ring}. Faster NICs need faster PCIe, which carries their bytes to the GPU. "
        f"Claimed of silicon photonics with several Tb/s a GPU (SiP-ML: 1.3 to 9.1 times as fast) and of 12.8 Tb/s a "
        f"node (RAMP: 1.3 to 16 times): not testable from what is published, since the abstracts say neither which "
        f"electrical network nor which model and batch; with these rates and this model no factor above "
        f"{1 + max(row['faster_percent'] for row in rows) / 100:.2f} comes out."
    )
    picture = lines(
        series, about="Per cent that a layer gets faster, by length", x_label="tokens of a sequence",
        y_label="% faster", x_name=lambda tokens: length(int(tokens)),
    )  # fmt: skip
    return Finding(conclusion, picture, rows)
