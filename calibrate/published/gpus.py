"""Profiles of single kinds of GPU: matrix products, attention, the kernels around it, collectives, transfers.

What tables of several sources say of the same kernel is averaged geometrically. Attention keeps few points, since its
tile model says what lies between and beyond them; matrix products keep those of the sizes that models have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec

from calibrate.held.tiles import tile_models
from calibrate.published import between_nodes, blackwell, curves, elementwise, queued, ultraattn
from calibrate.published.curves import Timed, apart, averaged, without_causal_forward
from calibrate.published.host import (
    EAGER_LAYER_TRAFFIC,
    EAGER_SOURCES,
    EAGER_TRAFFIC,
    OVERLAP_SLOWDOWN,
    PERSISTENT,
    PERSISTENT_SOURCE,
    eager_host,
    eager_issue,
)
from calibrate.published.losses import BACKWARD_SOURCE, LOSS_SOURCE, backwards, losses
from calibrate.published.queued import OF_A100, OF_HOPPER, Queued
from calibrate.published.reading import (
    Row,
    geometric_mean,
    kernel_point,
    rows,
    square_attention,
    transfer_point,
)
from calibrate.published.streaming import NORMS_SOURCE, norms, streaming
from calibrate.published.sustained import (
    A100,
    B200,
    FORMS,
    FORMS_SOURCE,
    GB200,
    GB300,
    H100,
    H200,
    HELD_SOURCE,
    UnderLoad,
    held,
)
from sim.engine.traffic.collectives import wire_bytes
from sim.schedule.derive.kernels import KernelUse
from sim.schedule.ir.masks import CAUSAL
from sim.schedule.ir.ops import CollectiveName
from sim.words.profile import FusedAttention, Machine, Point, Profile, Sustained
from topology.cluster import Cluster, load_cluster
from topology.specs import ClusterSpec

_TOKENS = tuple(2**n for n in range(7, 15))
_WIDTHS = (1024, 2048, 4096, 5120, 6144, 8192, 12288, 16384)
"""Fans of the matrix products that are kept."""
_HEADS = (1, 2, 4, 8, 16, 32, 64, 96)
_HEAD_DIMS = (64, 128)
_SIZES_PER_OCTAVE = 2
"""Of the many sizes of transfers, those nearest to these are kept."""
_COLLECTIVES: dict[str, CollectiveName] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_reduce": "all_reduce",
}
"""Names in the tables, and here."""
_LEAST_PART = 16
"""Bytes per rank of the smallest collectives across nodes that are kept: below, time does not grow with size."""


Pairs = dict[str, dict[int, float]]
"""Seconds between two GPUs by bytes, by link."""


class Gpu(NamedTuple):
    """Where the figures of one GPU are."""

    cluster: str
    system: str
    """In the tables of aiconfigurator."""
    attention: tuple[str, ...]
    """Kernels of the same algorithm in its table of attention; none where others have all."""
    others: Callable[[], list[Timed]]
    """What other sources say of its attention: full forward and backward passes, which become points, and causal
    forward ones, which say how far sources are apart."""
    others_source: str
    fused: FusedAttention
    """Which kernel that is."""
    memory_efficiency: float
    memory_source: str
    queued: Queued = OF_HOPPER
    send_recv: str = ""
    """In Vidur's table."""
    vidur: str = ""
    """In Vidur's table of the kernels around attention."""
    liger: str = ""
    """In Liger's benchmarks of them."""
    losses: str = ""
    """In Liger's benchmarks of embeddings and losses."""
    norms: str = ""
    """In cuDNN's benchmarks of norms."""
    eager: bool = False
    """Whether the kernels around attention are eager PyTorch's, not fused."""
    persistent: bool = False
    """Whether matrix products have a block per SM with a fixed share of the work, as cuBLAS has on Hopper."""
    alone: str = ""
    """In the tables of single sizes, where those of matrix products and collectives are of another GPU."""
    load: UnderLoad | None = None
    fabric: str = ""
    """How the system is called that nccl-tests ran on, on several nodes with as fast a NIC per GPU."""
    between_nodes: Callable[[ClusterSpec], Iterable[Point]] = lambda _: ()
    """What other tables say of collectives across nodes."""
    nodes_sources: tuple[str, ...] = ()
    hops: Callable[[Pairs], Iterable[Point]] = lambda _: ()
    """Sends and receives, given those between two GPUs of Vidur's table."""
    hops_source: str = "the links' figures"


