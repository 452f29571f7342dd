"""Profiles of single kinds of GPU: matrix products, attention, collectives inside a node, transfers.

What tables of several sources say of the same kernel is averaged geometrically. Attention keeps few points, since its
tile model says what lies between and beyond them; matrix products keep those of the sizes that models have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from calibrate.published.reading import (
    EAGER_SOURCES,
    EAGER_TRAFFIC,
    Row,
    eager_issue,
    geometric_mean,
    kernel_point,
    rows,
    transfer_point,
)
from calibrate.tiles import fitted_tiles
from sim.engine.tiles import tiled_s
from sim.profile import Machine, Point, Profile
from sim.schedule.kernels import KernelUse, attention_use
from sim.schedule.masks import CAUSAL, FULL, Band
from topology.cluster import load_cluster

_TOKENS = tuple(2**n for n in range(7, 15))
_WIDTHS = (1024, 2048, 4096, 5120, 6144, 8192, 12288, 16384)
"""Fans of the matrix products that are kept."""
_HEADS = (1, 2, 4, 8, 16, 32, 64, 96)
_HEAD_DIMS = (64, 128)
_SIZES_PER_OCTAVE = 2
"""Of the many sizes of transfers, those nearest to these are kept."""
_COLLECTIVES: dict[str, tuple[str, Callable[[int], float]]] = {
    "all_gather": ("all_gather", lambda n: (n - 1) / n),
    "reduce_scatter": ("reduce_scatter", lambda n: (n - 1) / n),
    "alltoall": ("all_to_all", lambda n: (n - 1) / n),
    "all_reduce": ("all_reduce", lambda n: 2 * (n - 1) / n),
}
"""Name in the tables, name here, and the share of the bytes that a rank puts on the wire in a ring."""
_PAPER_TOKENS, _PAPER_WIDTH = 16384, 2048
"""Tokens in all, and heads times head dimension, of the figures of the FlashAttention papers (arXiv:2307.08691 §4.1,
arXiv:2407.08608 §4.1)."""


class Gpu(NamedTuple):
    """Where the figures of one GPU are."""

    cluster: str
    system: str
    """In the tables of aiconfigurator."""
    attention: tuple[str, ...]
    """Kernels of the same algorithm in its table of attention."""
    backward: Callable[[list[Point], int], list[Point]]
    """From the forward pass and the number of SMs."""
    memory_efficiency: float
    memory_source: str
    send_recv: str = ""
    """In Vidur's table."""


def profile_of(name: str, gpu: Gpu) -> Profile:
    """Return the profile of a GPU."""
    spec = msgspec.structs.replace(load_cluster(gpu.cluster), nodes=2)
    forward = list(_forward(gpu))
    reduces = bool(spec.nvlink and spec.nvlink.reduces)
    points = [
        *_gemms(gpu.system), *forward, *gpu.backward(forward, spec.gpu.sms),
        *_collectives(gpu.system, in_switch=reduces), *_transfers(gpu.send_recv),
    ]  # fmt: skip
    by_model = defaultdict(list)
    for point in points:
        if point.kernel.startswith("attention"):
            by_model[point.kernel, point.shape[-1]].append(point)
    return Profile(
        name=name,
        created="aiconfigurator@095f58a",
        command=f"longstep calibrate --published {name}",
        complete=True,
        machine=Machine(gpu=spec.gpu.name, software={}),
        cluster=msgspec.to_builtins(spec, str_keys=True),
        points=tuple(points),
        traffic=EAGER_TRAFFIC,
        memory_efficiency=gpu.memory_efficiency,
        issue=eager_issue(),
        tiles=tuple(fitted_tiles(found, spec.gpu.sms) for found in by_model.values()),
        sources={
            "attention": f"forward: ai-dynamo/aiconfigurator@095f58a, {' and '.join(gpu.attention)}; backward: "
            + (gpu.backward.__doc__ or "").partition("from ")[2].strip().rstrip("."),
            "gemm": f"ai-dynamo/aiconfigurator@095f58a, {gpu.system}",
            "collectives": f"ai-dynamo/aiconfigurator@095f58a, {gpu.system}, NCCL inside a node",
            "exchange": f"microsoft/vidur@7d47513, {gpu.send_recv}" if gpu.send_recv else "the links' figures",
            "memory_efficiency": gpu.memory_source,
            **EAGER_SOURCES,
        },
    )


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
    for row in rows("attention_forward_causal"):
        heads, head_dim = int(row["num_heads"]), int(row["head_dim"])
        if (
            row["system"] == gpu.system
            and row["kernel_source"] in gpu.attention
            and row["batch_size"] == "1"
            and heads in _HEADS
            and head_dim in _HEAD_DIMS
        ):
            found[int(row["seqlen"]), heads, head_dim].append(float(row["latency_us"]) / 1e6)
    for (tokens, heads, head_dim), times in sorted(found.items()):
        yield kernel_point(_use(False, (1, tokens, heads, head_dim), CAUSAL), geometric_mean(times), len(times))


