"""Attention to several documents that lie one behind the other, and to blocks of keys that blocks of queries keep.

A kernel is called for each document, and for each run of blocks: what a variable-length or block-sparse kernel does in
one launch. A query without keys has out 0 and lse -inf, a key without queries gradients of zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from runtime.execution.attention import AttentionKernel, Backward, Forward, Saved, merge
from sim.schedule.ir.masks import Band, DocumentBlock, RowBlock, Span, count_pairs

Tensor = torch.Tensor


def packed_forward(
    kernel: AttentionKernel, operands: tuple[Tensor, Tensor, Tensor], parts: tuple[DocumentBlock, ...]
) -> Forward:
    """Return out (B, S_q, H, D) and lse (B, H, S_q) of q (B, S_q, H, D) and k, v (B, S_k, H_kv, D)."""
    q, k, v = operands
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(q), q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=wide)
    for part, rows, columns in _places(parts):
        out[:, rows], lse[:, :, rows] = kernel.forward(q[:, rows], k[:, columns], v[:, columns], part.band)
    return Forward(out, lse)


def packed_backward(kernel: AttentionKernel, saved: Saved, dout: Tensor, parts: tuple[DocumentBlock, ...]) -> Backward:
    """Return the gradients; out and lse are over all keys."""
    q, k, v, out, lse = saved
    grads = Backward(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    for part, rows, columns in _places(parts):
        of_part = (q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, :, rows])
        dq, dk, dv = kernel.backward(of_part, dout[:, rows], part.band)
        grads.dq[:, rows], grads.dk[:, columns], grads.dv[:, columns] = dq, dk, dv
    return grads


def sparse_forward(
    kernel: AttentionKernel, operands: tuple[Tensor, Tensor, Tensor], parts: tuple[RowBlock, ...]
) -> Forward:
    """Return out and lse as ``packed_forward``; what runs of one block of queries give is merged in the data type of
    sums.
    """
    q, k, v = operands
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, dtype=wide)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=wide)
    for rows, columns, band in _runs(parts):
        found = kernel.forward(q[:, rows], k[:, columns], v[:, columns], band)
        merge(found.out.to(wide), found.lse, out[:, rows], lse[:, :, rows])
    return Forward(out.to(q.dtype), lse)


def sparse_backward(kernel: AttentionKernel, saved: Saved, dout: Tensor, parts: tuple[RowBlock, ...]) -> Backward:
    """Return the gradients, summed over runs in the data type of sums; out and lse are over all keys."""
    q, k, v, out, lse = saved
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(tensor, dtype=wide) for tensor in (q, k, v))
    for rows, columns, band in _runs(parts):
        of_run = (q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, :, rows])
        found = kernel.backward(of_run, dout[:, rows], band)
        dq[:, rows] += found.dq
        dk[:, columns] += found.dk
        dv[:, columns] += found.dv
    return Backward(dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype))


def _runs(parts: tuple[RowBlock, ...]) -> Iterator[tuple[slice, slice, Band]]:
    """Yield where the rows and columns of each run lie, and its band."""
    row = 0
    for part in parts:
        for run in part.runs:
            yield slice(row, row + part.rows), slice(run.start, run.start + run.columns), run.band
        row += part.rows


def _places(parts: tuple[DocumentBlock, ...]) -> Iterator[tuple[DocumentBlock, slice, slice]]:
    """Yield the parts that keep something, and where their rows and columns lie."""
    row = column = 0
    for part in parts:
        if count_pairs(part.band, Span(0, part.rows), Span(0, part.columns)):
            yield part, slice(row, row + part.rows), slice(column, column + part.columns)
        row, column = row + part.rows, column + part.columns
