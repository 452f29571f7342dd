"""Points of full masks and backward passes, from curves of attention in papers, pull requests and charts.

Where two kernels or two sources are timed at the same work, the point is their geometric mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from calibrate.published import ultraattn
from calibrate.published.reading import Averaged, Row, geometric_mean, kernel_point, rows, square_attention
from sim.engine.costs.tiles import use_of
from sim.schedule.derive.kernels import KernelUse
from sim.schedule.ir.masks import CAUSAL, FULL
from sim.words.profile import Point

_HEAD_DIMS = (64, 128)
_PAPER_TOKENS, _PAPER_WIDTH = 16384, 2048
"""Tokens in all, and heads times head dimension, of the figures of the FlashAttention papers (arXiv:2307.08691 §4.1,
arXiv:2407.08608 §4.1)."""
_CHART_HEADS, _CHART_HEAD_DIM = 64, 128
"""Of MagiAttention's charts of one sequence: from memory of what its authors write, since the charts state neither."""
_CLEAR_OF_LAUNCH = 4
"""A time counts if it is so many times the shortest of its kernel and pass: twice the tokens are four times the work,
but forward passes of 1K and 2K tokens, causal and full, take the same on B200: what the host takes to launch them."""


_OPERATIONS = {"fwd": 4, "bwd": 10, "fwd+bwd": 14}
"""A score and dimension of a head."""

Timed = tuple[KernelUse, float]
"""A kernel, and its seconds."""


def on_a800() -> list[Timed]:
    """Return what UltraAttn has timed of flash-attn 2.5.7 on A800, the same silicon as A100."""
    return [(use_of(point), point.median_s) for point in ultraattn.kernels("A800") if point.shape[1] == point.shape[2]]


def on_h100() -> list[Timed]:
    """Return what is known of FlashAttention-3."""
    return [*papers("fa3"), *charts("H100", ("fa3",))]


def on_b200() -> list[Timed]:
    """Return what is known of FlashAttention-4 and cuDNN."""
    return list(charts("B200", ("fa4", "cudnn")))


def of_cudnn(gpu: str) -> list[Timed]:
    """Return what cuDNN takes on a GPU: all passes and masks without a window, of one head dimension, with as much
    overlap of its atomic sums as it gets (not deterministic).
    """
    found = []
    for row in rows("attention_cudnn"):
        head_dim = int(row["head_dim_qk"])
        if (
            (row["gpu"], row["dtype"], row["sliding_window"]) == (gpu, "bfloat16", "")
            and row["deterministic"] != "True"
            and head_dim in _HEAD_DIMS
            and row["head_dim_v"] == row["head_dim_qk"]
        ):
            q_shape = (int(row["batch"]), int(row["seq_len"]), int(row["q_heads"]), head_dim)
            passes, band = row["pass"], CAUSAL if row["mask"] == "causal" else FULL
            found.append((square_attention(passes == "bwd", q_shape, band), float(row["time_ms"]) / 1e3))
    return found


def without_causal_forward(timed: Iterable[Timed]) -> Averaged:
    """Return points of full forward and backward passes, of which aiconfigurator has no table."""
    return averaged(one for one in timed if not _causal_forward(one[0]))


def apart(timed: Iterable[Timed], points: Iterable[Point]) -> float:
    """Return by which factor causal forward passes lie from the points of the same work, on average; 1 if none is."""
    known = {work(use_of(point)): point.median_s for point in points if point.kernel == "attention_forward"}
    ratios = [seconds / known[work(use)] for use, seconds in timed if _causal_forward(use) and work(use) in known]
    ratio = geometric_mean(ratios) if ratios else 1.0
    return round(max(ratio, 1 / ratio), 4)


def _causal_forward(use: KernelUse) -> bool:
    return (use.kernel, use.variant) == ("attention_forward", "causal")


def averaged(timed: Iterable[Timed]) -> Averaged:
    """Return the points of kernels and their seconds, of which the same work is there twice at most."""
    found: dict[tuple[object, ...], list[Timed]] = defaultdict(list)
    for use, seconds in timed:
        found[work(use)].append((use, seconds))
    points, ratios = [], defaultdict(list)
    for same in found.values():
        use, times = same[0][0], [seconds for _, seconds in same]
        points.append(kernel_point(use, geometric_mean(times), len(times)))
        if len(times) > 1:
            ratios[use.kernel].append(times[0] / times[1])
    halves = {kernel: math.sqrt(geometric_mean(found)) for kernel, found in ratios.items()}
    return Averaged(points, {kernel: round(max(half, 1 / half), 4) for kernel, half in halves.items()})


def work(use: KernelUse) -> tuple[object, ...]:
    """Return what kernels have in common that do the same: to a tile model, other sequences are more heads."""
    batch, queries, _, heads, _, head_dim = use.shape
    return use.kernel, use.variant, batch * heads, queries, head_dim


