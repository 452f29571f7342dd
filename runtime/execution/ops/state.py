"""Kernels of weights and of an optimiser: element by element over flat tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import assert_never

import torch

from runtime.execution.tensors import Storage
from sim.schedule.ir.ops import AdamW, Divide, HostAdamW, Pack, SquareSum, StateKernel, Unpack
from sim.words.optimiser import ADAM

Tensor = torch.Tensor


def run_state_kernel(op: StateKernel | HostAdamW, storage: Storage) -> str:
    """Run a kernel; return the name of the implementation."""
    if isinstance(op, Unpack):
        targets = [storage.write(view) for view in op.weights]
        parts = storage.read(op.flat).split([target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            target.view(-1).copy_(part)
        return "aten split, copy_"
    if isinstance(op, Pack):
        sources = [storage.read(view).view(-1) for view in op.gradients]
        flat = storage.write(op.flat)
        for source, part in zip(sources, flat.split([source.numel() for source in sources]), strict=True):
            part.add_(source) if op.adds else part.copy_(source)
        return f"aten split, {'add_' if op.adds else 'copy_'}"
    if isinstance(op, Divide):
        storage.write(op.gradient).div_(1.0)
        return "aten div_"
    if isinstance(op, SquareSum):
        square = storage.write(op.square)
        found = square_sum(storage.read(op.gradient), square.dtype)
        square.add_(found) if op.adds else square.copy_(found)
        return "aten vector_norm, square" + (", add_" if op.adds else "")
    if isinstance(op, AdamW | HostAdamW):
        weights, gradient, first, second, squares = (storage.read(view) for view in op.reads)
        clip = (ADAM.max_norm / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        adamw(weights, gradient.mul_(clip), first, second)
        if isinstance(op, HostAdamW) and op.cast:
            storage.write(op.cast).copy_(weights)
        return "aten _fused_adamw_"
    assert_never(op)


def square_sum(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the squares of a flat tensor. On a CPU torch adds up a norm one element after the other, which
    over millions in fp32 loses four digits: there norms of short rows are added up.
    """
    if not gradient.is_cpu:
        return torch.linalg.vector_norm(gradient, dtype=dtype).square_()
    whole = len(gradient) - len(gradient) % _ROW
    rows = torch.linalg.vector_norm(gradient[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(gradient[whole:], dtype=dtype)
    return rows.square_().sum() + rest.square_()


_ROW = 1024
"""Elements whose norm is found at once."""


def adamw(weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> None:
    """Update weights (N,) and their moments in place, all of one data type; numbers in between are at least in fp32."""
    torch._fused_adamw_(
        [weights], [gradient], [first], [second], [], [_step(ADAM.step, weights.device)],
        lr=ADAM.learning_rate, beta1=ADAM.beta1, beta2=ADAM.beta2, weight_decay=ADAM.weight_decay, eps=ADAM.epsilon,
        amsgrad=False, maximize=False,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _step(number: int, device: torch.device) -> Tensor:
    """Return the number of a step where the kernel reads it; sending it there anew would make the host wait for it."""
    return torch.tensor(float(number), device=device)