def profile_of(name: str, gpu: Gpu) -> Profile:
    """Return the profile of a GPU."""
    spec = msgspec.structs.replace(load_cluster(gpu.cluster), nodes=2)
    others = gpu.others()
    more, forward = without_causal_forward(others) if gpu.attention else averaged(others), list(_forward(gpu))
    around = norms(gpu.norms) if gpu.norms else streaming(gpu.vidur, gpu.liger, spec.hbm.bytes_per_s, eager=gpu.eager)
    points = [
        *_gemms(gpu.system), *forward, *more.points,
        *around.points, *backwards(gpu.losses), *losses(gpu.losses),
        *_in_a_node(gpu.system, Cluster(spec)), *blackwell.large(gpu.alone, Cluster(spec)),
        *_across_nodes(gpu.fabric, spec), *gpu.between_nodes(spec),
        *gpu.hops(_pairs(gpu.send_recv)),
    ]  # fmt: skip
    widths = {"attention_forward": apart(others, forward), "gemm": blackwell.gemm_apart(gpu.alone, points)}
    return Profile(
        name=name,
        created="aiconfigurator@095f58a",
        command=f"longstep calibrate --published {name}",
        complete=True,
        machine=Machine(gpu=spec.gpu.name, software={}),
        cluster=spec.figures(),
        points=tuple(points),
        traffic=EAGER_TRAFFIC | (EAGER_LAYER_TRAFFIC if gpu.eager else {}),
        memory_efficiency=gpu.memory_efficiency,
        elementwise=_elementwise(gpu),
        replayed_s=gpu.queued.replayed_s,
        replayed=gpu.queued.apart,
        issue=eager_issue(spec),
        host=eager_host(spec),
        persistent=PERSISTENT if gpu.persistent else {},
        beside_communication=OVERLAP_SLOWDOWN,
        attention=gpu.fused,
        tiles=tile_models(points, spec.gpu.sms),
        sustained=_sustained(gpu, spec),
        power=gpu.load.power if gpu.load else None,
        forms=FORMS,
        disagreement=_widest(more.disagreement, around.disagreement, widths),
        sources={
            "attention": "; ".join([*_forward_sources(gpu), gpu.others_source]),
            "gemm": f"ai-dynamo/aiconfigurator@095f58a, {gpu.system}"
            + (f"; {blackwell.GEMM_SOURCE}" if gpu.alone else ""),
            "collectives": f"ai-dynamo/aiconfigurator@095f58a, {gpu.system}, NCCL inside a node"
            + (f"; {blackwell.LARGE_SOURCE}" if gpu.alone else "")
            + "".join(f"; across nodes: {source}" for source in (*_fabric_sources(gpu.fabric), *gpu.nodes_sources)),
            **(_EAGER_LAYER_SOURCES if gpu.eager else _STREAMING_SOURCES if gpu.vidur else {}),
            **({"norms": NORMS_SOURCE} if gpu.norms else {}),
            **({"embedding, cross_entropy": LOSS_SOURCE} if gpu.losses else {}),
            **({"norms' and swiglu's backward": BACKWARD_SOURCE} if gpu.losses and not gpu.liger else {}),
            "exchange": gpu.hops_source,
            "memory_efficiency": gpu.memory_source,
            **elementwise.SOURCES,
            **queued.SOURCES,
            "forms": FORMS_SOURCE,
            **({"persistent": PERSISTENT_SOURCE} if gpu.persistent else {}),
            **_load_sources(gpu),
            **EAGER_SOURCES,
        },
    )


def _elementwise(gpu: Gpu) -> dict[str, float]:
    """Return how much longer elementwise kernels take than others with as many bytes."""
    of_a100, of_h100 = (
        one.memory_efficiency * load_cluster(one.cluster).hbm.bytes_per_s for one in (_A100, GPUS["h100-sxm"])
    )
    measured = (of_a100, elementwise.A100) if gpu.liger else (of_h100, elementwise.H100)
    return elementwise.scattered(*measured) | elementwise.log_softmax(of_a100)