def papers(of: str, gpu: str = "H100-SXM-80GB") -> Iterator[Timed]:
    """Yield what arXiv:2407.08608 Fig. 5 and 6 show of a kernel on H100, and causal backward passes of tritonbench; on
    another GPU, what who ran the same benchmark has got.
    """
    for row in rows("attention_curves_papers"):
        on, kernel, passes, mask = (row[name] for name in ("gpu", "impl", "pass", "mask"))
        if kernel != of or passes not in {"fwd", "bwd"} or row["dtype"] == "fp8" or not row["seqlen"]:
            continue
        shape = _paper_shape(row)
        if (on, mask, passes) == ("H100", "causal", "bwd") and "B=4,H=48" in row["source"]:
            shape = (4, shape[1], 48, shape[3])
        elif on != gpu or (mask != "full" and passes != "fwd"):
            continue
        if shape[3] in _HEAD_DIMS:
            yield timed_row(row, shape)


def _paper_shape(row: Row) -> tuple[int, int, int, int]:
    """Return sequences, tokens, heads and head dimension in the figures of the FlashAttention papers."""
    tokens, head_dim = int(float(row["seqlen"])), int(row["head_dim"])
    return _PAPER_TOKENS // tokens, tokens, _PAPER_WIDTH // head_dim, head_dim


def _chart_shape(row: Row) -> tuple[int, int, int, int]:
    return 1, int(row["x"]), _CHART_HEADS, _CHART_HEAD_DIM


def summed(gpu: str, of: str) -> dict[KernelUse, float]:
    """Return what both passes of a kernel take together by arXiv:2307.08691 Fig. 4 and 5, by its forward pass."""
    found = {}
    for row in rows("attention_curves_papers"):
        if (row["gpu"], row["impl"], row["pass"]) == (gpu, of, "fwd+bwd") and int(row["head_dim"]) in _HEAD_DIMS:
            use, seconds = timed_row(row, _paper_shape(row))
            found[use] = seconds
    return found


def backward_of_sums(gpu: str, of: str) -> Iterator[Timed]:
    """Yield causal backward passes of a kernel: both passes together by one paper, less the forward one by another."""
    forward = {work(use): seconds for use, seconds in papers(of) if use.kernel == "attention_forward"}
    for use, seconds in summed(gpu, of).items():
        if use.variant == "causal" and work(use) in forward:
            batch, tokens, _, heads, _, head_dim = use.shape
            yield square_attention(True, (batch, tokens, heads, head_dim), CAUSAL), seconds - forward[work(use)]


def digitised_within(gpu: str, timed: Iterable[Timed], kernels: tuple[str, ...]) -> dict[str, float]:
    """Return by which factor, by kernel, bars of MagiAttention's charts may be off that are among what was timed."""
    within: dict[str, float] = defaultdict(lambda: 1.0)
    known = {work(use) for use, _ in timed}
    for row in rows("attention_curves_1k_32k"):
        if row["gpu"] == gpu and row["impl"] in kernels:
            use, _ = timed_row(row, _chart_shape(row))
            if work(use) in known:
                error = float(row["est_err_tflops"]) / float(row["tflops_per_gpu"])
                within[use.kernel] = max(within[use.kernel], round(1 + error, 4))
    return dict(within)


def charts(gpu: str, kernels: tuple[str, ...]) -> Iterator[Timed]:
    """Yield the work that MagiAttention's charts show of each of some kernels, once for each of them."""
    times: dict[tuple[str, str], dict[KernelUse, float]] = defaultdict(dict)
    for row in rows("attention_curves_1k_32k"):
        if row["gpu"] == gpu and row["impl"] in kernels:
            use, seconds = timed_row(row, _chart_shape(row))
            times[row["impl"], row["pass"]][use] = seconds
    clear: dict[KernelUse, list[float]] = defaultdict(list)
    for of_kernel in times.values():
        for use, seconds in of_kernel.items():
            if seconds >= _CLEAR_OF_LAUNCH * min(of_kernel.values()):
                clear[use].append(seconds)
    for use, found in clear.items():
        if len(found) == len(kernels):
            yield from ((use, seconds) for seconds in found)


def timed_row(row: Row, q_shape: tuple[int, int, int, int]) -> Timed:
    """Return the kernel of a row, and how long it took: 4 operations a score and dimension, 10 backward. Both passes
    together count as the forward one.
    """
    batch, tokens, heads, head_dim = q_shape
    passes, mask = row["pass"], row["mask"]
    backward, causal = passes == "bwd", mask == "causal"
    scores = batch * heads * tokens**2 / (2 if causal else 1)
    tflops = float(row["tflops_per_gpu" if "tflops_per_gpu" in row else "tflops"])
    seconds = _OPERATIONS[passes] * scores * head_dim / (tflops * 1e12)
    return square_attention(backward, q_shape, CAUSAL if causal else FULL), seconds
