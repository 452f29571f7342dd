"""Megatron-Core's GPT layers: its own code where that is torch, and TransformerEngine's kernels noted launch by launch.

``fusions``, ``tensor_parallel/cross_entropy.py`` and ``transformer`` of megatron-core 0.16.1, with one rank of tensor
parallelism; what is under its ``jit_fuser``, which is torch.compile, is one kernel by Inductor's rule. Norms are
as ``common/normalization`` of TransformerEngine has them. Activations are ``[sequence, batch, …]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from calibrate.software.counting.count import FlashAttention, Ready, Run, run
from calibrate.software.counting.layers import (
    NormKernels,
    heads_of,
    stream,
    vocabulary_gradient,
    vocabulary_loss,
    weight,
)
from calibrate.software.counting.log import launch
from calibrate.software.counting.sizes import Sizes

VERSION = "0.16.1"
NORM = NormKernels("rmsnorm_fwd_tuned_kernel", "rmsnorm_bwd_tuned_kernel", "rmsnorm_bwd_finalize_tuned_kernel")
"""Of TransformerEngine: one sum of weight gradients a row of thread blocks, here as many as multiprocessors."""


class _Rotary(torch.autograd.Function):
    """TransformerEngine's fused_rope_forward and fused_rope_backward, with angles in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return x, rotated."""
        ctx.save_for_backward(angles)
        made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch("fused_rope_forward_kernel", (x, angles), (made,))
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of x."""
        made = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        launch("fused_rope_backward_kernel", (gradient, *ctx.saved_tensors), (made,))
        return made, None


class _Reordered(torch.autograd.Function):
    """What attention returns, in the order of memory in which TransformerEngine's kernels write it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return a view of the same storage with the strides of a contiguous tensor."""
        ctx.strides = x.stride()
        return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient as attention takes it."""
        return gradient.as_strided(gradient.shape, ctx.strides)


class _Swiglu(torch.autograd.Function):
    """fusions/fused_bias_swiglu.py, ``SwiGLUFunction``: keeps what goes in, and makes the silu again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up."""
        ctx.save_for_backward(x)
        made = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        launch("swiglu", (x,), (made,))
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of both."""
        (x,) = ctx.saved_tensors
        made = torch.empty_like(x)
        launch("swiglu_back", (gradient, x), (made,))
        return made