def _sustained(gpu: Gpu, spec: ClusterSpec) -> dict[str, Sustained]:
    """Return what load makes of kernels, with the rate that long matrix products hold."""
    if gpu.load is None or gpu.load.flat:
        return gpu.load.sustained if gpu.load else {}
    gemm = gpu.load.sustained["gemm"]
    most = held(gpu.system, spec.gpu.peak_flops_per_s["bf16"], gemm.falls_s[1])
    return gpu.load.sustained | {"gemm": msgspec.structs.replace(gemm, held=most)}


def _load_sources(gpu: Gpu) -> dict[str, str]:
    return {} if gpu.load is None else gpu.load.sources | ({} if gpu.load.flat else {"held": HELD_SOURCE})


def _widest(*found: dict[str, float]) -> dict[str, float]:
    """Return the largest factor by kernel; none where sources agree."""
    widest = {kernel: max(one.get(kernel, 1.0) for one in found) for factors in found for kernel in factors}
    return {kernel: factor for kernel, factor in sorted(widest.items()) if factor > 1}


def _gemms(system: str) -> Iterator[Point]:
    """Yield matrix products of bf16."""
    for row in rows("gemm_bf16"):
        m, n, k = (int(row[name]) for name in "mnk")
        if row["system"] == system and m in _TOKENS and n in _WIDTHS and k in _WIDTHS:
            use = KernelUse("gemm", "", "bf16", (m, k, n), 2 * m * n * k, 2 * (m * k + k * n + m * n))
            yield kernel_point(use, float(row["latency_us"]) / 1e6)


def _forward(gpu: Gpu) -> Iterator[Point]:
    """Yield causal attention of one sequence, whichever the number of key/value heads was."""
    found: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for row in _of_table(gpu):
        heads, head_dim = int(row["num_heads"]), int(row["head_dim"])
        if row["batch_size"] == "1" and heads in _HEADS and head_dim in _HEAD_DIMS:
            found[int(row["seqlen"]), heads, head_dim].append(float(row["latency_us"]) / 1e6)
    for (tokens, heads, head_dim), times in sorted(found.items()):
        yield kernel_point(
            square_attention(False, (1, tokens, heads, head_dim), CAUSAL), geometric_mean(times), len(times)
        )


def _forward_sources(gpu: Gpu) -> list[str]:
    """Return which kernels of aiconfigurator's table there are, with what ran them."""
    ran = {row["kernel_source"]: f"{row['fw']} {row['ver']}" for row in _of_table(gpu)}
    named = [f"{kernel} ({ran[kernel]})" for kernel in gpu.attention]
    return [f"causal forward: aiconfigurator, {' and '.join(named)}"] if named else []


def _of_table(gpu: Gpu) -> Iterator[Row]:
    """Yield the rows of aiconfigurator's table of attention that are of one algorithm on a GPU."""
    for row in rows("attention_forward_causal"):
        if row["system"] == gpu.system and row["kernel_source"] in gpu.attention:
            yield row


def _in_a_node(system: str, cluster: Cluster) -> Iterator[Point]:
    """Yield NCCL inside a node, by its newest version."""
    ours = [row for row in rows("nccl_one_node") if row["system"] == system and row["nccl_dtype"] == "half"]
    newest = max((tuple(map(int, row["dir_version"].split("."))) for row in ours), default=())
    for row in ours:
        if tuple(map(int, row["dir_version"].split("."))) == newest:
            kind, ranks, whole = _COLLECTIVES[row["collective"]], int(row["num_gpus"]), int(row["bytes"])
            yield _collective_point(kind, "nvlink", ranks, whole, [float(row["time_us"]) / 1e6], cluster)


def _across_nodes(fabric: str, spec: ClusterSpec) -> Iterator[Point]:
    """Yield all-reduce over the NICs of several nodes."""
    found: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for row in _of_fabric(fabric):
        nodes, ranks, whole = int(row["nodes"]), int(row["gpus"]), int(row["bytes"])
        if nodes > 1 and whole >= ranks * _LEAST_PART:
            found[nodes, ranks, whole].append(float(row["time_us"]) / 1e6)
    clusters = {nodes: Cluster(msgspec.structs.replace(spec, nodes=nodes)) for nodes, _, _ in found}
    for (nodes, ranks, whole), times in sorted(found.items()):
        yield _collective_point("all_reduce", "nic", ranks, whole, times, clusters[nodes])


def _of_fabric(fabric: str) -> Iterator[Row]:
    return (row for row in rows("nccl_multi_node") if row["system"] == fabric)


