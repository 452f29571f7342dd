"""Kernels of a layer that look at each token by itself: matrix products, norms, rotary embedding, SwiGLU.

Each takes and fills tensors as the ops declare them, and returns the name of what ran. What torch has no fused kernel
for on this device is written out in a few; the names say so.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from sim.schedule.masks import Tokens
from sim.schedule.ops import GemmForm

Tensor = torch.Tensor


def gemm(form: GemmForm, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> str:
    """Fill ``out`` as the op Gemm says; tokens, batch and heads are folded into the two sides of a matrix."""
    left = _matrix(a).T if form == "tn" else _matrix(a)
    right = b if form == "nn" else b.T if form == "nt" else _matrix(b)
    into = _matrix(out) if form != "tn" else out
    if accumulate:
        into.addmm_(left, right)
        return "aten addmm_"
    torch.mm(left, right, out=into)
    return "aten mm"


def _matrix(tokens: Tensor) -> Tensor:
    """Return (B, S, …) as (B * S, …) without a copy."""
    return tokens.view(tokens.shape[0] * tokens.shape[1], -1)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, out: Tensor, rstd: Tensor) -> str:
    """Fill out and rstd. x, out: (B, S, E); weight: (E,); rstd: (B, S), in the accumulation data type."""
    wide = x.to(rstd.dtype)
    torch.rsqrt(torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(epsilon), out=rstd)
    out.copy_(wide * rstd.unsqueeze(-1)).mul_(weight)
    return "eager rms norm (vecdot, rsqrt, 2 mul, copy)"


def rms_norm_backward(saved: tuple[Tensor, Tensor, Tensor], dout: Tensor, dx: Tensor, dweight: Tensor) -> str:
    """Fill dx and dweight; ``saved`` is (x, weight, rstd).

    With n = x * rstd and g = dout * weight: dx = rstd * (g - n * mean(g * n)), dweight = sum of dout * n.
    """
    x, weight, rstd = saved
    scale = rstd.unsqueeze(-1)
    normed = x.to(rstd.dtype) * scale
    dweight.copy_(torch.einsum("bse,bse->e", dout.to(rstd.dtype), normed))
    grad = dout.to(rstd.dtype) * weight
    inner = torch.linalg.vecdot(grad, normed).div_(x.shape[-1]).unsqueeze(-1)
    dx.copy_(grad.addcmul_(normed, inner, value=-1).mul_(scale))
    return "eager rms norm backward (3 mul, einsum, vecdot, addcmul, copy)"


def rope(x: Tensor, tokens: Tokens, theta: float, *, inverse: bool) -> str:
    """Rotate x (B, S, H, D) in place: the pair (i, i + D/2) by position * theta^(-2i/D)."""
    cos, sin = _rotations(tokens, x.shape[-1], theta, torch.promote_types(x.dtype, torch.float32), x.device)
    sin = -sin if inverse else sin
    low, high = x.chunk(2, dim=-1)
    turned = low * sin + high * cos
    low.copy_(low * cos - high * sin)
    high.copy_(turned)
    return "eager rope (4 mul, add, sub, 2 copy)"


@lru_cache(maxsize=64)
def _rotations(
    tokens: Tokens, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each (S, 1, D/2); angles in fp64, since positions times frequencies lose digits."""
    positions = torch.cat([torch.arange(*span, dtype=torch.float64) for span in tokens])
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = (positions[:, None] * frequencies).unsqueeze(1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def swiglu(gate: Tensor, up: Tensor, out: Tensor) -> str:
    """Fill out = silu(gate) * up."""
    torch.mul(torch.nn.functional.silu(gate), up, out=out)
    return "aten silu, mul"


def swiglu_backward(gate: Tensor, up: Tensor, dout: Tensor, dgate: Tensor, dup: Tensor) -> str:
    """Fill dgate and dup."""
    torch.mul(torch.nn.functional.silu(gate), dout, out=dup)
    torch.ops.aten.silu_backward.grad_input(dout * up, gate, grad_input=dgate)
    return "aten silu, 2 mul, silu_backward"
