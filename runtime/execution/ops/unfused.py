"""Attention that is not fused: scores and probabilities pass through memory. The baselines that show the wall.

standard          all scores at once, the probabilities kept for the backward pass (arXiv:2205.14135 §3.1)
memory-efficient  chunk by chunk with an online softmax, recomputed in the backward pass (arXiv:2112.05682 §3)

Layouts as in ``runtime.execution.ops.attention``; inside, tensors are (B, H_kv, queries or group * queries, D).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.execution.ops.attention import Backward, Forward
from sim.schedule.derive.workspace import KEY_CHUNK, QUERY_CHUNK
from sim.schedule.ir.masks import Band

Tensor = torch.Tensor


class Standard(NamedTuple):
    """Output, log-sum-exp and the probabilities (B, H, S_q, S_k)."""

    out: Tensor
    lse: Tensor
    probs: Tensor


def standard_forward(q: Tensor, k: Tensor, v: Tensor, band: Band) -> Standard:
    """Return attention with all probabilities written out."""
    scores = _scores(q, k, band)
    lse = torch.logsumexp(scores, dim=-1)
    probs = scores.sub_(_finite(lse)[..., None]).exp_().to(q.dtype)
    return Standard(_rows(_grouped(probs, k.shape[2]) @ v.transpose(1, 2), q.shape[2]), lse, probs)


def standard_backward(q: Tensor, k: Tensor, v: Tensor, delta: Tensor, dout: Tensor, probs: Tensor) -> Backward:
    """Return the gradients from kept probabilities; delta: (B, H, S_q), sum of dout * out over the head dim."""
    kv_heads = k.shape[2]
    grouped = _grouped(dout.transpose(1, 2), kv_heads)
    dv = _grouped(probs, kv_heads).mT @ grouped
    dprobs = grouped @ v.transpose(1, 2).mT
    dscores = (dprobs - _grouped(delta[..., None].to(q.dtype), kv_heads)).mul_(_grouped(probs, kv_heads))
    dscores.mul_(q.shape[-1] ** -0.5)
    dq = _rows(dscores @ k.transpose(1, 2), q.shape[2])
    dk = dscores.mT @ _grouped(q.transpose(1, 2), kv_heads)
    return Backward(dq, dk.transpose(1, 2), dv.transpose(1, 2))


def chunked_forward(q: Tensor, k: Tensor, v: Tensor, band: Band) -> Forward:
    """Return attention by chunks of queries and keys: the running maximum, numerator and denominator of each."""
    outs, lses = [], []
    for row in range(0, q.shape[1], QUERY_CHUNK):
        some = q[:, row : row + QUERY_CHUNK]
        lse = torch.full((q.shape[0], q.shape[2], some.shape[1]), -torch.inf, dtype=_wide(q), device=q.device)
        out = torch.zeros(some.shape, dtype=_wide(q), device=q.device)
        for column in range(0, k.shape[1], KEY_CHUNK):
            keys = slice(column, column + KEY_CHUNK)
            part = standard_forward(some, k[:, keys], v[:, keys], _at(band, row, column))
            total = torch.logaddexp(lse, part.lse)
            old, new = ((one - _finite(total)).exp_().transpose(1, 2)[..., None] for one in (lse, part.lse))
            out = out.mul_(old).add_(part.out * new)
            lse = total
        outs.append(out.to(q.dtype))
        lses.append(lse)
    return Forward(torch.cat(outs, dim=1), torch.cat(lses, dim=2))


def chunked_backward(saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], dout: Tensor, band: Band) -> Backward:
    """Return the gradients chunk by chunk, with scores and probabilities computed again; ``saved`` is (q, k, v, delta,
    lse) with the last two (B, H, S_q).
    """
    q, k, v, delta, lse = saved
    dq, dk, dv = (torch.zeros(x.shape, dtype=_wide(q), device=q.device) for x in (q, k, v))
    for row in range(0, q.shape[1], QUERY_CHUNK):
        rows = slice(row, row + QUERY_CHUNK)
        for column in range(0, k.shape[1], KEY_CHUNK):
            keys = slice(column, column + KEY_CHUNK)
            scores = _scores(q[:, rows], k[:, keys], _at(band, row, column))
            probs = scores.sub_(_finite(lse[:, :, rows])[..., None]).exp_().to(q.dtype)
            part = standard_backward(q[:, rows], k[:, keys], v[:, keys], delta[:, :, rows], dout[:, rows], probs)
            dq[:, rows] += part.dq
            dk[:, keys] += part.dk
            dv[:, keys] += part.dv
    return Backward(dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype))


class Capped:
    """Attention whose scores are bent by tanh (arXiv:2408.00118 §2), written out: torch has no fused kernel for it."""

    name = "eager attention with a soft-cap"

    def __init__(self, cap: float) -> None:
        self._cap = cap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Forward:
        """See AttentionKernel."""
        scores = self._scores(q, k, band)
        lse = torch.logsumexp(scores, dim=-1)
        probs = scores.sub_(_finite(lse)[..., None]).exp_().to(q.dtype)
        return Forward(_rows(_grouped(probs, k.shape[2]) @ v.transpose(1, 2), q.shape[2]), lse)

    def backward(self, saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], dout: Tensor, band: Band) -> Backward:
        """See AttentionKernel: the slope of tanh is that of what has been bent."""
        q, k, v, out, lse = saved
        scores = self._scores(q, k, band)
        probs = (scores - _finite(lse)[..., None]).exp_().to(q.dtype)
        slope = 1 - scores.masked_fill_(scores == -torch.inf, 0.0).div_(self._cap).square_()
        delta = (out * dout).sum(dim=-1).transpose(1, 2)
        kv_heads = k.shape[2]
        grouped = _grouped(dout.transpose(1, 2), kv_heads)
        dprobs = (grouped @ v.transpose(1, 2).mT).view(probs.shape)
        dscores = _grouped((dprobs - delta[..., None]).mul_(probs).mul_(slope).mul_(q.shape[-1] ** -0.5), kv_heads)
        dscores = dscores.to(q.dtype)
        dq = _rows(dscores @ k.transpose(1, 2), q.shape[2])
        dk = dscores.mT @ _grouped(q.transpose(1, 2), kv_heads)
        dv = _grouped(probs, kv_heads).mT @ grouped
        return Backward(dq, dk.transpose(1, 2), dv.transpose(1, 2))

    def _scores(self, q: Tensor, k: Tensor, band: Band) -> Tensor:
        scores = _scores(q, k, Band())
        return scores.div_(self._cap).tanh_().mul_(self._cap).add_(_scores(torch.zeros_like(q), k, band))


def _at(band: Band, row: int, column: int) -> Band:
    """Return a band as a chunk sees it that begins at a row and a column."""
    left = None if band.left is None else band.left - row + column
    return Band(left, None if band.right is None else band.right + row - column)


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _finite(lse: Tensor) -> Tensor:
    """Return a log-sum-exp that can be subtracted where no key was seen: probabilities come out as 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Return (B, H, S, N) as (B, H_kv, group * S, N): the query heads of a key/value head below each other."""
    batch, heads, tokens, width = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * tokens, width)


def _rows(x: Tensor, heads: int) -> Tensor:
    """Return (B, H_kv, group * S, D) as (B, S, H, D)."""
    batch, _, _, dim = x.shape
    return x.reshape(batch, heads, -1, dim).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, band: Band) -> Tensor:
    """Return masked scores (B, H, S_q, S_k) in promote(data type, fp32)."""
    grouped = _grouped(q.transpose(1, 2), k.shape[2])
    scores = (grouped @ k.transpose(1, 2).mT).to(_wide(q)).reshape(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    scores = scores.mul_(q.shape[-1] ** -0.5)
    rows = torch.arange(q.shape[1], device=q.device)[:, None]
    columns = torch.arange(k.shape[1], device=q.device)[None, :]
    if band.right is not None:
        scores.masked_fill_(columns > rows + band.right, -torch.inf)
    if band.left is not None:
        scores.masked_fill_(columns < rows - band.left, -torch.inf)
    return scores