def _use(backward: bool, q_shape: tuple[int, int, int, int], band: Band) -> KernelUse:
    return attention_use(backward, "bf16", q_shape, q_shape[1], q_shape[2], band)


def _collectives(system: str, *, in_switch: bool) -> Iterator[Point]:
    """Yield NCCL inside a node, by its newest version, with the bytes that ``link_traffic`` counts on a link."""
    ours = [row for row in rows("nccl_one_node") if row["system"] == system and row["nccl_dtype"] == "half"]
    newest = max((tuple(map(int, row["dir_version"].split("."))) for row in ours), default=())
    for row in ours:
        if tuple(map(int, row["dir_version"].split("."))) == newest:
            kernel, share = _COLLECTIVES[row["collective"]]
            ranks = int(row["num_gpus"])
            by_ring = share(ranks)
            wire = min(by_ring, 1 + 1 / ranks) if in_switch and kernel == "all_reduce" else by_ring
            nbytes = round(int(row["bytes"]) * wire)
            yield transfer_point(kernel, "nvlink", ranks, nbytes, float(row["time_us"]) / 1e6)


def _transfers(system: str) -> Iterator[Point]:
    """Yield sends and receives inside a node and between two."""
    for devices, link in (("2", "nvlink"), ("1", "nic")):
        times = {
            int(row["bytes"]): float(row["time_ms"]) / 1e3
            for row in rows("send_recv_vidur")
            if row["gpu"] == system and row["devices_per_node"] == devices
        }
        for nbytes in sorted({min(times, key=_farness(exponent)) for exponent in _exponents(times)}):
            yield transfer_point("exchange", link, 2, nbytes, times[nbytes])


def _exponents(sizes: Iterable[int]) -> list[float]:
    """Return the powers of two, and what is between them, that some sizes cover."""
    ordered = sorted(sizes)
    if not ordered:
        return []
    low, high = (math.log2(size) * _SIZES_PER_OCTAVE for size in (ordered[0], ordered[-1]))
    return [n / _SIZES_PER_OCTAVE for n in range(math.ceil(low), math.floor(high) + 1)]


def _farness(exponent: float) -> Callable[[int], float]:
    return lambda size: abs(math.log2(size) - exponent)


