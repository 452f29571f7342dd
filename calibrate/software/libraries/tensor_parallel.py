"""Products of tensor parallelism as nanotron 0.4 has them, with activations in parts of the sequence between them.

``parallel/tensor_parallel/functional.py``, ``_ColumnLinearAsyncCommunication`` and ``_RowLinearAsyncCommunication`` in
the mode REDUCE_SCATTER, and ``distributed_differentiable_primitives.py``. Weights have no biases. x: ``[sequence, …]``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""As versions of torch call it."""
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Column(torch.autograd.Function):
    """A weight in columns: x is gathered while the product of this rank's part of it runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the product with the whole x."""
        ranks, rank = group.size(), dist.get_rank(group)
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.group = group
        own, *between, hidden = x.shape
        whole = _empty(x, own * ranks, *between, hidden)
        handle = gather(whole, x, group=group, async_op=True)
        product = _empty(x, own * ranks, *between, weight.shape[0])
        before, here, behind = torch.split(product, [own * rank, own, own * (ranks - rank - 1)], dim=0)
        _multiplied(x, weight, here)
        handle.wait()
        if before.numel() > 0:
            _multiplied(whole[: own * rank], weight, before)
        if behind.numel() > 0:
            _multiplied(whole[own * (rank + 1) :], weight, behind)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, summed beside the product for the weight, and of the weight."""
        x, weight = ctx.saved_tensors
        whole = _room(x, ctx.group)
        handle = gather(whole, x, group=ctx.group, async_op=True)
        of_whole = gradient.matmul(weight)
        handle.wait()
        gradient = gradient.contiguous()
        of_x = torch.empty(x.shape, dtype=of_whole.dtype, device=of_whole.device)
        handle = scatter(of_x, of_whole, group=ctx.group, async_op=True)
        of_weight = _rows(gradient).t().matmul(_rows(whole))
        handle.wait()
        return of_x, of_weight, None


class Row(torch.autograd.Function):
    """A weight in rows: partial products are summed, each rank's part of the sequence there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return this rank's part of the product."""
        ctx.group = group
        product = _Scattered.apply(torch.nn.functional.linear(x, weight), group)
        ctx.save_for_backward(x, weight)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, in parts that are gathered, and of the weight, from the gathered one of the
        product.
        """
        x, weight = ctx.saved_tensors
        whole = _room(gradient, ctx.group)
        gradient = gradient.contiguous()
        handle = gather(whole, gradient, group=ctx.group, async_op=True)
        of_part = gradient.matmul(weight)
        handle.wait()
        of_x = _room(of_part, ctx.group)
        handle = gather(of_x, of_part, group=ctx.group, async_op=True)
        of_weight = _rows(whole).t().matmul(_rows(x.contiguous()))
        handle.wait()
        return of_x, of_weight, None


class _Scattered(torch.autograd.Function):
    """DifferentiableReduceScatterSum, whose own backward nothing calls here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the sum over ranks of this rank's part."""
        ctx.group = group
        x = x.contiguous()
        part = _empty(x, x.shape[0] // group.size(), *x.shape[1:])
        scatter(part, x, group=group)
        return part


def _room(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return room for the parts of all ranks."""
    own, *rest = part.shape
    return torch.empty(own * group.size(), *rest, device=part.device, dtype=part.dtype)


def _empty(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, device=x.device, dtype=x.dtype, requires_grad=x.requires_grad)


def _multiplied(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write a part of the product."""
    rows = math.prod(x.shape[:-1])
    torch.mm(x.view(rows, x.shape[-1]), weight.t(), out=out.view(rows, weight.shape[0]))


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.view(math.prod(x.shape[:-1]), x.shape[-1])
