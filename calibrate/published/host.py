"""What eager PyTorch costs the host, and the kernels that it launches where a fused one would do."""

from __future__ import annotations

import math
import statistics

from calibrate.published.reading import geometric_mean, rows
from sim.words.profile import SLICE_BACK, Issue, Spread
from topology.specs import ClusterSpec

_SLICE_BACK = {SLICE_BACK: 0.8}
"""out[slice] = slice_out reads and writes 8 bytes an element; that of the lse counts as a kernel only."""
EAGER_TRAFFIC = {"merge": 3.8, **_SLICE_BACK}
"""Partial results are merged by eager kernels in fp32 that move 38 bytes an element, not the 10 of a fused one."""
EARLY_TRAFFIC = {"merge": 3.4, **_SLICE_BACK}
"""new_lse = lse + log1p(exp(block_lse - lse)); out = exp(lse - new_lse) * out + exp(block_lse - new_lse) * block_out: a
cast of 6 bytes an element, two products of 8, a sum of 12."""
EARLY_MERGE = {"merge": Issue(host_s=0, launches=0, kernels=12)}
"""The kernels of the same."""
EAGER_LAYER_TRAFFIC = {"swiglu": 10 / 6, "swiglu_backward": 18 / 10}
"""silu and a product, each of which passes over memory by itself; backward two products and silu's own."""
PERSISTENT = {"gemm": round((80 / 47 - 1) / 24, 5)}
PERSISTENT_SOURCE = (
    "NVIDIA developer forum, thread 337991: a product of 132 blocks on H100 SXM with 80 % of the peak alone, 47 "
    "beside an all-gather of 24 blocks, since a persistent grid then needs two waves; in proportion where fewer "
    "SMs are held, which nobody has measured. cuBLAS has such grids on Hopper, and a limit on their SMs for that "
    "reason (CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, which TransformerEngine sets beside userbuffers; torch's "
    "_set_sm_carveout_experimental): from memory. On A100 blocks of a product go to any SM: beside NCCL products "
    "take 1.03 times as long (NetX-lab/Echo-slowdown@7d698a7). On Blackwell blocks are handed out by hardware, "
    "for this reason (CUTLASS, cluster launch control): from memory"
)
OVERLAP_SLOWDOWN = 1.189
"""Kernels during communication, mean over A100, H100, MI210 and MI250; the worst took 1.4 times as long."""
EAGER_SOURCES = {
    "traffic.merge": "counted in zhuzilin/ring-flash-attention ring_flash_attn/utils.py, as the kernels in issue",
    f"traffic.{SLICE_BACK}": "the same, update_out_and_lse",
    "issue": "calibrate/eager.py: the part of Python and the dispatcher, on a CPU of this project; of collectives what "
    "torch takes longer than nccl-tests on 8 H200 and 8 B200: stas00/ml-engineering@744d01e network/README.md; of "
    "waits zhuzilin/ring-flash-attention PR 9; of eager kernels also NVIDIA/dgxc-benchmarking@841f546 cpu_overhead",
    "host": "the two sources of an eager kernel lie so far below and above their mean; a host with several busy ranks "
    "takes up to twice as long as an idle one, by either source",
    "beside_communication": "arXiv:2507.03114, abstract: mean slowdown of kernels on A100, H100, MI210 and MI250",
}
_KERNEL_S = 14.5e-6
"""Host time of launching a tiny kernel from PyTorch, the launch included, 11.3 to 17.7 us by host (H100, GB200)."""
_WAIT_S = 4.5e-6
"""Of waiting for a request of NCCL's process group, which lets a stream wait: 4 to 5 us, on two A5000."""
_BUSY = 2.0
"""How many times as long a host takes where several ranks and proxies are busy on it."""
_COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
_SYSTEMS = {"8xH200 1 node nccl2.27.7": "h200_sxm", "8xB200 P6 1 node": "b200_sxm"}
"""In the tables of torch, and of nccl-tests."""
_WHICH = ("system", "collective", "num_gpus", "nccl_dtype")


def eager_issue(spec: ClusterSpec) -> dict[str, Issue]:
    """Return what calls and kernels cost the host in eager PyTorch.

    Python and the dispatcher take what ``calibrate.eager`` has measured. A collective takes as long as torch takes
    longer for it than nccl-tests, in the median over sizes: torch's times begin at an event of the idle compute stream,
    so a launch and the hand-over to the stream of the collective are in them too, which the simulator has anyway. Sends
    and receives take the same path through NCCL's process group, from other calls of Python, and are waited for.
    """
    python_s = {row["op"]: float(row["host_us"]) / 1e6 for row in rows("eager_host")}
    collective_s = geometric_mean([_torch_over_nccl_s(*system) for system in _SYSTEMS.items()]) - 2 * spec.gpu.launch_s
    through_s = collective_s - python_s["collective"] + _WAIT_S
    message_s = (python_s["4 messages"] - python_s["2 messages"]) / 2
    call_s = statistics.mean([python_s["send"], python_s["receive"]])
    one_s = python_s["kernel"]
    return {
        "kernel": Issue(host_s=geometric_mean(_eager_kernel_s(spec)) - spec.gpu.launch_s),
        "merge": Issue(host_s=0, launches=0, kernels=9),
        SLICE_BACK: Issue(host_s=0, launches=0, kernels=2),
        "attention_forward": Issue(host_s=python_s["attention_forward"] - one_s, launches=0, kernels=1),
        "attention_backward": Issue(host_s=python_s["attention_backward"] - one_s, launches=2, kernels=1),
        "call": Issue(host_s=call_s + through_s),
        "exchange": Issue(host_s=python_s["2 messages"] - 2 * message_s + through_s),
        "message": Issue(host_s=message_s, launches=0),
        **{kind: Issue(host_s=collective_s) for kind in _COLLECTIVES},
    }


def eager_host(spec: ClusterSpec) -> Spread:
    """Return how far below and above the host's time may lie: from an idle host by the source that says less, to a busy
    one by the source that says more.
    """
    one_s, other_s = sorted(_eager_kernel_s(spec))
    return Spread(low=math.sqrt(one_s / other_s), high=_BUSY * math.sqrt(other_s / one_s))


def _eager_kernel_s(spec: ClusterSpec) -> list[float]:
    """Return what two sources say of issuing a small eager kernel, its launch included."""
    python_s = next(float(row["host_us"]) / 1e6 for row in rows("eager_host") if row["op"] == "kernel")
    return [python_s + spec.gpu.launch_s, _KERNEL_S]


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
