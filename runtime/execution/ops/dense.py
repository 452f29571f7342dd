"""Kernels that look at each token by itself: matrix products, norms, rotary embedding, SwiGLU, embedding, loss.

Each says the name of what ran. What torch has no fused kernel for on this device is written out in a few, in place
where that can be; the names say so. What they hold beside their operands meanwhile is in
``sim.schedule.derive.workspace``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, assert_never

import torch
from msgspec import UNSET

from runtime.execution.ops.matrices import matrices
from runtime.execution.ops.vocabulary import run_end_kernel
from runtime.execution.tensors import Rotations, Storage
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.ops import (
    BiasedGemm,
    EagerGeGlu,
    EagerGeGluBackward,
    EagerNorm,
    EagerNormBackward,
    EagerSwiGlu,
    EagerSwiGluBackward,
    EndKernel,
    GeGlu,
    GeGluBackward,
    Gelu,
    GeluBackward,
    Gemm,
    GemmForm,
    MlpKernel,
    RmsNorm,
    RmsNormBackward,
    Rope,
    Scale,
    SwiGlu,
    SwiGluBackward,
    TokenKernel,
    TokenSum,
)

Tensor = torch.Tensor


def run_token_kernel(op: TokenKernel, storage: Storage) -> str:
    """Run a kernel that looks at each token by itself; return the name of the implementation."""
    given = [storage.read(view) for view in op.reads]
    if isinstance(op, RmsNorm | RmsNormBackward):
        x, weight, *rest = given
        if weight.shape[0] != x.shape[-1]:  # all heads as one
            x, rest = x.flatten(2), [*rest[:1], *(dout.flatten(2) for dout in rest[1:])]
        if isinstance(op, RmsNorm):
            found = rms_norm(x, weight, op.epsilon)
        else:
            found = rms_norm_backward(x, weight, *rest, frozen=op.dweight is None)
        for view, result in zip(op.writes, (found.out, found.second), strict=False):
            storage.put(view, result.view(view.shape))
        return found.name
    if isinstance(op, EagerNorm | EagerNormBackward):
        return _run_eager_norm(op, given, storage)
    if isinstance(op, EndKernel):
        return run_end_kernel(op, storage)
    results = [storage.write(view) for view in op.writes]
    if isinstance(op, Gemm):
        bias = given[2] if isinstance(op, BiasedGemm) else None
        factor = 1.0 if op.factor is UNSET else op.factor
        return gemm(op.form, given[0], given[1], results[0], accumulate=op.accumulate, bias=bias, factor=factor)
    if isinstance(op, TokenSum):
        torch.sum(given[0], dim=(0, 1), out=results[0].view(given[0].shape[2:]))
        return "aten sum"
    if isinstance(op, Rope):
        return rope(results[0][..., : op.rotated or None], op.tokens, op.theta, storage.rotations, inverse=op.inverse)
    if isinstance(op, MlpKernel):
        return _run_mlp_kernel(op, given, results)
    if isinstance(op, Scale):
        torch.mul(given[0], op.factor, out=results[0])
        return "aten mul"
    assert_never(op)


def _run_eager_norm(op: EagerNorm | EagerNormBackward, given: list[Tensor], storage: Storage) -> str:
    """Run a norm as eager modules do."""
    rows = storage.read(op.weight).shape[0]
    if rows != given[-1].shape[-1] or rows != given[0].shape[-1]:  # all heads as one
        given = [one.flatten(2) if one.dim() > 2 else one for one in given]
    made: tuple[Tensor, ...]
    if isinstance(op, EagerNorm):
        first, weight = given
        name, made = "eager rms norm (to, pow, mean, add, rsqrt, mul, to, mul)", eager_norm(first, weight, op.epsilon)
    else:
        normed = None if op.normed is None else given.pop(0)
        name, made = "eager rms norm backward, as autograd runs it", eager_norm_backward(normed, *given)
    for view, result in zip(op.writes, made, strict=True):
        storage.put(view, result.view(view.shape))
    return name


def _run_mlp_kernel(op: MlpKernel, given: list[Tensor], results: list[Tensor]) -> str:
    """Run what stands between the products of an MLP."""
    if isinstance(op, SwiGlu):
        return gated(given[0], given[1], results[0], _GELU if isinstance(op, GeGlu) else _SILU)
    if isinstance(op, SwiGluBackward):
        gate, up, dout = given
        return gated_backward(gate, up, dout, results[0], results[1], _GELU if isinstance(op, GeGluBackward) else _SILU)
    if isinstance(op, EagerSwiGlu):
        gate, up, out, active = *given, *results
        by = _GELU if isinstance(op, EagerGeGlu) else _SILU
        torch.mul(by.forward(gate, active), up, out=out)
        return f"aten {by.name}, mul"
    if isinstance(op, EagerSwiGluBackward):
        (gate, up, active, dout), (dgate, dup) = given, results
        by = _GELU if isinstance(op, EagerGeGluBackward) else _SILU
        torch.mul(dout, active, out=dup)
        by.backward(dout * up, gate, dgate)
        return f"aten 2 mul, {by.name}_backward"
    if isinstance(op, Gelu):
        _GELU.forward(given[0], results[0])
        return "aten gelu"
    if isinstance(op, GeluBackward):
        _GELU.backward(given[1], given[0], results[0])
        return "aten gelu_backward"
    assert_never(op)


def gemm(
    form: GemmForm,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    accumulate: bool,
    bias: Tensor | None = None,
    factor: float = 1.0,
) -> str:
    """Fill ``out`` as the op Gemm says; tokens, batch and heads are folded into the two sides of a matrix. Where some
    tokens of each sequence do not lie in one piece, there is a product for each sequence, and no copy.
    """
    sides = {"nn": (a, out), "nt": (a, out), "tn": (a, b)}[form]
    products = matrices(*sides)
    for number, (left, other) in enumerate(products):
        if form == "tn":
            left, right, into = left.T, other, out  # noqa: PLW2901 - of the three forms
            adds = accumulate or number > 0  # all sequences make one sum
        else:
            right, into, adds = b if form == "nn" else b.T, other, accumulate
        if bias is not None:
            torch.addmm(bias, left, right, out=into)
        elif adds or factor != 1:
            into.addmm_(left, right, beta=int(adds), alpha=factor)
        else:
            torch.mm(left, right, out=into)
    name = "aten addmm" if bias is not None else "aten addmm_" if accumulate else "aten mm"
    return name if len(products) == 1 else f"{name}, {len(products)} sequences apart"


class Normed(NamedTuple):
    """Result of RMSNorm, or of its backward pass."""

    out: Tensor
    """(B, S, E): the output, or the gradient of x."""
    second: Tensor
    """(B, S): what x was multiplied by, in the accumulation data type; or (E,): the gradient of the weight, which means
    nothing where that is frozen."""
    name: str


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Normed:
    """Return the norm of x (B, S, E), or (B, S, H, D), by weight (E,), or (D,), and what x was multiplied by."""
    if not x.is_cpu:
        out, rstd = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, epsilon)  # noqa: SLF001 - what nn.RMSNorm runs
        return Normed(out, rstd.squeeze(-1), "aten fused rms norm")
    rstd = torch.linalg.vector_norm(x, dim=-1, dtype=_wide(x)).square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    normed = (x * rstd.unsqueeze(-1)).mul_(weight)
    return Normed(normed.to(x.dtype), rstd, "eager rms norm (vector_norm, square, div, add, rsqrt, 2 mul)")


def rms_norm_backward(x: Tensor, weight: Tensor, rstd: Tensor, dout: Tensor, *, frozen: bool = False) -> Normed:
    """Return the gradients of x and weight, of a frozen one that of x alone.

    With n = x * rstd and g = dout * weight: dx = rstd * (g - n * mean(g * n)), dweight = sum of dout * n.
    """
    scale = rstd.unsqueeze(-1)
    if not x.is_cpu:
        fused = torch.ops.aten._fused_rms_norm_backward  # noqa: SLF001
        dx, dweight = fused(dout, x, weight.shape, scale, weight, [True, not frozen])
        return Normed(dx, weight if frozen else dweight, "aten fused rms norm backward")
    normed = x * scale
    dweight = weight if frozen else (dout * normed).sum(dim=tuple(range(x.dim() - 1)))
    grad = dout.to(normed.dtype, copy=True).mul_(weight)
    inner = torch.linalg.vecdot(grad, normed).div_(x.shape[-1]).unsqueeze(-1)
    dx = grad.addcmul_(normed, inner, value=-1).mul_(scale)
    return Normed(dx.to(x.dtype), dweight.to(weight.dtype), "eager rms norm backward (4 mul, sum, vecdot, addcmul)")


def eager_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the norm of x (B, S, E), or (B, S, H, D), by weight (E,), or (D,), as LlamaRMSNorm computes it; with the
    copy of x in the accumulation data type, what that was multiplied by, and what the weight was.
    """
    wide = x.to(_wide(x), copy=True)
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    normed = (wide * rstd).to(x.dtype)
    return weight * normed, wide, rstd.squeeze(-1), normed


