"""Which kernels an op stands for, with their shapes, FLOPs, bytes and workspace.

Both players read it: the cost model looks these kernels up, the calibration times them, the runtime runs them.
``hbm_bytes`` is the traffic that no implementation can avoid (every operand once); what an implementation moves beyond
that is part of its measured efficiency.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, assert_never

from sim.schedule.ir import Program
from sim.schedule.masks import FULL, Band, Span, count_pairs
from sim.schedule.ops import Accumulate, Attend, AttendBackward, Copy, Kernel, Merge
from sim.workload import DTYPE_BYTES, Dtype


class KernelUse(NamedTuple):
    """One kernel on operands of one shape."""

    kernel: str
    """attention_forward, attention_backward, merge, accumulate or copy."""
    variant: str
    """What selects another implementation: the mask of attention; empty otherwise."""
    dtype: Dtype
    shape: tuple[int, ...]
    """attention: (batch, queries, keys, heads, kv heads, head dim); others: (elements,)."""
    flops: int
    hbm_bytes: int
    workspace_bytes: int = 0


ATTENTION_KERNELS = ("attention_forward", "attention_backward")


def kernel_uses(program: Program) -> list[KernelUse | None]:
    """Return per op of a program the kernel that it runs; None for communication and synchronisation."""
    return [kernel_use(op, program) if isinstance(op, Kernel) else None for op in program.ops]


def kernel_use(op: Kernel, program: Program) -> KernelUse:
    """Return the kernel that an op runs."""
    if isinstance(op, Attend | AttendBackward):
        backward = isinstance(op, AttendBackward)
        return attention_use(backward, program.dtype(op.q), op.q.shape, op.k.shape[1], op.k.shape[2], op.band)
    if isinstance(op, Merge):
        elements = math.prod(op.out.shape)
        moved = program.nbytes(op.out) + program.nbytes(op.lse) + 2 * (
            program.nbytes(op.into_out) + program.nbytes(op.into_lse)
        )  # fmt: skip
        return KernelUse("merge", "", program.dtype(op.out), (elements,), 3 * elements, moved)
    if isinstance(op, Accumulate):
        elements = math.prod(op.source.shape)
        moved = program.nbytes(op.source) + 2 * program.nbytes(op.into)
        return KernelUse("accumulate", "", program.dtype(op.source), (elements,), elements, moved)
    if isinstance(op, Copy):
        elements = math.prod(op.source.view.shape)
        moved = program.nbytes(op.source.view) + program.nbytes(op.target.view)
        return KernelUse("copy", "", program.dtype(op.source.view), (elements,), 0, moved)
    assert_never(op)


@lru_cache(maxsize=4096)
def attention_use(
    backward: bool, dtype: Dtype, q_shape: tuple[int, ...], num_keys: int, kv_heads: int, band: Band
) -> KernelUse:
    """Return the attention kernel for q of shape (B, S_q, H, D) and keys (B, S_k, H_kv, D).

    Forward 4*D FLOPs per kept pair and head (two matmuls), backward 10*D (five, one of them recomputes the scores;
    arXiv:2307.08691 §4.1). The backward workspace is flash-attention's: delta in fp32, and dq summed in fp32 where the
    model's type is narrower (flash_attn 2.8 csrc/flash_attn/flash_api.cpp: dq_accum).
    """
    batch, queries, heads, head_dim = q_shape
    pairs = count_pairs(band, Span(0, queries), Span(0, num_keys)) * batch * heads
    size = DTYPE_BYTES[dtype]
    q_bytes = math.prod(q_shape) * size
    kv_bytes = 2 * batch * num_keys * kv_heads * head_dim * size
    lse_bytes = batch * heads * queries * max(4, size)
    shape = (batch, queries, num_keys, heads, kv_heads, head_dim)
    variant = mask_variant(band)
    if not backward:
        moved = 2 * q_bytes + kv_bytes + lse_bytes
        return KernelUse("attention_forward", variant, dtype, shape, 4 * head_dim * pairs, moved)
    moved = 4 * q_bytes + 2 * kv_bytes + lse_bytes
    dq_sum = math.prod(q_shape) * 4 if size < 4 else 0
    return KernelUse("attention_backward", variant, dtype, shape, 10 * head_dim * pairs, moved, lse_bytes + dq_sum)


def mask_variant(band: Band) -> str:
    """Return which implementation of attention a band needs: full, causal (top-left), or masked for all others."""
    if band == FULL:
        return "full"
    return "causal" if band == Band(right=0) else "masked"