def _fabric_sources(fabric: str) -> list[str]:
    """Return where the times across nodes come from, each once."""
    return sorted({f"{row['system']}, {row['source'].split(' ')[0]}" for row in _of_fabric(fabric)})


def _collective_point(
    kind: CollectiveName, link: str, ranks: int, whole: int, times: list[float], cluster: Cluster
) -> Point:
    """Return the point of a collective, with the bytes that the simulator counts on the slowest link."""
    wire, _ = wire_bytes(kind, tuple(range(ranks)), whole, cluster)
    return transfer_point(kind, link, ranks, wire, geometric_mean(times), len(times))


def _pairs(system: str) -> Pairs:
    """Return sends and receives inside a node and between two."""
    found: Pairs = {}
    for devices, link in (("2", "nvlink"), ("1", "nic")):
        times = {
            int(row["bytes"]): float(row["time_ms"]) / 1e3
            for row in rows("send_recv_vidur")
            if row["gpu"] == system and row["devices_per_node"] == devices
        }
        found[link] = {nbytes: times[nbytes] for nbytes in {min(times, key=_farness(e)) for e in _exponents(times)}}
    return found


def _in_pairs(pairs: Pairs) -> Iterator[Point]:
    """Yield sends and receives between two GPUs of a node."""
    for nbytes, seconds in sorted(pairs["nvlink"].items()):
        yield transfer_point("exchange", "nvlink", 2, nbytes, seconds)


def _hops_of_a100(pairs: Pairs) -> Iterator[Point]:
    """Yield those of A100 inside a node, and those of A800 between nodes, whose NICs are as fast: they reach 90 % of
    their rate, all-to-alls on A100 80 %, and Vidur's A100 31 %, an outlier.
    """
    yield from _in_pairs(pairs)
    yield from (point for point in ultraattn.transfers("A800") if point.variant == "nic")


def _hops_of_h100(pairs: Pairs) -> Iterator[Point]:
    yield from _in_pairs(pairs)
    yield from between_nodes.hops(pairs)


def _exponents(sizes: Iterable[int]) -> list[float]:
    """Return the powers of two, and what is between them, that some sizes cover."""
    ordered = sorted(sizes)
    if not ordered:
        return []
    low, high = (math.log2(size) * _SIZES_PER_OCTAVE for size in (ordered[0], ordered[-1]))
    return [n / _SIZES_PER_OCTAVE for n in range(math.ceil(low), math.floor(high) + 1)]


def _farness(exponent: float) -> Callable[[int], float]:
    return lambda size: abs(math.log2(size) - exponent)


_CHARTS_SOURCE = (
    "bar charts of SandAI-org/MagiAttention@2c64135, digitised (one sequence, 64 heads of dimension 128: from memory "
    "of what its authors write, not in the table; the rate of sequences so long hardly depends on the number of heads)"
)
_FA3_SOURCE = (
    "full forward: bar labels of arXiv:2407.08608 Fig. 5; backward: a machine transcription of its Fig. 6 (secondary), "
    f"causal ones of meta-pytorch/tritonbench PR 1267; fa3 of both, 4K to 32K tokens: {_CHARTS_SOURCE}; all on H100"
)
_FA4_SOURCE = f"full forward, and backward: geometric mean of fa4 and cudnn, 8K to 32K tokens: {_CHARTS_SOURCE}"


_STREAMING_SOURCES = {
    "norms, rope, swiglu, accumulate": "microsoft/vidur@7d47513, Llama-2-70b, and on A100 linkedin/Liger-Kernel 0.2.1"
}
_EAGER_LAYER_SOURCES = {
    "norms, rope": "eager kernels of Hugging Face's Llama, as linkedin/Liger-Kernel 0.2.1 has timed them"
} | {f"traffic.{kernel}": "counted: every eager kernel passes over memory by itself" for kernel in EAGER_LAYER_TRAFFIC}


def _cudnn_source(version: str) -> str:
    return (
        f"both passes, causal and full: cuDNN {version}, NVIDIA/cudnn-frontend@3929da2 "
        "benchmark/sdpa_benchmark_training, not deterministic"
    )


def _cudnn(version: str) -> FusedAttention:
    return FusedAttention(kernel="cudnn", said=f"cuDNN {version}")


