"""What frameworks have in common: a norm in one kernel, sums of the residual stream, a loss in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from calibrate.software.counting.count import Ready, Run, received, run
from calibrate.software.counting.log import launch
from calibrate.software.counting.sizes import Sizes


class NormKernels(NamedTuple):
    """The kernels of an RMSNorm."""

    forward: str
    backward: str
    """Sums weight gradients too, one sum a multiprocessor."""
    finalise: str | None = None
    """Adds those up; None where torch does."""


class RmsNorm(torch.autograd.Function):
    """An RMSNorm in one kernel each way: x and one number a token are kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, kernels: NormKernels, multiprocessors: int
    ) -> torch.Tensor:
        """Return y."""
        y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        launch(kernels.forward, (x, weight), (y, rstd))
        ctx.save_for_backward(x, weight, rstd)
        ctx.kernels, ctx.multiprocessors = kernels, multiprocessors
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and of the weight."""
        x, weight, rstd = ctx.saved_tensors
        of_x, sums = torch.empty_like(x), x.new_empty(ctx.multiprocessors, x.shape[-1], dtype=torch.float32)
        launch(ctx.kernels.backward, (x, weight, gradient, rstd), (of_x, sums))
        if ctx.kernels.finalise is None:
            return of_x, sums.sum(dim=0).to(weight.dtype), None, None
        of_weight = torch.empty_like(weight)
        launch(ctx.kernels.finalise, (sums,), (of_weight,))
        return of_x, of_weight, None, None


def norm(kernels: NormKernels, heads: str | None, sizes: Sizes) -> Run:
    """Return what a norm runs: of hidden states or, where ``heads`` names their number, of each head."""
    rows = ("hidden",) if heads is None else (heads, "head_dim")

    def build(sizes: Sizes) -> Ready:
        x = received(torch.bfloat16, sizes["batch"], sizes["sequence"], *(sizes[name] for name in rows))
        of_norm = weight(sizes[rows[-1]])
        return Ready(lambda: (RmsNorm.apply(x, of_norm, kernels, sizes["multiprocessors"]),), (x,))

    return run(build, sizes)


def residual(sizes: Sizes) -> Run:
    """Return what a sum onto the residual stream runs, with both of its gradients added."""

    def build(sizes: Sizes) -> Ready:
        x, branch = (received(torch.bfloat16, sizes["tokens"], sizes["hidden"]) for _ in range(2))
        return Ready(lambda: (x + branch, x.view_as(x)), (x, branch))

    return run(build, sizes)


def vocabulary_loss(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token of logits less their maximum, which become their softmax in place.

    ``VocabParallelCrossEntropy`` of Megatron-Core, one rank; nanotron has the same, word by word.
    """
    vocabulary = logits.shape[-1]
    target_mask = (target < 0) | (target >= vocabulary)
    masked_target = target.clone() - 0
    masked_target[target_mask] = 0
    logits_2d, masked_target_1d = logits.view(-1, vocabulary), masked_target.view(-1)
    arange_1d = torch.arange(start=0, end=logits_2d.shape[0], device=logits.device)
    predicted = logits_2d[arange_1d, masked_target_1d].clone().view_as(target)
    predicted[target_mask] = 0.0
    exp_logits = logits
    torch.exp(logits, out=exp_logits)
    sum_exp_logits = exp_logits.sum(dim=-1)
    loss = torch.log(sum_exp_logits) - predicted
    exp_logits.div_(sum_exp_logits.unsqueeze(dim=-1))
    ctx.save_for_backward(exp_logits, target_mask, masked_target_1d)
    return loss


def vocabulary_gradient(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the logits, in place of the softmax that ``vocabulary_loss`` keeps."""
    softmax, target_mask, masked_target_1d = ctx.saved_tensors
    grad_2d = softmax.view(-1, softmax.shape[-1])
    arange_1d = torch.arange(start=0, end=grad_2d.shape[0], device=grad_2d.device)
    grad_2d[arange_1d, masked_target_1d] -= 1.0 - target_mask.view(-1).float()
    return softmax.mul_(gradient.unsqueeze(dim=-1))


def stream(sizes: Sizes) -> torch.Tensor:
    """Return the residual stream, ``[sequence, batch, hidden]``."""
    return received(torch.bfloat16, sizes["sequence"], sizes["batch"], sizes["hidden"])


def weight(*shape: int) -> torch.nn.Parameter:
    """Return a weight in bf16."""
    return torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))


def heads_of(sizes: Sizes, heads: str, *first: str) -> torch.Tensor:
    """Return what was computed of each head, dimensions of tokens as named."""
    return received(torch.bfloat16, *(sizes[name] for name in first), sizes[heads], sizes["head_dim"])
