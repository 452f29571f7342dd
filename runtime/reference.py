"""Attention on one process in fp64, written out with plain matmuls: what every executed schedule is held against."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sim.schedule.masks import Band

Tensor = torch.Tensor


class Reference(NamedTuple):
    """Global tensors in fp64. out, dq: (B, S, H, D); dk, dv: (B, S, H_kv, D); lse: (B, H, S)."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, band: Band) -> Reference:
    """Return attention of q (B, S_q, H, D) to k, v (B, S_k, H_kv, D) and, if dout is given, its gradients.

    One sequence and one head at a time, so that only one S_q x S_k matrix exists at once.
    """
    group = q.shape[2] // k.shape[2]
    out, lse = torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1])
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    keep = _kept(band, q.shape[1], k.shape[1])
    scale = q.shape[-1] ** -0.5
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            g = h // group
            scores = (q[b, :, h] @ k[b, :, g].T * scale).masked_fill_(~keep, -torch.inf)
            lse[b, h] = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - lse[b, h, :, None]).masked_fill_(~keep, 0.0)
            out[b, :, h] = weights @ v[b, :, g]
            if dout is not None:
                do = dout[b, :, h]
                dv[b, :, g] += weights.T @ do
                delta = (do * out[b, :, h]).sum(dim=-1, keepdim=True)
                ds = weights * (do @ v[b, :, g].T - delta) * scale
                dq[b, :, h] = ds @ k[b, :, g]
                dk[b, :, g] += ds.T @ q[b, :, h]
    return Reference(out, lse, dq, dk, dv)


def _kept(band: Band, num_queries: int, num_keys: int) -> Tensor:
    """Return which (query, key) pairs a band keeps."""
    rows, columns = torch.arange(num_queries)[:, None], torch.arange(num_keys)[None, :]
    keep = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if band.right is not None:
        keep &= columns <= rows + band.right
    if band.left is not None:
        keep &= columns >= rows - band.left
    return keep


def relative_error(value: Tensor, exact: Tensor, whole: Tensor | None = None) -> float:
    """Return the largest deviation from ``exact``, relative to the largest magnitude of the tensor it is a part of (or
    absolute, if that tensor is all zero).
    """
    scale = float((exact if whole is None else whole).abs().max())
    return float((value.double() - exact).abs().max()) / (scale or 1.0)
