"""Attention kernels with a log-sum-exp, behind one interface: forward and backward of one block. Here the CPU's, and
what all need; in ``cuda_attention`` those of GPUs; ``attention_choice`` chooses.

Layouts as in the ops: q, out, dout, dq (B, S_q, H, D); k, v, dk, dv (B, S_k, H_kv, D); lse (B, H, S_q), natural
logarithm, scaled scores. Traps that this file takes care of:

* torch's causal mask with S_q != S_k is top-left, but bottom-right in flash-attention, as ours: elsewhere a prefix that
  all queries see and a square make it up (``TopLeft``).
* Backward kernels take out only to compute delta = sum(dout * out), so where delta is at hand instead, any out will do
  that has it: delta * dout / sum(dout * dout).
* The CPU kernel knows only full and causal masks; others go through its float mask, where a row without any key comes
  back with lse 0 instead of -inf, which would corrupt every merge.
* Backward takes the global out and lse, so the parts of a ring add up without a correction.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from sim.schedule.derive.kernels import mask_variant
from sim.schedule.ir.masks import CAUSAL, FULL, Band, DocumentBlock

Tensor = torch.Tensor
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""(q, k, v, out, lse)"""


class Forward(NamedTuple):
    """Output and log-sum-exp of one block."""

    out: Tensor
    lse: Tensor


class Backward(NamedTuple):
    """Gradients of one block."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class AttentionKernel(Protocol):
    """An implementation of attention on one kind of device."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Forward:
        """Return output and log-sum-exp."""
        ...

    def backward(self, saved: Saved, dout: Tensor, band: Band) -> Backward:
        """Return the gradients; out and lse are over all keys."""
        ...


@runtime_checkable
class PartsKernel(Protocol):
    """An implementation that attends to several parts of a block in few launches: see ``varlen``."""

    def forward_parts(self, operands: tuple[Tensor, Tensor, Tensor], parts: tuple[DocumentBlock, ...]) -> Forward:
        """Return output and log-sum-exp of q, k, v."""
        ...

    def backward_parts(self, saved: Saved, dout: Tensor, parts: tuple[DocumentBlock, ...]) -> Backward:
        """Return the gradients; out and lse are over all keys."""
        ...


class TopLeft(ABC):
    """Kernels whose causal mask begins at the first key: a block of more keys than queries is a prefix and a square."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Forward:
        """See AttentionKernel."""
        prefix = _prefix(band, q, k)
        if not prefix:
            return self._forward(q, k, v, band)
        first, second = (
            self._forward(q, k[:, :prefix], v[:, :prefix], FULL),
            self._forward(q, k[:, prefix:], v[:, prefix:], CAUSAL),
        )
        merge(first.out, first.lse, second.out, second.lse)
        return second

    def backward(self, saved: Saved, dout: Tensor, band: Band) -> Backward:
        """See AttentionKernel."""
        q, k, v, out, lse = saved
        prefix = _prefix(band, q, k)
        if not prefix:
            return self._backward(saved, dout, band)
        first = self._backward((q, k[:, :prefix], v[:, :prefix], out, lse), dout, FULL)
        second = self._backward((q, k[:, prefix:], v[:, prefix:], out, lse), dout, CAUSAL)
        dk, dv = (torch.cat(pair, dim=1) for pair in zip(first[1:], second[1:], strict=True))
        return Backward(first.dq.add_(second.dq), dk, dv)

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Forward:
        """Do a block whose mask is full, a causal square, or a band."""

    @abstractmethod
    def _backward(self, saved: Saved, dout: Tensor, band: Band) -> Backward:
        """Do its backward pass."""


class CpuFlash(TopLeft):
    """torch's flash attention for CPUs: fp64, fp32, bf16, fp16; lse in fp32, or fp64 for fp64."""

    name = "aten flash for cpu"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Forward:
        causal, mask = _cpu_mask(band, q, k)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, attn_mask=mask
        )
        if mask is not None:
            lse = lse.masked_fill((mask == -math.inf).all(dim=-1), -math.inf)
        return Forward(out.transpose(1, 2), lse)

    def _backward(self, saved: Saved, dout: Tensor, band: Band) -> Backward:
        q, k, v, out, lse = saved
        causal, mask = _cpu_mask(band, q, k)
        if mask is not None:  # exp(-inf - -inf) is not a number; any finite lse gives such rows probability 0
            lse = lse.masked_fill(lse == -math.inf, 0.0)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout.transpose(1, 2),
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            out.transpose(1, 2),
            lse,
            0.0,
            causal,
            attn_mask=mask,
        )
        return Backward(*(grad.transpose(1, 2) for grad in grads))


def with_delta(delta: Tensor, dout: Tensor) -> Tensor:
    """Return an out (B, S, H, D) whose sum of products with dout is delta (B, H, S)."""
    square = dout.to(delta.dtype, copy=True).square_().sum(dim=-1)
    share = delta.transpose(1, 2) / square.masked_fill(square == 0, 1.0)
    return (dout * share[..., None]).to(dout.dtype)


def delta_of(out: Tensor, dout: Tensor, delta: Tensor) -> None:
    """Write sum(dout * out) over the head dim of (B, S, H, D) to delta (B, H, S)."""
    delta.copy_(out.to(delta.dtype, copy=True).mul_(dout).sum(dim=-1).transpose(1, 2))


def merge(out: Tensor, lse: Tensor, into_out: Tensor, into_lse: Tensor) -> None:
    """Fold (out, lse) into (into_out, into_lse), in place. out: (B, S, H, D); lse: (B, H, S).

    By weights exp(lse - total), which stays exact for any gap between the two and where either side, or both, saw no
    key at all (lse = -inf, weight 0).
    """
    total = torch.logaddexp(into_lse, lse)
    finite = torch.where(total == -torch.inf, 0.0, total)
    old, new = (torch.sub(one, finite).exp_().transpose(1, 2).unsqueeze(-1) for one in (into_lse, lse))
    into_out.mul_(old).addcmul_(out, new)
    into_lse.copy_(total)


def _prefix(band: Band, q: Tensor, k: Tensor) -> int:
    """Return how many keys all queries of a causal block see, more keys than queries; 0 for other blocks."""
    return k.shape[1] - q.shape[1] if mask_variant(band, q.shape[1], k.shape[1]) == "causal" else 0


def _cpu_mask(band: Band, q: Tensor, k: Tensor) -> tuple[bool, Tensor | None]:
    """Return (is_causal, float mask) for the CPU kernel."""
    variant = mask_variant(band, q.shape[1], k.shape[1])
    if variant != "masked":
        return variant == "causal", None
    rows, columns = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None, :]
    drop = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    if band.right is not None:
        drop |= columns > rows + band.right
    if band.left is not None:
        drop |= columns < rows - band.left
    return False, torch.zeros(drop.shape, dtype=q.dtype).masked_fill_(drop, -math.inf)