_H200 = Gpu(
    cluster="hgx-h200",
    system="h200_sxm",
    attention=("fa3", "vllm_flash_attn_fa3"),
    others=curves.on_h100,
    others_source=_FA3_SOURCE,
    fused=FusedAttention(kernel="flash-attention-3", said="FlashAttention-3"),
    memory_efficiency=0.81,
    memory_source="stores, 3898 of 4800 GB/s: te42kyfo/gpu-benches gpu-stream/h200.txt",
    norms="NVIDIA H200",
    persistent=True,
    load=H200,
)
_A100 = Gpu(
    cluster="dgx-a100",
    system="a100_sxm",
    attention=("flash_attention", "vllm_flash_attn"),
    others=curves.on_a800,
    others_source="full forward and backward: flash-attn 2.5.7 on A800, oliverYoung2001/UltraAttn@b5aa10e",
    fused=FusedAttention(kernel="flash-attention-2", said="FlashAttention-2"),
    memory_efficiency=0.77,
    memory_source="copies within a GPU, 1545 to 1594 of 2039 GB/s: stas00/ml-engineering@744d01e network/README.md",
    queued=OF_A100,
    send_recv="A100 DGX",
    vidur="a100",
    liger="NVIDIA A100-SXM4-80GB",
    losses="NVIDIA A100-SXM4-80GB",
    load=A100,
    fabric="Azure ND A100 v4 (A100-SXM4-40GB, 8x200Gb IB per node)",
    between_nodes=between_nodes.all_to_all_of_a100,
    nodes_sources=(between_nodes.A100_SOURCE,),
    hops=_hops_of_a100,
    hops_source="inside a node microsoft/vidur@7d47513, A100 DGX; between nodes A800 with NICs of the same rate, "
    "oliverYoung2001/UltraAttn@b5aa10e; not Vidur's A100 between nodes, which got 31 % of the NIC",
)
_B200 = Gpu(
    cluster="hgx-b200",
    system="b200_sxm",
    attention=("trtllm_mha", "vllm_flashinfer_trtllmprefill"),
    others=curves.on_b200,
    others_source=_FA4_SOURCE,
    fused=FusedAttention(kernel="", said="TensorRT-LLM's causal forward, the rest between FlashAttention-4 and cuDNN"),
    memory_efficiency=0.72,
    memory_source="copies within a GB200, 5715 to 5821 of 8000 GB/s: stas00/ml-engineering@744d01e",
    load=B200,
)
_GB200 = _B200._replace(
    cluster="gb200-nvl72",
    system="gb200",
    attention=(),
    others=partial(curves.of_cudnn, "GB200"),
    others_source=_cudnn_source("9.22.0"),
    fused=_cudnn("9.22.0"),
    norms="NVIDIA GB200",
    load=GB200,
)
GPUS = {
    "a100-sxm": _A100,
    "a100-sxm-eager": _A100._replace(eager=True),
    "h100-sxm": _H200._replace(
        cluster="hgx-h100",
        system="h100_sxm",
        memory_efficiency=0.75,
        memory_source="copies within a GPU, 2494 to 2534 of 3350 GB/s: stas00/ml-engineering@744d01e network/README.md",
        send_recv="H100 DGX",
        vidur="h100",
        losses="NVIDIA H100 80GB HBM3",
        norms="",
        load=H100,
        fabric="AWS p5 (H100, 32x100Gb EFA = 3200Gb/s per node)",
        between_nodes=between_nodes.collectives,
        nodes_sources=(between_nodes.MEASURED_SOURCE, between_nodes.MODEL_SOURCE),
        hops=_hops_of_h100,
        hops_source="two ranks microsoft/vidur@7d47513, H100 DGX; rings of more, short ones as between two: "
        f"{between_nodes.MEASURED_SOURCE}, inside a node 4 and 8 ranks",
    ),
    "h200-sxm": _H200,
    "h200-sxm-cudnn": _H200._replace(
        attention=(),
        others=partial(curves.of_cudnn, "H200"),
        others_source=_cudnn_source("9.19.1"),
        fused=_cudnn("9.19.1"),
    ),
    "b200-sxm": _B200,
    "gb200-nvl72": _GB200,
    "gb300-nvl72": _GB200._replace(
        cluster="gb300-nvl72",
        others=partial(curves.of_cudnn, "GB300"),
        norms="NVIDIA GB300",
        alone="GB300",
        load=GB300,
    ),
}
"""By name of the profile."""
