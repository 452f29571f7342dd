"""Kernels at both ends of a model: rows of an embedding, and the cross-entropy of shares of the vocabulary."""

from __future__ import annotations

from itertools import chain
from typing import assert_never

import torch
from msgspec import UNSET

from runtime.execution.ops.matrices import matrices
from runtime.execution.tensors import Storage
from sim.schedule.derive.workspace import LOSS_ROWS
from sim.schedule.ir.ops import (
    NO_LABEL,
    CrossEntropy,
    Embed,
    EmbedBackward,
    EndKernel,
    ExpSum,
    LargestLogit,
    LogitKernel,
    LogitLoss,
)

Tensor = torch.Tensor


def run_end_kernel(op: EndKernel, storage: Storage) -> str:
    """Run a kernel at an end of a model; return the name of the implementation."""
    given = [storage.read(view) for view in op.reads]
    if isinstance(op, EmbedBackward):
        storage.put(op.dtable, embed_backward(op, *given))
        return "aten embedding dense backward"
    results = [storage.write(view) for view in op.writes]
    if isinstance(op, CrossEntropy):
        bent = (op.scale or 1.0, op.softcap or None)
        return cross_entropy(results[0], given[1], results[1], op.count, *bent, eager=op.eager is True)
    if isinstance(op, LogitKernel):
        return run_logit_kernel(op, given, results)
    if isinstance(op, Embed):
        ((ids, out),) = matrices(given[1], results[0])
        return embed(op, given[0], ids.squeeze(-1), out)
    assert_never(op)


def embed(op: Embed, table: Tensor, ids: Tensor, out: Tensor) -> str:
    """Put rows of a table (V, E) into out (tokens, E); return the name of the implementation."""
    if op.first is UNSET:
        torch.index_select(table, 0, ids, out=out)
        return "aten index_select"
    of_share = _of_share(ids, op.first, len(table), other=0)
    torch.index_select(table, 0, of_share, out=out)
    out.masked_fill_((ids != of_share + op.first).unsqueeze(-1), 0)
    return "aten index_select, masked_fill_"


def embed_backward(op: EmbedBackward, dout: Tensor, ids: Tensor) -> Tensor:
    """Return the gradient of a table, or of a share of its rows: what other tokens have goes to a row behind these."""
    rows = op.dtable.shape[0]
    if op.first is UNSET:
        return torch.ops.aten.embedding_dense_backward(dout, ids, rows, -1, False)
    of_share = _of_share(ids, op.first, rows, other=rows)
    return torch.ops.aten.embedding_dense_backward(dout, of_share, rows + 1, rows, False)[:rows]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    loss: Tensor,
    count: int,
    scale: float = 1.0,
    softcap: float | None = None,
    *,
    eager: bool = False,
) -> str:
    """Fill loss (B, S), and put in place of logits (B, S, V) the gradient of its mean over ``count`` tokens, some rows
    at a time; or, eager, of all rows at once by the derivatives that autograd would run.
    """
    pieces = matrices(logits, labels, loss)
    size = labels.numel() if eager else LOSS_ROWS
    rows = (zip(*(of.split(size) for of in piece), strict=True) for piece in pieces)
    for row, label, out in chain.from_iterable(rows):
        label, out = label.squeeze(-1), out.squeeze(-1)  # noqa: PLW2901 - matrices of one column
        has = label != NO_LABEL
        index = label.clamp(min=0).unsqueeze(-1)
        row = row if scale == 1 else row.mul_(scale)  # noqa: PLW2901 - the same rows
        bent = row if softcap is None else row.div_(softcap).tanh_() * softcap
        found = torch.log_softmax(bent, dim=-1, dtype=loss.dtype)
        torch.mul(found.gather(-1, index).squeeze(-1), has, out=out).neg_()
        if eager:
            of_found = torch.zeros_like(found).scatter_(-1, index, -1.0)
            gradient = torch.ops.aten._log_softmax_backward_data(of_found, found, -1, found.dtype)  # noqa: SLF001
            del of_found
        else:
            gradient = found.exp_().scatter_add_(-1, index, found.new_full(index.shape, -1.0))
        if softcap is not None:
            gradient.mul_(row.square_().neg_().add_(1))
        gradient = gradient if scale == 1 else gradient.mul_(scale)
        row.copy_(gradient.mul_(has.to(loss.dtype).div_(count).unsqueeze(-1)))
        del bent, found, gradient, has, index  # or they outlive the next ones' making
    how = "zeros, scatter, log_softmax_backward" if eager else "exp, scatter_add, 2 mul"
    return f"eager cross-entropy in place (log_softmax, gather, {how}, div)"


