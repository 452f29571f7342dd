"""What eager PyTorch costs the host, and the kernels that it launches where a fused one would do."""

from __future__ import annotations

import statistics

from calibrate.published.reading import geometric_mean, rows
from sim.profile import Issue
from topology.specs import ClusterSpec

EAGER_TRAFFIC = {"merge": 3.8}
"""Partial results are merged by eager kernels in fp32 that move 38 bytes an element, not the 10 of a fused one."""
EAGER_LAYER_TRAFFIC = {"swiglu": 10 / 6, "swiglu_backward": 18 / 10}
"""silu and a product, each of which passes over memory by itself; backward two products and silu's own."""
OVERLAP_SLOWDOWN = 1.189
"""Kernels during communication, mean over A100, H100, MI210 and MI250; the worst took 1.4 times as long."""
EAGER_SOURCES = {
    "traffic.merge": "counted in zhuzilin/ring-flash-attention ring_flash_attn/utils.py",
    "issue": "calibrate/eager.py: the host's part alone, on a CPU of this project; of collectives what torch takes "
    "longer than nccl-tests on 8 H200 and 8 B200: stas00/ml-engineering@744d01e network/README.md",
    "beside_communication": "arXiv:2507.03114, abstract: mean slowdown of kernels on A100, H100, MI210 and MI250",
}
_COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
_SYSTEMS = {"8xH200 1 node nccl2.27.7": "h200_sxm", "8xB200 P6 1 node": "b200_sxm"}
"""In the tables of torch, and of nccl-tests."""
_WHICH = ("system", "collective", "num_gpus", "nccl_dtype")


def eager_issue(spec: ClusterSpec) -> dict[str, Issue]:
    """Return what ops cost the host in eager PyTorch: as ``calibrate.eager`` has measured it, and collectives as torch
    takes longer for them than nccl-tests, in the median over sizes.

    Torch's times begin at an event of the idle compute stream, so a launch and the hand-over to the stream of the
    collective are in them too, which the simulator has anyway.
    """
    table = rows("eager_host")
    found = {row["op"]: Issue(host_s=float(row["host_us"]) / 1e6, launches=int(row["launches"])) for row in table}
    host_s = geometric_mean([_torch_over_nccl_s(*system) for system in _SYSTEMS.items()]) - 2 * spec.gpu.launch_s
    return found | {kind: Issue(host_s=host_s) for kind in _COLLECTIVES}


def _torch_over_nccl_s(torch: str, nccl: str) -> float:
    """Return by how much an all-reduce of torch takes longer than one of nccl-tests: the median over their sizes."""
    alone: dict[int, list[float]] = {}
    for row in rows("nccl_one_node"):
        if tuple(row[name] for name in _WHICH) == (nccl, "all_reduce", "8", "half"):
            alone.setdefault(int(row["bytes"]), []).append(float(row["time_us"]))
    more = [
        float(row["time_us"]) - geometric_mean(alone[int(row["bytes"])])
        for row in rows("torch_all_reduce")
        if row["system"] == torch and int(row["bytes"]) in alone
    ]
    return statistics.median(more) / 1e6
