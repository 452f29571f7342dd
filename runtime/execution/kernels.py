"""Runs the kernel of an op on the declared views of one rank, and nothing else. Names what ran."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import assert_never

import torch

from runtime.execution.attention import AttentionKernel, delta_of, merge, with_delta
from runtime.execution.dense import gemm, rms_norm, rms_norm_backward, rope, swiglu, swiglu_backward
from runtime.execution.tensors import Storage
from runtime.execution.unfused import chunked_backward, chunked_forward, standard_backward, standard_forward
from sim.schedule.ir.ops import (
    Accumulate,
    Attend,
    AttendBackward,
    Copy,
    Delta,
    Fold,
    Gemm,
    HostCopy,
    Kernel,
    Merge,
    RmsNorm,
    RmsNormBackward,
    Rope,
    SwiGlu,
    SwiGluBackward,
    TokenKernel,
    Zero,
)
from sim.schedule.ir.views import Split


def run_kernel(op: Kernel, storage: Storage, attention: AttentionKernel) -> str:
    """Run one kernel; return the name of the implementation."""
    if isinstance(op, Attend):
        return _attend(op, storage, attention)
    if isinstance(op, AttendBackward):
        return _attend_backward(op, storage, attention)
    if isinstance(op, Delta):
        delta_of(storage.read(op.out), storage.read(op.dout), storage.write(op.delta))
        return "eager delta"
    if isinstance(op, Merge):
        merge(storage.read(op.out), storage.read(op.lse), storage.read(op.into_out), storage.read(op.into_lse))
        return "eager merge"
    if isinstance(op, Accumulate):
        storage.read(op.into).add_(storage.read(op.source))
        return "aten add_"
    if isinstance(op, Zero):
        storage.write(op.into).zero_()
        return "aten zero_"
    if isinstance(op, Copy):
        storage.write(op.target.view)
        source, target = parts(op.source, storage), parts(op.target, storage)
        if op.order:
            target.copy_(source.index_select(0, _index(op.order, source.device)))
            return "aten index_select, copy_"
        target.copy_(source)
        return "aten copy_"
    if isinstance(op, Fold):
        storage.write(op.target.view)
        source = parts(op.source, storage)
        parts(op.target, storage).copy_(source.unflatten(0, (op.target.parts, -1)).sum(dim=1))
        return "aten sum, copy_"
    return _run_token_kernel(op, storage)


def host_copy(op: HostCopy, storage: Storage) -> Callable[[], list[torch.distributed.Work]]:
    """Return what copies to the host's memory or back; the host does not wait for it where that memory is pinned."""
    target, source = storage.write(op.target), storage.read(op.source)

    def copy() -> list[torch.distributed.Work]:
        target.copy_(source, non_blocking=True)
        return []

    return copy


@lru_cache(maxsize=1024)
def _index(order: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return numbers of parts on a device; sending them there anew would make the host wait for it."""
    return torch.tensor(order, device=device)


def _attend(op: Attend, storage: Storage, attention: AttentionKernel) -> str:
    """Run attention of one block."""
    q, k, v = (storage.read(view) for view in op.reads)
    name = attention.name
    results: tuple[torch.Tensor, ...]
    if op.kernel == "flash":
        results = attention.forward(q, k, v, op.band)
    elif op.kernel == "memory-efficient":
        results, name = chunked_forward(q, k, v, op.band), "eager chunks"
    elif op.kernel == "standard":
        results, name = standard_forward(q, k, v, op.band), "eager attention"
    else:
        assert_never(op.kernel)
    for view, result in zip(op.writes, results, strict=True):
        storage.put(view, result)
    return name


def _attend_backward(op: AttendBackward, storage: Storage, attention: AttentionKernel) -> str:
    """Run the backward pass of one block."""
    q, k, v, out, lse, dout, *probs = (storage.read(view) for view in op.reads)
    name = attention.name
    if op.kernel == "flash":
        if op.from_delta:
            out, name = with_delta(out, dout), f"{name}, out from delta"
        grads = attention.backward((q, k, v, out, lse), dout, op.band)
    else:
        delta = out if op.from_delta else torch.empty_like(lse)
        if not op.from_delta:
            delta_of(out, dout, delta)
        if op.kernel == "memory-efficient":
            grads, name = chunked_backward((q, k, v, delta, lse), dout, op.band), "eager chunks"
        elif op.kernel == "standard":
            grads, name = standard_backward(q, k, v, delta, dout, probs[0]), "eager attention"
        else:
            assert_never(op.kernel)
    for view, grad in zip(op.writes, grads, strict=True):
        storage.put(view, grad)
    return name


def _run_token_kernel(op: TokenKernel, storage: Storage) -> str:
    """Run a kernel that looks at each token by itself."""
    given = [storage.read(view) for view in op.reads]
    if isinstance(op, RmsNorm | RmsNormBackward):
        x, weight, *rest = given
        found = rms_norm(x, weight, op.epsilon) if isinstance(op, RmsNorm) else rms_norm_backward(x, weight, *rest)
        for view, result in zip(op.writes, (found.out, found.second), strict=True):
            storage.put(view, result)
        return found.name
    results = [storage.write(view) for view in op.writes]
    if isinstance(op, Gemm):
        return gemm(op.form, given[0], given[1], results[0], accumulate=op.accumulate)
    if isinstance(op, Rope):
        return rope(results[0], op.tokens, op.theta, storage.rotations, inverse=op.inverse)
    if isinstance(op, SwiGlu):
        return swiglu(given[0], given[1], results[0])
    if isinstance(op, SwiGluBackward):
        return swiglu_backward(given[0], given[1], given[2], results[0], results[1])
    assert_never(op)


def parts(split: Split, storage: Storage) -> torch.Tensor:
    """Return the parts of a split as (parts, *part shape), sharing memory with the buffer."""
    tensor = storage.read(split.view)
    return tensor.unflatten(split.dim, (split.parts, -1)).movedim(split.dim, 0)
