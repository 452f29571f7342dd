"""Runs the kernel of an op on the declared views of one rank, and nothing else. Names what ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import assert_never

import torch

from runtime.execution.ops.attention import AttentionKernel, delta_of, merge, with_delta
from runtime.execution.ops.dense import run_token_kernel
from runtime.execution.ops.linear import linear_backward, linear_forward, state_product, state_sum
from runtime.execution.ops.matrices import matrices
from runtime.execution.ops.packed import packed_backward, packed_forward
from runtime.execution.ops.state import run_state_kernel
from runtime.execution.ops.unfused import Capped, chunked_backward, chunked_forward, standard_backward, standard_forward
from runtime.execution.tensors import Storage
from sim.schedule.derive.tiles import ends, tiles
from sim.schedule.ir import ops
from sim.schedule.ir.views import Split


def run_kernel(op: ops.Kernel | ops.HostAdamW, storage: Storage, attention: AttentionKernel) -> str:
    """Run one kernel; return the name of the implementation."""
    if isinstance(op, ops.Attend):
        return _attend(op, storage, attention)
    if isinstance(op, ops.AttendBackward):
        return _attend_backward(op, storage, attention)
    if isinstance(op, ops.LinearKernel):
        return _linear(op, storage)
    if isinstance(op, ops.Delta):
        delta_of(storage.read(op.out), storage.read(op.dout), storage.write(op.delta))
        return "eager delta"
    if isinstance(op, ops.Merge):
        merge(storage.read(op.out), storage.read(op.lse), storage.read(op.into_out), storage.read(op.into_lse))
        return "eager merge"
    if isinstance(op, ops.Accumulate):
        into, source = storage.read(op.into), storage.read(op.source)
        if op.largest:
            torch.maximum(into, source, out=into)
            return "aten maximum"
        into.add_(source)
        return "aten add_"
    if isinstance(op, ops.Zero):
        storage.write(op.into).zero_()
        return "aten zero_"
    if isinstance(op, ops.Hold):
        for view in op.held:
            storage.write(view)  # which takes what nothing has written
        return "nothing"
    if isinstance(op, ops.Copy | ops.Fold):
        return _copy(op, storage)
    if isinstance(op, ops.JoinedGemm | ops.TiledKernel):
        return _several(op, storage, attention)
    if isinstance(op, ops.StateKernel | ops.HostAdamW):
        return run_state_kernel(op, storage)
    return run_token_kernel(op, storage)


def _copy(op: ops.Copy | ops.Fold, storage: Storage) -> str:
    storage.write(op.target.view)
    if isinstance(op, ops.Fold):
        source = parts(op.source, storage)
        parts(op.target, storage).copy_(source.unflatten(0, (op.target.parts, -1)).sum(dim=1))
        return "aten sum, copy_"
    if op.source.sizes:
        rows = _rows(op.source, op.order, storage.read(op.source.view).device)
        storage.read(op.target.view).copy_(storage.read(op.source.view).index_select(op.source.dim, rows))
        return "aten index_select, copy_"
    source, target = parts(op.source, storage), parts(op.target, storage)
    if op.order:
        target.copy_(source.index_select(0, _index(op.order, source.device)))
        return "aten index_select, copy_"
    target.copy_(source)
    return "aten copy_"


def _linear(op: ops.LinearKernel, storage: Storage) -> str:
    """Run a kernel of linear attention."""
    if isinstance(op, ops.LinearAttend):
        q, k, v = map(storage.read, op.reads)
        linear_forward(q, k, v, storage.write(op.out), op.chunk)
    elif isinstance(op, ops.LinearAttendBackward):
        q, k, v, dout = map(storage.read, op.reads)
        dq, dk, dv = map(storage.write, op.writes)
        linear_backward(q, k, v, dout, (dq, dk, dv), op.chunk)
    elif isinstance(op, ops.StateSum):
        storage.put(op.state, state_sum(storage.read(op.a), storage.read(op.b), op.state.shape[1]))
    elif isinstance(op, ops.StateProduct):
        found = state_product(storage.read(op.x), storage.read(op.state), transposed=op.transposed)
        storage.read(op.into).add_(found)
    else:
        assert_never(op)
    return "eager linear attention"


def _several(op: ops.JoinedGemm | ops.TiledKernel, storage: Storage, attention: AttentionKernel) -> str:
    """Run what consists of other kernels."""
    if isinstance(op, ops.TiledKernel):
        return _in_tiles(op, storage, attention)
    return " and ".join(dict.fromkeys([run_token_kernel(product, storage) for product in op.products]))


def _in_tiles(op: ops.TiledKernel, storage: Storage, attention: AttentionKernel) -> str:
    """Run a loop over tiles of tokens, whose temporaries last for one tile. Weights and their gradients are shared by
    all tiles; tokens are those of batch and sequence, as they follow each other in memory.
    """
    operands = [*map(storage.read, op.reads), *map(storage.write, op.writes)]
    (of_tokens,) = matrices(*[tensor for tensor in operands if tensor.dim() == 3])
    rest = iter(of_tokens)
    rows = [next(rest).unsqueeze(0) if tensor.dim() == 3 else tensor for tensor in operands]
    stop, names = 0, dict[str, None]()
    for tile in tiles(op, storage.program):
        ended = ends(tile.program, len(operands))
        for _ in range(tile.times):
            start, stop = stop, stop + tile.tokens
            inner = storage.within(tile.program, [some[:, start:stop] if some.dim() == 3 else some for some in rows])
            for one, after in zip(tile.program.ops, ended, strict=True):
                assert isinstance(one, ops.Kernel)
                names[run_kernel(one, inner, attention)] = None
                inner.drop(after)
    return f"of each tile {', '.join(names)}"


def host_copy(op: ops.HostCopy, storage: Storage) -> Callable[[], list[torch.distributed.Work]]:
    """Return what copies to the host's memory or back; the host does not wait for it where that memory is pinned."""
    target, source = storage.write(op.target), storage.read(op.source)

    def copy() -> list[torch.distributed.Work]:
        target.copy_(source, non_blocking=True)
        return []

    return copy