def eager_norm_backward(
    normed: Tensor | None, weight: Tensor, wide: Tensor, rstd: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of x and weight as autograd computes them, op by op, holding what it holds; without
    ``normed`` that of x alone.
    """
    gradients: list[Tensor] = []
    if normed is not None:
        of_weight, led = dout * normed, dout * weight
        gradients.append(of_weight.sum(dim=tuple(range(normed.dim() - 1))))
        del of_weight
    else:
        led = dout * weight
    led, rstd = led.to(wide.dtype), rstd.unsqueeze(-1)
    of_rstd, dwide = led * wide, led * rstd
    del led
    of_rstd = of_rstd.sum(-1, keepdim=True)
    of_mean = of_rstd * (-0.5 * rstd.pow(3))
    del of_rstd
    of_power = of_mean.expand(wide.shape) / wide.shape[-1]
    del of_mean
    power = wide.pow(1)
    twice = power * 2
    through = of_power * twice
    del power, twice, of_power  # which torch's one expression of all three holds until here
    dwide = dwide + through
    del through
    return dwide.to(dout.dtype), *gradients


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def rope(x: Tensor, tokens: Tokens, theta: float, known: Rotations, *, inverse: bool) -> str:
    """Rotate x (B, S, H, D) in place: the pair (i, i + D/2) by position * theta^(-2i/D); ``known`` keeps the tables."""
    rotation = (tokens, x.shape[-1], theta, _wide(x), x.device)
    if rotation not in known:
        known[rotation] = _tables(*rotation)
    cos, sin = known[rotation]
    sign = -1 if inverse else 1
    low, high = x.chunk(2, dim=-1)
    turned = (high * cos).addcmul_(low, sin, value=sign)
    low.copy_((low * cos).addcmul_(high, sin, value=-sign))
    high.copy_(turned)
    return "eager rope (2 mul, 2 addcmul, 2 copy)"


def _tables(
    tokens: Tokens, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine; angles in fp64, since positions times frequencies lose digits."""
    positions = torch.cat([torch.arange(*span, dtype=torch.float64) for span in tokens])
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = (positions[:, None] * frequencies).unsqueeze(1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


class _Activation(NamedTuple):
    """A function of each element of a gate."""

    name: str
    forward: Callable[[Tensor, Tensor], Tensor]
    """Of x, into out; returns that."""
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Of dout and x, into dx."""


_SILU = _Activation(
    "silu",
    lambda x, out: torch.ops.aten.silu.out(x, out=out),
    lambda dout, x, dx: torch.ops.aten.silu_backward.grad_input(dout, x, grad_input=dx),
)
_GELU = _Activation(
    "gelu",
    lambda x, out: torch.ops.aten.gelu.out(x, approximate="tanh", out=out),
    lambda dout, x, dx: torch.ops.aten.gelu_backward.grad_input(dout, x, approximate="tanh", grad_input=dx),
)


def gated(gate: Tensor, up: Tensor, out: Tensor, by: _Activation) -> str:
    """Fill out = silu(gate) * up, or with another activation."""
    by.forward(gate, out).mul_(up)
    return f"aten {by.name}, mul"


def gated_backward(gate: Tensor, up: Tensor, dout: Tensor, dgate: Tensor, dup: Tensor, by: _Activation) -> str:
    """Fill dgate and dup."""
    by.forward(gate, dup).mul_(dout)
    torch.mul(dout, up, out=dgate)
    by.backward(dgate, gate, dgate)
    return f"aten {by.name}, 2 mul, {by.name}_backward"
