"""Liger's modules: its Triton kernels do not run here, so that its host code is written down, and each launch noted.

As liger-kernel 0.8.5 has them, in the files of ``liger_kernel/ops`` that are named below.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from calibrate.software.counting.count import Ready, Run, received, run
from calibrate.software.counting.log import launch
from calibrate.software.counting.sizes import Sizes
from calibrate.software.libraries import transformers_modules
from calibrate.software.libraries.transformers_modules import Modules

VERSION = "0.8.5"
_LLAMA = Modules("llama", autocast=False)


class _RmsNorm(torch.autograd.Function):
    """rms_norm.py, ``LigerRMSNormFunction`` with ``in_place``: one sum of weight gradients a multiprocessor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, multiprocessors: int) -> torch.Tensor:
        """Return y."""
        y, rstd = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32)
        launch("_rms_norm_forward_kernel", (x, weight), (y, rstd))
        ctx.save_for_backward(x, weight, rstd)
        ctx.multiprocessors = multiprocessors
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and of the weight."""
        x, weight, rstd = ctx.saved_tensors
        sums = x.new_empty(ctx.multiprocessors, x.shape[-1], dtype=torch.float32)
        launch("_rms_norm_backward_kernel", (gradient, x, weight, rstd), (gradient, sums))
        return gradient, sums.sum(dim=0).to(weight.dtype), None


class _Rope(torch.autograd.Function):
    """rope.py, ``LigerRopeFunction``: in place, in the order of memory that products leave."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both, rotated."""
        ctx.save_for_backward(cos, sin)
        return _rotated(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of both."""
        return *_rotated(*gradients, *ctx.saved_tensors), None, None


def _rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = (one.transpose(1, 2).contiguous() for one in (q, k))
    launch("_triton_rope", (q, k, cos, sin), (q, k))
    return q.transpose(1, 2), k.transpose(1, 2)


class _SiluMul(torch.autograd.Function):
    """swiglu.py, ``LigerSiLUMulFunction``: gradients take the place of what was kept."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up."""
        made = torch.empty_like(gate)
        launch("_swiglu_forward_kernel", (gate, up), (made,))
        ctx.save_for_backward(gate, up)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of both."""
        gate, up = ctx.saved_tensors
        launch("_swiglu_backward_kernel", (gradient, gate, up), (gate, up))
        return gate, up


class _Loss(torch.autograd.Function):
    """fused_linear_cross_entropy.py around its chunks: backward scales the gradients that forward has made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses."""
        gradients = torch.zeros_like(x), torch.zeros_like(weight)
        losses = torch.zeros(x.shape[:1], dtype=torch.float32)
        (target != -100).sum()
        ctx.save_for_backward(*gradients)
        return torch.sum(losses)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and of the weight."""
        for one in ctx.saved_tensors:
            launch("element_mul_kernel", (one, gradient), (one,))
        return *ctx.saved_tensors, None


def norm(sizes: Sizes) -> Run:
    """Return what the norm runs."""

    def build(sizes: Sizes) -> Ready:
        x = received(torch.bfloat16, sizes["tokens"], sizes["hidden"])
        weight = torch.nn.Parameter(torch.empty(sizes["hidden"], dtype=torch.bfloat16))
        return Ready(lambda: (_RmsNorm.apply(x, weight, sizes["multiprocessors"]),), (x,))

    return run(build, sizes)


def rotary(sizes: Sizes) -> Run:
    """Return what the rotary embedding runs."""
    with _liger_rotary():
        return _LLAMA.run(transformers_modules.rotary, sizes)


def attention(sizes: Sizes) -> Run:
    """Return what Llama's attention runs with it, and it apart."""
    with _liger_rotary():
        return transformers_modules.attention_alone(_LLAMA, sizes)


@contextlib.contextmanager
def _liger_rotary() -> Iterator[None]:
    """Take Liger's rotary embedding for Llama's, as apply_liger_kernel_to_llama does."""
    before = _LLAMA.code.apply_rotary_pos_emb
    _LLAMA.code.apply_rotary_pos_emb = _Rope.apply
    try:
        yield
    finally:
        _LLAMA.code.apply_rotary_pos_emb = before


def mlp(sizes: Sizes) -> Run:
    """Return what ``LigerSwiGLUMLP`` runs."""

    def build(sizes: Sizes) -> Ready:
        x = received(torch.bfloat16, sizes["tokens"], sizes["hidden"])
        shapes = 2 * [(sizes["ffn"], sizes["hidden"])] + [(sizes["hidden"], sizes["ffn"])]
        gate, up, down = (torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)) for shape in shapes)

        def forward() -> tuple[torch.Tensor]:
            return (functional.linear(_SiluMul.apply(functional.linear(x, gate), functional.linear(x, up)), down),)

        return Ready(forward, (x,))

    return run(build, sizes)


def loss(sizes: Sizes) -> Run:
    """Return what the loss runs once, beside its chunks; divided by the number of labels, as Trainer does."""

    def build(sizes: Sizes) -> Ready:
        x = received(torch.bfloat16, sizes["tokens"], sizes["hidden"])
        weight = torch.nn.Parameter(torch.empty(sizes["vocab"], sizes["hidden"], dtype=torch.bfloat16))
        target = torch.empty(sizes["tokens"], dtype=torch.int64)
        return Ready(lambda: (_Loss.apply(x, weight, target),), (x,))

    return run(build, sizes)


def chunk(sizes: Sizes) -> Run:
    """Return what each chunk of the loss runs, all of it in forward: fused_linear_cross_entropy_forward."""

    def build(sizes: Sizes) -> Ready:
        x, of_x = (torch.empty(sizes["chunk"], sizes["hidden"], dtype=torch.bfloat16) for _ in range(2))
        weight, of_weight = (torch.empty(sizes["vocab"], sizes["hidden"], dtype=torch.bfloat16) for _ in range(2))
        target, losses = torch.empty(sizes["chunk"], dtype=torch.int64), torch.empty(sizes["chunk"])

        def forward() -> tuple[()]:
            logits = torch.empty(sizes["chunk"], sizes["vocab"], dtype=torch.bfloat16)
            torch.mm(x, weight.t(), out=logits)
            launch("liger_cross_entropy_kernel", (logits, target), (logits, losses))
            torch.mm(logits, weight, out=of_x)
            torch.addmm(of_weight, logits.t(), x, out=of_weight)
            return ()

        return Ready(forward)

    return run(build, sizes)
