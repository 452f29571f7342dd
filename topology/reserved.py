"""What of a GPU's memory no buffer of a schedule can have: one constant, and what it consists of.

Stated before any step was held against measured memory. ``cluster.hbm.reserved_bytes`` overrides it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Basis = Literal["measured", "derived", "assumed"]
"""Measured: by others, on such a GPU; derived: from measured figures and the code; assumed: neither."""

_MIB = 2**20


class Part(NamedTuple):
    """A part of the constant, in bytes."""

    name: str
    nbytes: int
    within_bytes: int
    """How much more or less it may be."""
    basis: Basis
    source: str


DRIVER = Part(
    "driver",
    800 * _MIB,
    200 * _MIB,
    "derived",
    "what CUDA does not give of the memory that there is: torch finds 79.1 to 79.3 of 80 GiB on H100 (its "
    "out-of-memory messages, from memory), and nvidia-smi 143771 of 144384 MiB on H200",
)
PARTS = (
    DRIVER,
    Part(
        "context",
        800 * _MIB,
        200 * _MIB,
        "measured",
        "CUDA context with the kernels that are loaded: 551 MB, ai-dynamo/aiconfigurator-core 0.12.0 (PyPI) "
        "systems/h100_sxm.yaml, other_mem; more for modules of attention and two cuBLAS workspaces of 32 MiB (torch "
        "aten/src/ATen/cuda/CublasHandlePool.cpp, from memory)",
    ),
    Part(
        "NCCL",
        1000 * _MIB,
        600 * _MIB,
        "derived",
        "buffers of communicators: 392 MiB for each of 8 GPUs, ai-dynamo/aiconfigurator-core 0.12.0 systems/"
        "h100_sxm.yaml, nccl_mem, for one that sums; 4 MiB + 4.7 MiB + 0.5 MiB a channel and peer by protocol "
        "(NCCL_BUFFSIZE, NCCL User Guide, and src/include/device.h, from memory), so 260 MiB for one of all-to-alls, "
        "150 MiB for a ring; a step has two or three",
    ),
    Part(
        "allocator",
        400 * _MIB,
        400 * _MIB,
        "assumed",
        "fragmentation and rounding of torch's caching allocator with expandable segments, whose pages are of 2 and "
        "20 MiB; without them it took 2 to 10 GB at 58.8 GB allocated (NVIDIA-NeMo/Megatron-Bridge@067f987 "
        "skills/nemo-mbridge-perf-memory-tuning/card.yaml)",
    ),
)


FRAGMENTED = 10 / 58.8
"""What torch's caching allocator may hold more than is allocated, as a share of that, without expandable segments: see
``allocator``."""


def held_by_allocator(allocated: int, *, expandable: bool) -> tuple[int, int]:
    """Return the least and the most bytes that logs show as reserved (``max_memory_reserved`` of torch) where so many
    are allocated (``max_memory_allocated``), with expandable segments or without.
    """
    (part,) = (one for one in PARTS if one.name == "allocator")
    most = part.nbytes + part.within_bytes
    return allocated, allocated + (most if expandable else max(most, round(FRAGMENTED * allocated)))


class Reserved(NamedTuple):
    """Bytes of a device's memory that buffers cannot have, and how many more or fewer it may be."""

    nbytes: int
    within_bytes: int


def _together(parts: tuple[Part, ...]) -> Reserved:
    """Return the sum of some parts, which may all err to one side."""
    return Reserved(sum(part.nbytes for part in parts), sum(part.within_bytes for part in parts))


BESIDE_ALLOCATOR = tuple(part for part in PARTS if part.name != "allocator")
"""What is left where it is walked what the allocator reserves."""
OF_CUDA, OF_CUDA_BESIDE_ALLOCATOR = _together(PARTS), _together(BESIDE_ALLOCATOR)
"""Of one GPU."""
OF_CPU = Reserved(0, 0)
"""A process of a host has none that is known."""
