"""Attention to several parts of a block by variable-length kernels: one launch for all that share a kind of mask.

Such a kernel takes queries and keys of all parts, one behind the other, and where each ends (``cu_seqlens``). Where
parts leave out rows of a block, or share some, their rows are gathered first. Parts that share queries go into launches
that follow each other forward, whose results are merged; backward their gradients are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch

from runtime.execution.ops.attention import Backward, Forward, Saved, merge
from sim.schedule.ir.masks import DocumentBlock, Span

Tensor = torch.Tensor
Window = TypeVar("Window", bound=Hashable)
ALIGNED_BYTES = 16
"""What operands of attention kernels are aligned to: their widest loads."""


class Segments(NamedTuple):
    """Parts of one launch, one behind the other."""

    rows: Tensor | None
    """(T_q,): which rows of all sequences of the batch; None for all of them in order."""
    columns: Tensor | None
    """(T_k,)"""
    row_ends: Tensor
    """(parts + 1,) int32: 0, and where the queries of each part end."""
    column_ends: Tensor
    most_rows: int
    most_columns: int


ForwardLaunch = Callable[[Tensor, Tensor, Tensor, Segments, Window], tuple[Tensor, Tensor]]
"""Of q (T_q, H, D) and k, v (T_k, H_kv, D) out like q and lse (H, T_q)."""
BackwardLaunch = Callable[[Saved, Tensor, Segments, Window], Backward]


def varlen_forward(
    launch: ForwardLaunch[Window],
    window: Callable[[DocumentBlock], Window],
    operands: tuple[Tensor, Tensor, Tensor],
    parts: tuple[DocumentBlock, ...],
) -> Forward:
    """Return out (B, S_q, H, D) and lse (B, H, S_q); a query that no part has gets out 0 and lse -inf."""
    q, k, v = operands
    batch, queries, heads, _ = q.shape
    groups = _launches(parts, window, apart=True)
    direct = apart([part.rows for part in parts])
    out = torch.zeros_like(q, dtype=q.dtype if direct else torch.float32).flatten(0, 1)
    lse = q.new_full((heads, batch * queries), -math.inf, dtype=torch.float32)
    for kind, group in groups:
        at = _segments(tuple(group), batch, queries, k.shape[1], q.device)
        some = launch(_taken(q, at.rows), _taken(k, at.columns), _taken(v, at.columns), at, kind)
        where = slice(None) if at.rows is None else at.rows
        if direct:
            out[where], lse[:, where] = some
            continue
        sum_out, sum_lse = out[where][None], lse[:, where][None]
        merge(some[0][None], some[1][None], sum_out, sum_lse)
        out[where], lse[:, where] = sum_out[0], sum_lse[0]
    return Forward(out.to(q.dtype).view_as(q), lse.view(heads, batch, queries).transpose(0, 1).contiguous())


def varlen_backward(
    launch: BackwardLaunch[Window],
    window: Callable[[DocumentBlock], Window],
    saved: Saved,
    dout: Tensor,
    parts: tuple[DocumentBlock, ...],
) -> Backward:
    """Return the gradients; out and lse are over all keys."""
    q, k, v, out, lse = saved
    batch, queries, heads, _ = q.shape
    groups = _launches(parts, window, apart=False)
    once = [apart(spans) for spans in ([part.rows for part in parts], [part.columns for part in parts])]
    sums = [
        torch.zeros_like(like, dtype=like.dtype if alone else torch.float32).flatten(0, 1)
        for like, alone in ((q, once[0]), (k, once[1]), (v, once[1]))
    ]
    flat_lse = lse.transpose(0, 1).reshape(heads, batch * queries)
    for kind, group in groups:
        at = _segments(tuple(group), batch, queries, k.shape[1], q.device)
        some_q, some_out, some_dout = (_taken(tensor, at.rows) for tensor in (q, out, dout))
        some_k, some_v = (_taken(tensor, at.columns) for tensor in (k, v))
        some_lse = packed(flat_lse if at.rows is None else flat_lse[:, at.rows])
        grads = launch((some_q, some_k, some_v, some_out, some_lse), some_dout, at, kind)
        for total, where, grad in zip(sums, (at.rows, at.columns, at.columns), grads, strict=True):
            total.add_(grad) if where is None else total.index_add_(0, where, grad.to(total.dtype))
    return Backward(*(total.to(like.dtype).view_as(like) for total, like in zip(sums, (q, k, v), strict=True)))


def _launches(
    parts: Sequence[DocumentBlock], window: Callable[[DocumentBlock], Window], *, apart: bool
) -> list[tuple[Window, list[DocumentBlock]]]:
    """Return the parts of each launch: of one kind of mask, and, if ``apart``, without a query in common."""
    found: list[tuple[Window, list[DocumentBlock]]] = []
    for part in sorted(parts, key=lambda part: part[:2]):
        kind = window(part)
        for other, group in found:
            if other == kind and not (apart and group[-1].rows.stop > part.rows.start):
                group.append(part)
                break
        else:
            found.append((kind, [part]))
    return found


@lru_cache(maxsize=1024)
def _segments(parts: tuple[DocumentBlock, ...], batch: int, queries: int, keys: int, device: torch.device) -> Segments:
    """Return parts of every sequence of a batch on a device; sending them there anew would make the host wait."""
    sides = []
    for spans, size in (([part.rows for part in parts], queries), ([part.columns for part in parts], keys)):
        moved = [span.moved(number * size) for number in range(batch) for span in spans]
        ends = [0, *accumulate(span.size for span in moved)]
        whole = [*(span.start for span in moved), batch * size] == ends
        index = None if whole else torch.cat([torch.arange(span.start, span.stop) for span in moved]).to(device)
        ends_there = torch.tensor(ends, dtype=torch.int32, device=device)
        sides.append((index, ends_there, max(span.size for span in spans)))
    (rows, row_ends, most_rows), (columns, column_ends, most_columns) = sides
    return Segments(rows, columns, row_ends, column_ends, most_rows, most_columns)


def packed(tensor: Tensor) -> Tensor:
    """Return a tensor for a kernel that is not known to take strides: contiguous, and aligned to 16 bytes. It is a copy
    where it has to be.
    """
    if tensor.storage_offset() * tensor.itemsize % ALIGNED_BYTES:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


def _taken(tensor: Tensor, which: Tensor | None) -> Tensor:
    """Return some rows of (B, S, H, D), as (T, H, D)."""
    flat = tensor.flatten(0, 1)
    return flat.contiguous() if which is None else flat.index_select(0, which)


def apart(spans: Sequence[Span]) -> bool:
    """Return whether no two share a position."""
    in_order = sorted(spans)
    reach = accumulate((span.stop for span in in_order), max)
    return all(stop <= after.start for stop, after in zip(reach, in_order[1:], strict=False))
