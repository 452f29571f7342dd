"""Attention to several parts of one block of queries and keys: documents that lie one behind the other, or any
rectangles without a pair in common.

Flash attention on GPUs takes them in few launches (``varlen``); of others a kernel is called for each part. A query
without keys has out 0 and lse -inf, a key without queries gradients of zero. Where parts share queries or keys, results
are merged and summed in fp32 or wider.
"""

from __future__ import annotations

import math

import torch

from runtime.execution.ops.attention import AttentionKernel, Backward, Forward, PartsKernel, Saved, merge
from runtime.execution.ops.varlen import apart
from sim.schedule.ir.masks import DocumentBlock, Span

Tensor = torch.Tensor


def packed_forward(
    kernel: AttentionKernel, operands: tuple[Tensor, Tensor, Tensor], parts: tuple[DocumentBlock, ...]
) -> Forward:
    """Return out (B, S_q, H, D) and lse (B, H, S_q) of q (B, S_q, H, D) and k, v (B, S_k, H_kv, D)."""
    if isinstance(kernel, PartsKernel):
        return kernel.forward_parts(operands, parts)
    q, k, v = operands
    wide = torch.promote_types(q.dtype, torch.float32)
    alone = apart([part.rows for part in parts])
    out = torch.zeros_like(q, dtype=q.dtype if alone else wide)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=wide)
    for part in parts:
        rows, columns = _slice(part.rows), _slice(part.columns)
        found = kernel.forward(q[:, rows], k[:, columns], v[:, columns], part.band)
        if alone:
            out[:, rows], lse[:, :, rows] = found
        else:
            merge(found.out, found.lse, out[:, rows], lse[:, :, rows])
    return Forward(out.to(q.dtype), lse)


def packed_backward(kernel: AttentionKernel, saved: Saved, dout: Tensor, parts: tuple[DocumentBlock, ...]) -> Backward:
    """Return the gradients; out and lse are over all keys."""
    if isinstance(kernel, PartsKernel):
        return kernel.backward_parts(saved, dout, parts)
    q, k, v, out, lse = saved
    sides = ([part.rows for part in parts], *([[part.columns for part in parts]] * 2))
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = [
        torch.zeros_like(like, dtype=like.dtype if apart(spans) else wide)
        for like, spans in zip((q, k, v), sides, strict=True)
    ]
    for part in parts:
        rows, columns = _slice(part.rows), _slice(part.columns)
        of_part = (q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, :, rows])
        for total, some, grad in zip(
            sums, (rows, columns, columns), kernel.backward(of_part, dout[:, rows], part.band), strict=True
        ):
            total[:, some] += grad
    return Backward(*(total.to(like.dtype) for total, like in zip(sums, (q, k, v), strict=True)))


def _slice(span: Span) -> slice:
    return slice(span.start, span.stop)