class _CrossEntropy(torch.autograd.Function):
    """tensor_parallel/cross_entropy.py, ``_VocabParallelCrossEntropy``: all in place of one copy in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token."""
        logits = logits.float()
        logits_max = torch.max(logits, dim=-1)[0]
        logits -= logits_max.unsqueeze(dim=-1)
        return vocabulary_loss(ctx, logits, target)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the logits in fp32, which autograd casts."""
        return vocabulary_gradient(ctx, gradient), None


class _FusedCrossEntropy(torch.autograd.Function):
    """fusions/fused_cross_entropy.py: each of its functions as Inductor fuses it."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token."""
        wide, of_token = (logits.new_empty(shape, dtype=torch.float32) for shape in (logits.shape, target.shape))
        launch("calculate_logits_max", (logits,), (wide, of_token))
        predicted = logits.new_empty(2 * target.shape[0], *target.shape[1:], dtype=torch.float32)
        mask, masked = target.new_empty(target.shape, dtype=torch.bool), target.new_empty(target.numel())
        launch("calculate_predicted_logits", (wide, target, of_token), (wide, predicted, mask, masked))
        losses = torch.empty_like(of_token)
        launch("calculate_cross_entropy_loss", (wide, predicted), (wide, losses))
        ctx.save_for_backward(wide, mask, masked)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the logits in bf16."""
        softmax, mask, masked = ctx.saved_tensors
        made = torch.empty(softmax.shape, dtype=torch.bfloat16, device=softmax.device)
        at_targets = softmax.new_empty(masked.shape)
        launch("calculate_gradients, at targets", (at_targets, mask, masked), (at_targets,))
        launch("calculate_gradients", (softmax, gradient), (softmax, made))
        return made, None


def rotary(sizes: Sizes) -> Run:
    """Return what apply_rotary_pos_emb runs on queries and keys with apply_rope_fusion."""

    def build(sizes: Sizes) -> Ready:
        q, k, angles = (
            heads_of(sizes, "heads", "sequence", "batch"),
            heads_of(sizes, "kv_heads", "sequence", "batch"),
            _angles(sizes),
        )
        return Ready(lambda: (_Rotary.apply(q, angles), _Rotary.apply(k, angles)), (q, k))

    return run(build, sizes)


def rotary_unfused(sizes: Sizes) -> Run:
    """Return what ``_apply_rotary_pos_emb_bshd`` runs on queries and keys: cosines and sines anew for each."""

    def build(sizes: Sizes) -> Ready:
        q, k, angles = (
            heads_of(sizes, "heads", "sequence", "batch"),
            heads_of(sizes, "kv_heads", "sequence", "batch"),
            _angles(sizes),
        )

        def rotated(t: torch.Tensor) -> torch.Tensor:
            t, t_pass = t[..., : angles.shape[-1]], t[..., angles.shape[-1] :]
            cos_, sin_ = ((of(angles) * 1.0).to(t.dtype) for of in (torch.cos, torch.sin))
            x1, x2 = torch.chunk(t, 2, dim=-1)
            t = (t * cos_) + (torch.cat((-x2, x1), dim=-1) * sin_)
            return torch.cat((t, t_pass), dim=-1)

        return Ready(lambda: (rotated(q), rotated(k)), (q, k))

    return run(build, sizes)


def attention(sizes: Sizes) -> Run:
    """Return what SelfAttention runs with a fused attention kernel, less the rotary embedding."""
    return run(_attention, sizes).without(rotary(sizes))


def _attention(sizes: Sizes) -> Ready:
    sequence, batch, kv_heads, each = (sizes[name] for name in ("sequence", "batch", "kv_heads", "head_dim"))
    groups = sizes["heads"] // kv_heads
    x, angles = stream(sizes), _angles(sizes)
    qkv_weight = weight((sizes["heads"] + 2 * kv_heads) * each, sizes["hidden"])
    o_weight = weight(sizes["hidden"], sizes["heads"] * each)

    def forward() -> tuple[torch.Tensor]:
        mixed = functional.linear(x, qkv_weight).view(sequence, batch, kv_heads, (groups + 2) * each)
        q, k, v = torch.split(mixed, [groups * each, each, each], dim=3)
        q, k = _Rotary.apply(q.reshape(sequence, batch, -1, each), angles), _Rotary.apply(k, angles)
        q, k, v = (one.permute(1, 2, 0, 3) for one in (q, k, v))
        with FlashAttention():
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=None, enable_gqa=True)
        return (functional.linear(_Reordered.apply(out.permute(2, 0, 1, 3)).view(sequence, batch, -1), o_weight),)

    return Ready(forward, (x,))


def mlp(sizes: Sizes) -> Run:
    """Return what MLP runs with bias_activation_fusion."""

    def build(sizes: Sizes) -> Ready:
        x = stream(sizes)
        fc1, fc2 = weight(2 * sizes["ffn"], sizes["hidden"]), weight(sizes["hidden"], sizes["ffn"])
        return Ready(lambda: (functional.linear(_Swiglu.apply(functional.linear(x, fc1)), fc2),), (x,))

    return run(build, sizes)


def mlp_unfused(sizes: Sizes) -> Run:
    """Return what MLP runs without bias_activation_fusion."""

    def build(sizes: Sizes) -> Ready:
        x = stream(sizes)
        fc1, fc2 = weight(2 * sizes["ffn"], sizes["hidden"]), weight(sizes["hidden"], sizes["ffn"])

        def forward() -> tuple[torch.Tensor]:
            gate, up = torch.chunk(functional.linear(x, fc1), 2, dim=-1)
            return (functional.linear(functional.silu(gate) * (up + 0.0), fc2),)

        return Ready(forward, (x,))

    return run(build, sizes)


def embedding(sizes: Sizes) -> Run:
    """Return what VocabParallelEmbedding runs: positions first, by a copy."""

    def build(sizes: Sizes) -> Ready:
        table = weight(sizes["vocab"], sizes["hidden"])
        tokens = torch.empty(sizes["batch"], sizes["sequence"], dtype=torch.int64)
        return Ready(lambda: (functional.embedding(tokens, table).transpose(0, 1).contiguous(),))

    return run(build, sizes)


def loss(sizes: Sizes) -> Run:
    """Return what the output layer and vocab_parallel_cross_entropy run; the bf16 logits live until backward."""
    return _loss(_CrossEntropy, sizes)


def loss_fused(sizes: Sizes) -> Run:
    """Return what they run with cross_entropy_loss_fusion and its implementation ``native``."""
    return _loss(_FusedCrossEntropy, sizes)


def _loss(of: type[torch.autograd.Function], sizes: Sizes) -> Run:
    def build(sizes: Sizes) -> Ready:
        x, head = stream(sizes), weight(sizes["vocab"], sizes["hidden"])
        labels = torch.empty(sizes["batch"], sizes["sequence"], dtype=torch.int64)
        mask = torch.empty(sizes["batch"], sizes["sequence"], dtype=torch.float32)

        def forward() -> tuple[torch.Tensor]:
            logits = functional.linear(x, head)
            each: torch.Tensor = of.apply(logits, labels.transpose(0, 1).contiguous())
            each = each.transpose(0, 1).contiguous()
            return (torch.sum(each.view(-1) * mask.view(-1)),)

        return Ready(forward, (x,))

    return run(build, sizes)


def _angles(sizes: Sizes) -> torch.Tensor:
    return torch.empty(sizes["sequence"], 1, 1, sizes["head_dim"], dtype=torch.float32)
