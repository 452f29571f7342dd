"""Points of what stands at both ends of a model, embedding and loss, and of backward passes, from Liger's benchmarks.

Training steps play the embedding of torch and the fused loss; the other losses are for comparison. All are sized by the
elements of logits, or of what embedding returns, in fp32, and count the bytes that no implementation can avoid:

    cross_entropy             variants torch, megatron: logits read; fused: gradients written in their place, too
    cross_entropy_backward    logits read, gradients written
    embedding                 rows read and written; backward: gradients read, those of the whole table written
    fused_linear_cross_entropy    variant chunked, sized by tokens: logits, loss and both gradients, chunk by chunk
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator

from calibrate.published.reading import kernel_point, rows
from calibrate.published.streaming import uses_of
from sim.schedule.derive.kernels import KernelUse
from sim.words.profile import Point

LOSS_SOURCE = (
    "linkedin/Liger-Kernel@ead96b61 and 0.2.1 to 0.4.2 benchmark/data; backward is the whole less the forward pass; "
    "logits are taken to be fp32, which their memory and the memory's rate agree with"
)
BACKWARD_SOURCE = "RMS norm of torch, SwiGLU of Liger, the whole less the forward pass: linkedin/Liger-Kernel@ead96b61"
_VOCABULARY = 131072
"""Of the tables of embeddings that are kept; today's models have 128K."""
_LAUNCH_BOUND_S = 100e-6
"""Shorter passes show how the host launches them."""
_PROVIDERS = {
    ("cross_entropy", "huggingface"): "torch",
    ("cross_entropy", "liger"): "fused",
    ("megatron_cross_entropy", "megatron-unfused"): "megatron",
    ("megatron_cross_entropy", "megatron-fused"): "megatron fused",
    ("megatron_cross_entropy", "liger"): "fused",
    ("embedding", "huggingface"): "torch",
    ("embedding", "liger"): "fused",
    ("fused_linear_cross_entropy", "liger"): "chunked",
}
_Times = dict[str, float]
"""Seconds by pass: forward, backward, full."""


def losses(gpu: str) -> Iterator[Point]:
    """Yield embeddings and losses of a GPU, as it is called in the tables."""
    for (kernel, provider, x, config), times in sorted(times_of(gpu).items()):
        variant, sizes = _PROVIDERS.get((kernel, provider), ""), json.loads(config)
        if not variant:
            continue
        forward_s, backward_s = times["forward"], times["full"] - times["forward"]
        if kernel == "embedding":
            if x == _VOCABULARY:
                elements = sizes["B"] * sizes["T"] * sizes["D"]
                moved = 2 * elements, elements + x * sizes["D"]
                yield from _both("embedding", variant, elements, moved, (forward_s, backward_s))
        elif kernel == "fused_linear_cross_entropy":
            width, vocabulary = sizes["H"], sizes["V"]
            nbytes = 2 * (2 * x * width + 2 * width * vocabulary)
            use = KernelUse(kernel, variant, "bf16", (x,), 6 * x * width * vocabulary, nbytes)
            yield kernel_point(use, times["full"])
        else:
            elements = x * sizes["B"] * sizes.get("T", sizes.get("S"))
            moved = (2 if variant == "fused" else 1) * elements, 2 * elements
            yield from _both("cross_entropy", variant, elements, moved, (forward_s, backward_s))


def backwards(gpu: str) -> Iterator[Point]:
    """Yield backward passes of norms and SwiGLU of a GPU, as it is called in the tables."""
    for (kernel, provider, x, config), times in sorted(times_of(gpu).items()):
        sizes, seconds = json.loads(config), times["full"] - times["forward"]
        if seconds <= _LAUNCH_BOUND_S:
            continue
        tokens = sizes.get("B", 1) * sizes.get("S", 1)
        if (kernel, provider) == ("megatron_rms_norm", "torch"):
            yield kernel_point(uses_of(tokens, embed_dim=x)["rms_norm_backward"], seconds)
        elif (kernel, provider) == ("megatron_swiglu", "liger"):
            yield kernel_point(uses_of(tokens, ffn_dim=x)["swiglu_backward"], seconds)


def _both(
    kernel: str, variant: str, elements: int, moved: tuple[int, int], seconds: tuple[float, float]
) -> Iterator[Point]:
    """Yield both passes of a kernel in fp32, which move so many elements and take so long."""
    for name, amount, taken_s in zip((kernel, f"{kernel}_backward"), moved, seconds, strict=True):
        if taken_s > 0:
            yield kernel_point(KernelUse(name, variant, "fp32", (elements,), 0, 4 * amount), taken_s)


def times_of(gpu: str) -> dict[tuple[str, str, int, str], _Times]:
    """Return the times of Liger's benchmarks on a GPU by kernel, provider, size and the other sizes."""
    found: dict[tuple[str, str, int, str], _Times] = defaultdict(dict)
    for row in rows("embedding_loss_kernels"):
        if row["gpu"] == gpu and row["metric"] == "speed":
            key = row["kernel"], row["provider"], int(row["x_value"]), row["config"]
            found[key][row["mode"]] = float(row["y_50"]) / 1e3
    for row in rows("norm_swiglu_ce_kernels"):
        if row["gpu_name"] == gpu:
            config = row["extra_benchmark_config_str"]
            key = row["kernel_name"], row["kernel_provider"], int(row["x_value"]), config
            found[key][row["kernel_operation_mode"]] = float(row["y_value_50"]) / 1e3
    return {key: times for key, times in found.items() if {"forward", "full"} <= times.keys()}