def run_logit_kernel(op: LogitKernel, given: list[Tensor], results: list[Tensor]) -> str:
    """Run a kernel of a share of the vocabulary, some rows at a time, bent logits in the data type of sums."""
    if op.eager:
        for logits, *others in matrices(*given, *results):
            _run_as_loss_parallel(op, logits, [one.squeeze(-1) for one in others])
        return "eager cross-entropy of a share of the vocabulary, as torch's loss_parallel"
    pieces = ([one.split(LOSS_ROWS) for one in piece] for piece in matrices(*given, *results))
    for logits, *others in chain.from_iterable(zip(*piece, strict=True) for piece in pieces):
        columns = [one.squeeze(-1) for one in others]
        wide = columns[-1].dtype
        bent, slope = _bent(logits.to(wide, copy=True), op)
        if isinstance(op, LargestLogit):
            torch.amax(bent, dim=-1, out=columns[0])
            continue
        top, labels = columns[0], columns[1 if isinstance(op, ExpSum) else 3]
        bent.sub_(top.unsqueeze(-1))
        column = _of_share(labels, op.first, bent.shape[1], other=0)
        here = labels == column + op.first
        if isinstance(op, ExpSum):
            *_, sums, target = columns
            torch.mul(bent.gather(-1, column.unsqueeze(-1)).squeeze(-1), here, out=target)
            torch.sum(bent.exp_(), dim=-1, out=sums)
            continue
        _, sums, target, *_, loss = columns
        has = labels != NO_LABEL
        torch.mul(sums.log() - target, has, out=loss)
        bent.exp_().div_(sums.unsqueeze(-1)).scatter_add_(-1, column.unsqueeze(-1), -here.to(wide).unsqueeze(-1))
        logits.copy_(bent.mul_(slope).mul_(has.to(wide).div_(op.count).unsqueeze(-1)))
    return "eager cross-entropy of a share of the vocabulary"


def _run_as_loss_parallel(op: LogitKernel, logits: Tensor, columns: list[Tensor]) -> None:
    """Run a kernel's part of torch's loss_parallel, of all rows (torch 2.13 distributed/tensor/parallel/loss.py)."""
    wide, top = columns[-1].dtype, columns[0].unsqueeze(-1)
    bent, slope = _bent(logits.to(wide, copy=True), op)
    if isinstance(op, LargestLogit):
        torch.amax(bent, dim=-1, out=columns[0])
        return
    labels = columns[1 if isinstance(op, ExpSum) else 3]
    column = _of_share(labels, op.first, bent.shape[1], other=0)
    here = labels == column + op.first
    if isinstance(op, ExpSum):
        *_, sums, target = columns
        shifted = bent - top
        torch.mul(shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1), here, out=target)
        torch.sum(shifted.exp(), dim=-1, out=sums)
        return
    _, sums, target, *_, loss = columns
    has, logarithm = labels != NO_LABEL, sums.log()
    torch.mul(logarithm - target, has, out=loss)
    found = bent.sub_(top).sub_(logarithm.unsqueeze(-1))
    of_label = torch.zeros_like(found).scatter_(-1, column.unsqueeze(-1), -here.to(wide).unsqueeze(-1))
    each = has.to(wide).div_(op.count).unsqueeze(-1)
    logits.copy_(((of_label + found.exp()) * each).mul_(slope))


def _bent(logits: Tensor, op: LogitKernel) -> tuple[Tensor, Tensor | float]:
    """Return logits scaled and bent by tanh, in their place, and for a loss the derivative of that."""
    scale, softcap = op.scale or 1.0, op.softcap or None
    logits.mul_(scale)
    if softcap is None:
        return logits, scale
    turned = logits.div_(softcap).tanh_()
    slope = turned.square().neg_().add_(1).mul_(scale) if isinstance(op, LogitLoss) else scale
    return turned.mul_(softcap), slope


def _of_share(ids: Tensor, first: int, size: int, other: int) -> Tensor:
    """Return ids as those of a share of the vocabulary, ``size`` ids from ``first`` on; ``other`` for all others."""
    moved = ids - first
    return moved.masked_fill_((moved < 0) | (moved >= size), other)