@lru_cache(maxsize=1024)
def _rows(split: Split, order: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return which rows parts of several sizes have, in this order."""
    found = [torch.arange(*split.starts[part : part + 2]) for part in order or range(split.parts)]
    return torch.cat(found).to(device)


@lru_cache(maxsize=1024)
def _index(order: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return numbers of parts on a device; sending them there anew would make the host wait for it."""
    return torch.tensor(order, device=device)


def _attend(op: ops.Attend, storage: Storage, attention: AttentionKernel) -> str:
    """Run attention of one block."""
    q, k, v = (storage.read(view) for view in op.reads)
    attention = Capped(op.softcap) if op.softcap else attention
    q, name = q * _factor(op) if op.scale else q, attention.name
    results: tuple[torch.Tensor, ...]
    if parts := ops.parts_of(op):
        results = packed_forward(attention, (q, k, v), parts)
    elif op.kernel == "flash":
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


def _attend_backward(op: ops.AttendBackward, storage: Storage, attention: AttentionKernel) -> str:
    """Run the backward pass of one block."""
    q = storage.read(op.q)
    q = q * _factor(op) if op.scale else q
    if op.kernel == "flash":
        grads, name = _fused_backward(op, storage, Capped(op.softcap) if op.softcap else attention, q)
    else:
        grads, name = _unfused_backward(op, storage, q)
    if op.scale:
        grads[0].mul_(_factor(op))
    for view, grad in zip(op.writes, grads, strict=True):
        storage.put(view, grad)
    return name


def _fused_backward(
    op: ops.AttendBackward, storage: Storage, attention: AttentionKernel, q: torch.Tensor
) -> tuple[Sequence[torch.Tensor], str]:
    """Return the gradients by a kernel that takes out, and its name."""
    k, v, lse, dout = (storage.read(view) for view in (op.k, op.v, op.lse, op.dout))
    if op.delta:
        out, name = with_delta(storage.read(op.delta), dout), f"{attention.name}, out from delta"
    else:
        assert op.out is not None  # see wellformed
        out, name = storage.read(op.out), attention.name
    saved = q, k, v, out, lse
    if parts := ops.parts_of(op):
        return packed_backward(attention, saved, dout, parts), name
    return attention.backward(saved, dout, op.band), name


def _unfused_backward(op: ops.AttendBackward, storage: Storage, q: torch.Tensor) -> tuple[Sequence[torch.Tensor], str]:
    """Return the gradients by kernels that take delta, and their name."""
    k, v, lse, dout = (storage.read(view) for view in (op.k, op.v, op.lse, op.dout))
    if op.delta:
        delta = storage.read(op.delta)
    else:
        assert op.out is not None  # see wellformed
        delta = torch.empty_like(lse)
        delta_of(storage.read(op.out), dout, delta)
    if op.kernel == "memory-efficient":
        return chunked_backward((q, k, v, delta, lse), dout, op.band), "eager chunks"
    assert op.kernel == "standard"
    assert op.probs is not None  # see wellformed
    return standard_backward(q, k, v, delta, dout, storage.read(op.probs)), "eager attention"


def _factor(op: ops.Attend | ops.AttendBackward) -> float:
    """Return what queries are multiplied by, so that kernels that scale by the root of D scale as an op says."""
    assert op.scale
    return float(op.scale * op.q.shape[3] ** 0.5)


def parts(split: Split, storage: Storage) -> torch.Tensor:
    """Return the parts of a split as (parts, *part shape), sharing memory with the buffer."""
    tensor = storage.read(split.view)
    return tensor.unflatten(split.dim, (split.parts, -1)).movedim(split.dim, 0)
