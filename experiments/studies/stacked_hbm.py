"""Memory stacked on the GPU: what several times the bandwidth and the capacity of HBM win in a training step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import longstep
from experiments.pages.study_page import Line, lines
from experiments.studies.study import Finding
from sim.base.units import length
from sim.engine.costs.cost import CostModel
from topology.cluster import Cluster

QUESTION = "What would 3D-stacked memory win, with several times the bandwidth and capacity of HBM?"
STEP = longstep.Setup(
    "ulysses", model="llama3-8b", cluster="hgx-h100", jitter=0.0,
    set={"schedule.activations": "host", "schedule.mlp": "tiled", "schedule.loss": "chunked"},
)  # fmt: skip
LENGTHS = tuple(8192 << power for power in range(0, 11, 2))
_RATES = (2, 4, 8, 16)
"""Times the 3.35 TB/s of HBM3. Assumed: no figure of a product is behind any of them, hence the sweep."""
_CAPACITIES = (1, 2, 4, 8)
"""Times 80 GiB. Assumed as well."""
HBM = "cluster.hbm.bytes_per_s"


def kernel_seconds(setup: longstep.Setup) -> dict[str, float]:
    """Return how long kernels of the first rank take by what they do, each alone on its GPU, in seconds a step."""
    found = setup.resolved()
    checked, cost = found.checked(), CostModel(Cluster(found.spec), found.profile)
    total: defaultdict[str, float] = defaultdict(float)
    for use in checked.kernels[0]:
        if use is not None:
            total[_kind(use.kernel)] += cost.kernel_seconds(0, use)[0]
    return total


def _kind(kernel: str) -> str:
    if kernel.startswith("attention"):
        return "attention"
    if kernel in ("gemm", "tiled_mlp", "tiled_mlp_backward"):
        return "matrix products"
    return "optimiser" if kernel in ("adamw", "square_sum") else "element-wise"


def find(jobs: int | None) -> Finding:
    """Return how many per cent faster memory makes a step, by length, and which kernels gain."""
    own = {(row["seq"], row[HBM]): row for row in longstep.explore(
        STEP, {"seq": LENGTHS, HBM: ["*1", *(f"*{times}" for times in _RATES)]}, intervals=False, bounds=False,
        jobs=jobs)}  # fmt: skip
    rows: list[dict[str, Any]] = []
    series = []
    for times in _RATES:
        points = []
        for seq in LENGTHS:
            before_s, time_s = own[seq, "*1"]["step_time_s"], own[seq, f"*{times}"]["step_time_s"]
            faster = 100 * (before_s / time_s - 1)
            points.append((float(seq), max(faster, 0.0), f"{length(seq)} tokens: {faster:.3g} %"))
            rows.append({"times_bandwidth": times, "seq": seq, "faster_percent": faster, "step_time_s": time_s,
                         "before_s": before_s})  # fmt: skip
        series.append(Line(f"{times} times 3.35 TB/s", points))
    kinds = {seq: [kernel_seconds(STEP.replace(seq=seq, set={HBM: f"*{times}"})) for times in (1, _RATES[-1])]
             for seq in (LENGTHS[0], LENGTHS[-1])}  # fmt: skip
    gains = "; ".join(
        f"at {length(seq)} " + ", ".join(f"{kind} {before_s / after[kind]:.2f}" for kind, before_s in before.items())
        for seq, (before, after) in kinds.items()
    )
    capacity = longstep.cluster("hgx-h100").spec.hbm.capacity_bytes
    fits = [[seq for seq in LENGTHS if own[seq, "*1"]["free_bytes"] + (times - 1) * capacity >= 0]
            for times in _CAPACITIES]  # fmt: skip
    longest = ", ".join(f"{times} times: {length(max(some)) if some else 'none'}"
                        for times, some in zip(_CAPACITIES, fits, strict=True))  # fmt: skip
    most = [max(row["faster_percent"] for row in rows if row["seq"] == seq) for seq in (LENGTHS[0], LENGTHS[-1])]
    conclusion = (
        f"A step of Llama-3-8B, Ulysses on 8 H100, gets at most {most[0]:.3g} % faster at {length(LENGTHS[0])} tokens "
        f"and {most[1]:.2g} % at {length(LENGTHS[-1])} with up to {_RATES[-1]} times the bandwidth. With "
        f"{_RATES[-1]} times, kernels alone are so many times as fast: {gains}. Longest of the lengths looked at that "
        f"fits, by capacity with activations on the host: {longest}. Sourced are bandwidth and capacity of H100's "
        f"HBM3 (datasheet); assumed, and swept, are all multiples of them. Latency, power and heat of stacked memory "
        f"are not modelled, and kernels stay those of today. Nothing published is tested: no claim about training "
        f"with such memory was at hand."
    )
    picture = lines(
        series, about="Per cent that a training step gets faster, by length", x_label="tokens of a sequence",
        y_label="% faster", x_name=lambda tokens: length(int(tokens)),
    )  # fmt: skip
    return Finding(conclusion, picture, rows)
