"""Kernels of weights and of an optimiser: element by element over flat tensors."""

from __future__ import annotations

from typing import assert_never

import torch

from runtime.execution.tensors import Storage
from sim.optimiser import ADAM
from sim.schedule.ir.ops import AdamW, Pack, SquareSum, StateKernel, Unpack

Tensor = torch.Tensor


def run_state_kernel(op: StateKernel, storage: Storage) -> str:
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
            part.copy_(source)
        return "aten split, copy_"
    if isinstance(op, SquareSum):
        storage.write(op.square).copy_(torch.linalg.vector_norm(storage.read(op.gradient)).square_())
        return "aten vector_norm, square"
    if isinstance(op, AdamW):
        weights, gradient, first, second, squares = (storage.read(view) for view in op.reads)
        return adamw(weights, gradient, (first, second), squares)
    assert_never(op)


def adamw(weights: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], squares: Tensor) -> str:
    """Update weights (N,) and their moments in place by a gradient (N,); ``squares`` sum up to the square of the norm
    of all gradients.
    """
    first, second = moments
    clip = (ADAM.max_norm / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    scaled = gradient * clip
    weights.mul_(1 - ADAM.learning_rate * ADAM.weight_decay)
    first.lerp_(scaled, 1 - ADAM.beta1)
    second.mul_(ADAM.beta2).addcmul_(scaled, scaled, value=1 - ADAM.beta2)
    root = torch.sqrt(second, out=scaled).div_((1 - ADAM.beta2**ADAM.step) ** 0.5).add_(ADAM.epsilon)
    weights.addcdiv_(first, root, value=-ADAM.learning_rate / (1 - ADAM.beta1**ADAM.step))
    return "eager AdamW (3 mul, lerp, addcmul, sqrt, div, add, addcdiv)"
