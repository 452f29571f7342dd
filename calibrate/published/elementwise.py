"""How far elementwise kernels of eager modules stay below the memory's rate, from times of whole modules.

Their bytes are counted (``sim/software/counted``). Those that read several elements at a time are taken to reach the
rate of other kernels. The rest of a module's time is that of kernels that read one element at a time. What kernels take
beside their bytes (``queued``) is below 1 % of these times, and not taken off.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import geometric_mean
from typing import NamedTuple

from calibrate.published.losses import times_of
from sim.schedule.derive.kernels import SCATTERED
from sim.software.counted import Kernel, Part, amount, load_counted

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
SOURCES = {
    f"elementwise.{SCATTERED}": "linkedin/Liger-Kernel benchmark/data: norm and rotary embedding of transformers' "
    "Llama on A100 (0.2.1), torch's SwiGLU of one product on H100 (@ead96b61), taken for later GPUs, too; "
    "geometric mean of the passes, at the largest size",
    "elementwise._log_softmax": "linkedin/Liger-Kernel 0.2.1 benchmark/data: torch's cross-entropy of 32K classes and "
    "more on A100, taken for all: rows that no SM holds are read several times (ATen/native/cuda/SoftMax.cu)",
}
_MANY = 32768
"""Classes from which on rows do not fit the caches of an SM."""


class _Timed(NamedTuple):
    """A pass of a module."""

    kernels: tuple[Kernel, ...]
    slow: str
    """Mark, or name, of the kernels that take what is left."""
    sizes: dict[str, int]
    seconds: float


class _Module(NamedTuple):
    part: Part
    sizes: dict[str, int]
    seconds: dict[str, float]
    """By pass: forward, and full."""


def scattered(bytes_per_s: float, gpu: str) -> dict[str, float]:
    """Return, by their mark, how many times as long as their bytes at a rate kernels take that read one element at a
    time, on a GPU of the tables.
    """
    return _longer(bytes_per_s, _modules(gpu))


def log_softmax(bytes_per_s: float) -> dict[str, float]:
    """Return the same of the kernels of torch's cross-entropy, by name, given the rate of an A100."""
    return _longer(bytes_per_s, _losses())


def _longer(bytes_per_s: float, passes: Iterable[_Timed]) -> dict[str, float]:
    found = defaultdict(list)
    for timed in passes:
        moved = {True: 0.0, False: 0.0}
        for one in timed.kernels:
            slow = one.kernel == timed.slow or (timed.slow == SCATTERED and one.one_by_one)
            moved[slow] += one.launches * (amount(one.reads, timed.sizes) + amount(one.writes, timed.sizes))
        found[timed.slow].append((timed.seconds * bytes_per_s - moved[False]) / moved[True])
    return {slow: round(geometric_mean(of), 2) for slow, of in found.items()}


def _modules(gpu: str) -> Iterator[_Timed]:
    """Yield passes of modules with kernels that read one element at a time, each at its largest size."""
    llama, mlp = load_counted("transformers-llama"), load_counted("nanotron").part("mlp")
    largest = dict(sorted(times_of(gpu).items(), key=lambda one: one[0][2]))
    of_module = {
        (kernel, provider): (x, json.loads(config), of) for (kernel, provider, x, config), of in largest.items()
    }
    if gpu == A100:
        x, other, of = of_module["rms_norm", "huggingface"]
        norm = _Module(llama.part("norm"), {"tokens": other["M"], "hidden": x}, of)
        x, other, of = of_module["rope", "huggingface"]
        heads, kv_heads = other["num_q_heads"], other["num_kv_heads"]
        of_heads = {"heads": heads, "kv_heads": kv_heads, "head_dim": other["hidden_size"] // heads}
        modules = [norm, _Module(llama.part("rotary"), {"tokens": x, "sequence": x} | of_heads, of)]
    else:
        x, other, of = of_module["megatron_swiglu", "torch"]
        modules = [_Module(mlp, {"tokens": other["S"] * other["B"], "ffn": x, "hidden": 0}, of)]
    for part, sizes, seconds in modules:
        yield _Timed(part.forward.kernels, SCATTERED, sizes, seconds["forward"])
        yield _Timed(part.backward.kernels, SCATTERED, sizes, seconds["full"] - seconds["forward"])


def _losses() -> Iterator[_Timed]:
    """Yield passes of torch's cross-entropy of fp32 logits of many classes, which has no casts."""
    loss = load_counted("torch-losses").part("loss")
    forward, backward = (
        tuple(one for one in of.kernels if one.kernel != "_to_copy") for of in (loss.forward, loss.backward)
    )
    for (kernel, provider, classes, config), seconds in times_of(A100).items():
        if (kernel, provider) == ("cross_entropy", "huggingface") and classes >= _MANY:
            other = json.loads(config)
            sizes = {"tokens": other["B"] * other["T"], "vocab": classes}
            yield _Timed(forward, "_log_softmax", sizes, seconds["forward"])
            yield _Timed(backward, "_log_softmax_backward_data", sizes, seconds["full"] - seconds["forward"])