def _papers(gpu: str, kernel: str, passes: str) -> Iterator[tuple[tuple[int, int, int, int], Band, float, Row]]:
    """Yield shape, mask and TFLOP/s of a figure of the FlashAttention papers."""
    for row in rows("attention_curves_papers"):
        if (row["gpu"], row["impl"], row["pass"]) == (gpu, kernel, passes) and row["mask"] in {"full", "causal"}:
            tokens, head_dim = int(float(row["seqlen"])), int(row["head_dim"])
            shape = (_PAPER_TOKENS // tokens, tokens, _PAPER_WIDTH // head_dim, head_dim)
            yield shape, CAUSAL if row["mask"] == "causal" else FULL, float(row["tflops"]), row


def flash_attention_2(forward: list[Point], sms: int) -> list[Point]:
    """Return the backward pass from arXiv:2307.08691 Fig. 4 (both passes, less the forward pass of these tables).

    The figure counts half of all scores as FLOPs under a causal mask.
    """
    head_dims = {point.shape[-1] for point in forward}
    models = {dim: fitted_tiles([point for point in forward if point.shape[-1] == dim], sms) for dim in head_dims}
    found = []
    for shape, band, tflops, _ in _papers("A100-SXM-80GB", "fa2", "fwd+bwd"):
        if shape[-1] not in models:
            continue
        batch, tokens, heads, head_dim = shape
        flops = 14 * batch * heads * tokens**2 * head_dim / (2 if band == CAUSAL else 1)
        both_s = flops / (tflops * 1e12)
        forward_s = tiled_s(models[head_dim], _use(False, shape, band), sms)
        if both_s > forward_s:
            found.append(kernel_point(_use(True, shape, band), both_s - forward_s))
    return found


def flash_attention_3(forward: list[Point], sms: int) -> list[Point]:  # noqa: ARG001 - as all of them
    """Return the backward pass from arXiv:2407.08608 Fig. 6, and from meta-pytorch/tritonbench PR 1267 (causal)."""
    found = []
    for shape, band, tflops, _ in _papers("H100-SXM-80GB", "fa3", "bwd"):
        batch, tokens, heads, head_dim = shape
        flops = 10 * batch * heads * tokens**2 * head_dim
        found.append(kernel_point(_use(True, shape, band), flops / (tflops * 1e12)))
    for (_batch, tokens, _heads, head_dim), band, tflops, row in _papers("H100", "fa3", "bwd"):
        if "B=4,H=48" in row["source"]:
            shape = (4, tokens, 48, head_dim)
            half = 10 * 4 * 48 * tokens**2 * head_dim / 2
            found.append(kernel_point(_use(True, shape, band), half / (tflops * 1e12)))
    return found


def no_backward(forward: list[Point], sms: int) -> list[Point]:  # noqa: ARG001 - as all of them
    """Return nothing, which leaves the backward pass at the rate from the datasheet."""
    return []


GPUS = {
    "a100-sxm": Gpu(
        cluster="dgx-a100",
        system="a100_sxm",
        attention=("flash_attention", "vllm_flash_attn"),
        backward=flash_attention_2,
        memory_efficiency=0.77,
        memory_source="copies within a GPU, 1545 to 1594 of 2039 GB/s: stas00/ml-engineering@744d01e network/README.md",
        send_recv="A100 DGX",
    ),
    "h100-sxm": Gpu(
        cluster="hgx-h100",
        system="h100_sxm",
        attention=("fa3", "vllm_flash_attn_fa3"),
        backward=flash_attention_3,
        memory_efficiency=0.75,
        memory_source="copies within a GPU, 2494 to 2534 of 3350 GB/s: stas00/ml-engineering@744d01e network/README.md",
        send_recv="H100 DGX",
    ),
    "h200-sxm": Gpu(
        cluster="hgx-h200",
        system="h200_sxm",
        attention=("fa3", "vllm_flash_attn_fa3"),
        backward=flash_attention_3,
        memory_efficiency=0.81,
        memory_source="stores, 3898 of 4800 GB/s: te42kyfo/gpu-benches gpu-stream/h200.txt",
    ),
    "b200-sxm": Gpu(
        cluster="hgx-b200",
        system="b200_sxm",
        attention=("trtllm_mha", "vllm_flashinfer_trtllmprefill"),
        backward=no_backward,
        memory_efficiency=0.72,
        memory_source="copies within a GB200, 5715 to 5821 of 8000 GB/s: stas00/ml-engineering@744d01e",
    ),
}
"""By name of the profile."""
