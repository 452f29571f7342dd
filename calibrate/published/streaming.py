"""Points of the kernels around attention that memory bounds: norms, rotary embedding, SwiGLU, residual sums.

Fused ones are vLLM's, as Vidur has timed them on the layers of Llama-2-70B, which have the shapes of Llama-3-70B, and
Liger's, with a backward pass. Where both are timed, points lie at the geometric mean of their rates. Eager ones are
those of Hugging Face's models, as Liger's benchmarks have them beside its own.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from calibrate.measure.cases import cases_of
from calibrate.published.reading import Averaged, geometric_mean, kernel_point, rows
from sim.schedule.derive.kernels import KernelUse
from sim.schedule.methods import single
from sim.words.mesh import Mesh
from sim.words.profile import Point
from sim.words.workload import Workload, load_model

_VLLM = {
    "input_layernorm(rmsnorm)": "rms_norm",
    "attn_rope": "rope",
    "mlp_act(silu_mul)": "swiglu",
    "add(residual)": "accumulate",
}
"""Kernels as Vidur calls them, and here."""
_LIGER = {
    ("rms_norm", "forward"): "rms_norm",
    ("rms_norm", "backward"): "rms_norm_backward",
    ("rope", "forward"): "rope",
}
_LAUNCH_BOUND_S = 100e-6
"""Liger's backward passes take no less: what was timed is how the host launches them. So it may be with all that is
launched as many kernels."""
_WIDEST = 16384
"""Dimensions of models; a norm of wider ones runs out of registers."""


class _Timed(NamedTuple):
    use: KernelUse
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.use.hbm_bytes / self.seconds


def streaming(vidur: str, liger: str, bytes_per_s: float, *, eager: bool = False) -> Averaged:
    """Return the points of a GPU, as it is called in either table; none where it is in neither. What is faster than its
    memory, of so many bytes per second, has been in the cache.
    """
    points: list[Point] = []
    disagreement: dict[str, float] = {}
    found = (_vllm("" if eager else vidur), _liger(liger, "huggingface" if eager else "liger"))
    vllm, others = ([timed for timed in all_of if timed.rate < bytes_per_s] for all_of in found)
    for kernel in sorted({timed.use.kernel for timed in (*vllm, *others)}):
        ours = [timed for timed in vllm if timed.use.kernel == kernel]
        theirs = [timed for timed in others if timed.use.kernel == kernel]
        half = 1.0
        if ours and theirs:
            ratios = [_nearest(ours, timed).rate / timed.rate for timed in theirs]
            half = math.sqrt(geometric_mean(ratios))
            disagreement[kernel] = round(max(half, 1 / half), 4)
        runs = 2 if half != 1 else 1
        points += [kernel_point(timed.use, timed.seconds * half, runs) for timed in ours or theirs]
    return Averaged(points, disagreement)


NORMS_SOURCE = "geometric mean of cuDNN and torch.compile, NVIDIA/cudnn-frontend@3929da2 benchmark/norms"
_NORM_BACKENDS = ("cudnn", "torch_compile")
_NARROWEST = 1024
"""Dimensions of models; norms of single heads are narrower."""


def norms(gpu: str) -> Averaged:
    """Return the RMS norms of a GPU, forward and backward, at the geometric mean of two fused kernels over widths."""
    found: dict[tuple[str, int], dict[str, list[_Timed]]] = defaultdict(lambda: defaultdict(list))
    for row in rows("norm_kernels"):
        width, backend = int(row["C"]), row["backend"]
        if row["gpu_name"] != gpu or row["norm_type"] != "rms_norm" or backend not in _NORM_BACKENDS:
            continue
        if _NARROWEST <= width <= _WIDEST:
            uses = uses_of(int(row["N"]), embed_dim=width)
            for kernel, column in (("rms_norm", "fwd_time_ms"), ("rms_norm_backward", "bwd_time_ms")):
                timed = _Timed(uses[kernel], float(row[column]) / 1e3)
                found[kernel, timed.use.shape[0]][backend].append(timed)
    points, ratios = [], defaultdict(list)
    for (kernel, _), by_backend in sorted(found.items()):
        times = [timed.seconds for of_backend in by_backend.values() for timed in of_backend]
        first, second = (geometric_mean([timed.seconds for timed in by_backend[name]]) for name in _NORM_BACKENDS)
        ratios[kernel].append(first / second)
        points.append(kernel_point(by_backend[_NORM_BACKENDS[0]][0].use, geometric_mean(times), len(times)))
    halves = {kernel: math.sqrt(geometric_mean(of_kernel)) for kernel, of_kernel in ratios.items()}
    return Averaged(points, {kernel: round(max(half, 1 / half), 4) for kernel, half in halves.items()})


def _nearest(candidates: list[_Timed], to: _Timed) -> _Timed:
    """Return the one of most nearly the same size."""
    return min(candidates, key=lambda timed: abs(math.log(timed.use.hbm_bytes / to.use.hbm_bytes)))


def _vllm(gpu: str) -> Iterator[_Timed]:
    """Yield what Vidur has timed, medians over ranks."""
    for row in rows("elementwise_rates"):
        if row["gpu"] == gpu and row["op"] in _VLLM:
            yield _Timed(uses_of(int(row["tokens"]))[_VLLM[row["op"]]], float(row["time_us"]) / 1e6)


def _liger(gpu: str, provider: str) -> Iterator[_Timed]:
    """Yield Liger's benchmarks of somebody's kernels, medians."""
    for row in rows("norm_swiglu_ce_kernels"):
        kernel = _LIGER.get((row["kernel_name"], row["kernel_operation_mode"]), "")
        if (row["gpu_name"], row["kernel_provider"]) != (gpu, provider) or not kernel:
            continue
        seconds = float(row["y_value_50"]) / 1e3
        sizes = json.loads(row["extra_benchmark_config_str"]) | {row["x_name"]: int(row["x_value"])}
        many = provider != "liger" or row["kernel_operation_mode"] == "backward"
        if sizes.get("H", 0) > _WIDEST or (many and seconds <= _LAUNCH_BOUND_S):
            continue
        if kernel == "rope":
            heads, width = sizes["num_q_heads"], sizes.get("H") or sizes["hidden_size"]
            tokens, kv_heads = sizes.get("T") or sizes["seq_len"], sizes["num_kv_heads"]
            uses = uses_of(tokens, num_heads=heads, num_kv_heads=kv_heads, head_dim=width // heads)
        else:
            uses = uses_of(sizes["M"], embed_dim=sizes["H"])
        yield _Timed(uses[kernel], seconds)


def uses_of(tokens: int, **model: int) -> dict[str, KernelUse]:
    """Return the kernels of a layer by name, the first of each; of rotary embedding the one of queries and keys."""
    spec = msgspec.structs.replace(load_model("llama3-70b"), **model)
    workload = Workload(model=spec, seq=tokens, dtype="bf16", scope="layer")
    uses: dict[str, KernelUse] = {}
    for case in cases_of(single.build(workload, Mesh()).program(0)):
        uses.setdefault(case.use.kernel, case.use)
    of_queries, heads = uses["rope"], spec.num_heads + spec.num_kv_heads
    elements, flops, nbytes = (
        value * heads // spec.num_heads for value in (*of_queries.shape, of_queries.flops, of_queries.hbm_bytes)
    )
    uses["rope"] = of_queries._replace(shape=(elements,), flops=flops, hbm_bytes=nbytes)
    return uses
