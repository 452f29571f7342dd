"""Two clusters of the UltraAttn repository: flash-attn kernels and transfers, of 8 x A800 and of 8 x H800 a node.

What is not in the tables is taken from the code of that repository, which is an early ring-flash-attention: partial
results are merged by eager kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from calibrate.published import queued
from calibrate.published.host import (
    EAGER_SOURCES,
    EARLY_MERGE,
    EARLY_TRAFFIC,
    OVERLAP_SLOWDOWN,
    eager_host,
    eager_issue,
)
from calibrate.published.queued import OF_A100, OF_HOPPER, Queued
from calibrate.published.reading import (
    Row,
    kernel_point,
    rows,
    transfer_point,
)
from sim.schedule.derive.kernels import attention_use
from sim.schedule.ir.masks import CAUSAL, FULL
from sim.words.profile import FusedAttention, Machine, Point, Profile
from topology.cluster import load_cluster

_HEAD_DIM = 128
_RUNS = 100
"""Iterations behind each time, as the logs of the transfers say."""
_NODES = 2


def a800(name: str) -> Profile:
    """Return the profile of an A800 cluster."""
    return _profile(
        name,
        "a800",
        # Copies within one A100 move 1545 to 1594 GB/s, of 2039 (stas00/ml-engineering@744d01e network/README.md).
        memory_efficiency=0.77,
        small=OF_A100,
    )


def h800(name: str) -> Profile:
    """Return the profile of an H800 cluster."""
    return _profile(
        name,
        "h800",
        # Copies within one H100 move 2494 to 2534 GB/s, of 3350 (stas00/ml-engineering@744d01e network/README.md).
        memory_efficiency=0.75,
        small=OF_HOPPER,
    )


def _profile(name: str, cluster: str, memory_efficiency: float, small: Queued) -> Profile:
    spec = msgspec.structs.replace(load_cluster(cluster), nodes=_NODES)
    gpu = cluster.upper()
    return Profile(
        name=name,
        created="UltraAttn@b5aa10e",
        command=f"longstep calibrate --published {name}",
        complete=True,
        machine=Machine(gpu=spec.gpu.name, software={"flash-attn": "2.5.7"}),
        cluster=spec.figures(),
        points=(*kernels(gpu), *transfers(gpu)),
        attention=FusedAttention(kernel="flash-attention-2", said="FlashAttention-2 (flash-attn 2.5.7)"),
        traffic=EARLY_TRAFFIC,
        memory_efficiency=memory_efficiency,
        replayed_s=small.replayed_s,
        replayed=small.apart,
        # Forward: 128 threads of up to 255 of the 65536 registers, 64 KiB of shared memory (Q 128 x 128, K and V
        # 64 x 128). Backward: 144 KiB of shared memory, of the 164 or 228 that an SM has.
        blocks_per_sm={"attention_forward": 2, "attention_backward": 1},
        issue=eager_issue(spec) | EARLY_MERGE,
        host=eager_host(spec),
        beside_communication=OVERLAP_SLOWDOWN,
        sources={
            **EAGER_SOURCES,
            **queued.SOURCES,
            "traffic.merge": "counted in ring-flash-attention before PR 34: the 12 kernels with which "
            "oliverYoung2001/UltraAttn@b5aa10e merges",
            "attention": "oliverYoung2001/UltraAttn@b5aa10e prof_data/fit/time_*_flash_all.json, flash-attn 2.5.7",
            "exchange": "the same, prof_data/fit/cb_8*.log and cb_16*.log, both directions at once",
            "memory_efficiency": "copies within one GPU: stas00/ml-engineering@744d01e network/README.md",
            "blocks_per_sm": "Dao-AILab/flash-attention v2.5.7 csrc/flash_attn/src/flash_fwd_launch_template.h and "
            "flash_bwd_launch_template.h, head dimension 128",
        },
    )


def kernels(gpu: str) -> Iterator[Point]:
    """Yield attention; of unequal lengths the one that a row states is the shorter (its FLOPs prove it)."""
    for row in _timed("cluster_a800_h800_flash_kernel", gpu):
        heads = int(row["model"].partition("Nh=")[2].split()[0])
        fields = dict(part.split("=") for part in row["config"].replace("ratio Sq/Skv label", "ratio").split("; "))
        q_part, kv_part = (int(part) for part in fields["ratio"].split("/"))
        queries, keys = q_part * int(row["seq_len"]), kv_part * int(row["seq_len"])
        band = CAUSAL if fields["causal"] == "True" else FULL
        use = attention_use(row["metric"] == "bwd time", "bf16", (1, queries, heads, _HEAD_DIM), keys, heads, band)
        yield kernel_point(use, float(row["value"]) / 1e6, _RUNS)


def transfers(gpu: str) -> Iterator[Point]:
    """Yield transfers between two GPUs, each sending and receiving: over NVLink, and from node to node."""
    for row in _timed("cluster_a800_h800_p2p", gpu):
        link = "nvlink" if row["nodes"] == "1" else "nic"
        yield transfer_point("exchange", link, 2, int(row["micro_batch"]), float(row["value"]) / 1e6, _RUNS)


def _timed(table: str, gpu: str) -> Iterator[Row]:
    """Yield the rows of a table that are times of one GPU."""
    return (row for row in rows(table) if row["gpu"].startswith(gpu) and row["unit"] == "us")
