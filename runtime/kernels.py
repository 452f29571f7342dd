"""Runs the kernel of an op on the declared views of one rank, and nothing else. Names what ran."""

from __future__ import annotations

from typing import assert_never

import torch

from runtime.attention import AttentionKernel
from runtime.dense import gemm, rms_norm, rms_norm_backward, rope, swiglu, swiglu_backward
from runtime.tensors import Storage
from sim.schedule.ops import (
    Accumulate,
    Attend,
    AttendBackward,
    Copy,
    Gemm,
    Kernel,
    Merge,
    RmsNorm,
    RmsNormBackward,
    Rope,
    SwiGlu,
    SwiGluBackward,
    TokenKernel,
)
from sim.schedule.views import Split


def run_kernel(op: Kernel, storage: Storage, attention: AttentionKernel) -> str:
    """Run one kernel; return the name of the implementation."""
    if isinstance(op, Attend):
        result = attention.forward(storage.read(op.q), storage.read(op.k), storage.read(op.v), op.band)
        storage.put(op.out, result.out)
        storage.put(op.lse, result.lse)
        return attention.name
    if isinstance(op, AttendBackward):
        q, k, v, out, lse, dout = (storage.read(view) for view in op.reads)
        grads = attention.backward((q, k, v, out, lse), dout, op.band)
        for view, grad in zip(op.writes, grads, strict=True):
            storage.put(view, grad)
        return attention.name
    if isinstance(op, Merge):
        merge(storage.read(op.out), storage.read(op.lse), storage.read(op.into_out), storage.read(op.into_lse))
        return "eager merge"
    if isinstance(op, Accumulate):
        storage.read(op.into).add_(storage.read(op.source))
        return "aten add_"
    if isinstance(op, Copy):
        storage.write(op.target.view)
        parts(op.target, storage).copy_(parts(op.source, storage))
        return "aten copy_"
    return _run_token_kernel(op, storage)


def _run_token_kernel(op: TokenKernel, storage: Storage) -> str:
    """Run a kernel that looks at each token by itself."""
    given = [storage.read(view) for view in op.reads]
    results = [storage.write(view) for view in op.writes]
    if isinstance(op, Gemm):
        return gemm(op.form, given[0], given[1], results[0], accumulate=op.accumulate)
    if isinstance(op, RmsNorm):
        return rms_norm(given[0], given[1], op.epsilon, results[0], results[1])
    if isinstance(op, RmsNormBackward):
        x, weight, rstd, dout = given
        return rms_norm_backward((x, weight, rstd), dout, results[0], results[1])
    if isinstance(op, Rope):
        return rope(results[0], op.tokens, op.theta, inverse=op.inverse)
    if isinstance(op, SwiGlu):
        return swiglu(given[0], given[1], results[0])
    if isinstance(op, SwiGluBackward):
        return swiglu_backward(given[0], given[1], given[2], results[0], results[1])
    assert_never(op)


def parts(split: Split, storage: Storage) -> torch.Tensor:
    """Return the parts of a split as (parts, *part shape), sharing memory with the buffer."""
    tensor = storage.read(split.view)
    return tensor.unflatten(split.dim, (split.parts, -1)).movedim(split.dim, 0)


def merge(out: torch.Tensor, lse: torch.Tensor, into_out: torch.Tensor, into_lse: torch.Tensor) -> None:
    """Fold (out, lse) into (into_out, into_lse), in place. out: (B, S, H, D); lse: (B, H, S).

    By weights exp(lse - total), which stays exact for any gap between the two and where either side, or both, saw no
    key at all (lse = -inf, weight 0).
    """
    total = torch.logaddexp(into_lse, lse)
    finite = torch.where(total == -torch.inf, 0.0, total)
    into_out.mul_(torch.exp(into_lse - finite).transpose(1, 2).unsqueeze(-1))
    into_out.add_(out * torch.exp(lse - finite).transpose(1, 2).unsqueeze(-1).to(into_out.dtype))
    into_lse.copy_(total)
