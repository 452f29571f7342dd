"""What Megatron-Core runs over the scores of attention that is not fused, beside its products.

``transformer/dot_product_attention.py`` of megatron-core 0.16.1: with masked_softmax_fusion one kernel for scale,
causal mask and softmax, then torch's dropout, which keeps a byte of a mask for each score. Both are kernels of a GPU,
which are noted here. The former reads nothing behind the mask (from memory), and is counted as if it did.
"""

from __future__ import annotations

from typing import Any

import torch

from calibrate.software.counting.count import Ready, Run, run
from calibrate.software.counting.log import launch
from calibrate.software.counting.sizes import Sizes


class _MaskedSoftmax(torch.autograd.Function):
    """fusions/fused_softmax.py, ``ScaledUpperTriangMaskedSoftmax``."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        """Return the probabilities."""
        made = torch.empty_like(scores)
        launch("scaled_upper_triang_masked_softmax", (scores,), (made,))
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the scores, in the place of that of the probabilities."""
        launch("scaled_upper_triang_masked_softmax_backward", (gradient, *ctx.saved_tensors), (gradient,))
        return gradient


class _Dropout(torch.autograd.Function):
    """torch 2.13 aten/src/ATen/native/cuda/Dropout.cu: native_dropout."""

    @staticmethod
    def forward(ctx: Any, probabilities: torch.Tensor) -> torch.Tensor:
        """Return those that are not dropped, scaled up."""
        made, mask = torch.empty_like(probabilities), probabilities.new_empty(probabilities.shape, dtype=torch.bool)
        launch("native_dropout", (probabilities,), (made, mask))
        ctx.save_for_backward(mask)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the probabilities."""
        made = torch.empty_like(gradient)
        launch("native_dropout_backward", (gradient, *ctx.saved_tensors), (made,))
        return made


def scores(sizes: Sizes) -> Run:
    """Return what passes over scores with attention_dropout above 0."""

    def build(sizes: Sizes) -> Ready:
        shape = (sizes["batch"], sizes["heads"], sizes["sequence"], sizes["sequence"])
        given = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        return Ready(lambda: (_Dropout.apply(_MaskedSoftmax.apply(given)),), (given,))

    return run(build, sizes)
