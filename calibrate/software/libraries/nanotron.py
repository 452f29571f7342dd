"""nanotron's Llama, as its code has it: nanotron imports flash-attn, whose Triton kernels are noted launch by launch.

``models/llama.py`` and ``parallel/tensor_parallel/functional.py`` of nanotron 0.4; ``layers/rotary.py`` and
``ops/triton`` of flash-attn 2.7.4. Activations are ``[sequence, batch, …]``. What is counted has one rank of tensor
parallelism; ``tensor_parallel.py`` has the products of several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from calibrate.software.counting.count import Ready, Run, received, run
from calibrate.software.counting.layers import (
    NormKernels,
    RmsNorm,
    heads_of,
    stream,
    vocabulary_gradient,
    vocabulary_loss,
    weight,
)
from calibrate.software.counting.log import launch
from calibrate.software.counting.sizes import Sizes

VERSION = "0.4"
FLASH_ATTN = "2.7.4"
NORM = NormKernels("_layer_norm_fwd_1pass_kernel", "_layer_norm_bwd_kernel")
"""Of TritonRMSNorm: ops/triton/layer_norm.py of flash-attn, ``LayerNormFn`` without a residual."""


class _Rotary(torch.autograd.Function):
    """layers/rotary.py of flash-attn, ``ApplyRotaryEmb``, interleaved and not in place: queries."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return x, rotated."""
        ctx.save_for_backward(cos, sin)
        return _rotated(x, torch.empty_like(x), cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of x."""
        return _rotated(gradient, torch.empty_like(gradient), *ctx.saved_tensors), None, None


class _RotaryOfKeys(torch.autograd.Function):
    """layers/rotary.py of flash-attn, ``ApplyRotaryEmbKV_``: keys of keys and values, in place."""

    @staticmethod
    def forward(ctx: Any, kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return both, keys rotated."""
        ctx.save_for_backward(cos, sin)
        _rotated(kv[:, :, 0], kv[:, :, 0], cos, sin)
        return kv

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of both."""
        _rotated(gradient[:, :, 0], gradient[:, :, 0], *ctx.saved_tensors)
        return gradient, None, None


def _rotated(x: torch.Tensor, to: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    launch("rotary_kernel", (x, cos, sin), (to,))
    return to


class _CrossEntropy(torch.autograd.Function):
    """parallel/tensor_parallel/functional.py, ``_ShardedCrossEntropy``: softmax and its gradient in place."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token."""
        logits_max = torch.max(logits, dim=-1)[0]
        logits = logits - logits_max.unsqueeze(dim=-1)
        return vocabulary_loss(ctx, logits, target)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the logits."""
        return vocabulary_gradient(ctx, gradient), None


def rotary(sizes: Sizes) -> Run:
    """Return what flash-attn's RotaryEmbedding runs on queries, and on keys that are packed with values."""
    return run(functools.partial(_rotary, "kv_heads"), sizes)


def _rotary(kv_heads: str, sizes: Sizes) -> Ready:
    q = heads_of(sizes, "heads", "batch", "sequence")
    kv = received(torch.bfloat16, sizes["batch"], sizes["sequence"], 2, sizes[kv_heads], sizes["head_dim"])
    angles = _angles(sizes)
    return Ready(lambda: (_Rotary.apply(q, *angles), _RotaryOfKeys.apply(kv, *angles)), (q, kv))


def attention(sizes: Sizes) -> Run:
    """Return what CausalSelfAttention runs with fewer heads of keys than of queries, less the rotary embedding."""
    return _attention("kv_heads", sizes)


def attention_mha(sizes: Sizes) -> Run:
    """Return what it runs with as many heads of keys as of queries, less the rotary embedding."""
    return _attention("heads", sizes)


def attention_alone(sizes: Sizes) -> Run:
    """Return what ``attention`` runs on one sequence at once."""
    return _attention("kv_heads", sizes, alone=True)


def attention_mha_alone(sizes: Sizes) -> Run:
    """Return what ``attention_mha`` runs on one sequence at once."""
    return _attention("heads", sizes, alone=True)


def _attention(kv_heads: str, sizes: Sizes, *, alone: bool = False) -> Run:
    whole = run(functools.partial(_attended, kv_heads, alone), sizes)
    return whole.without(run(functools.partial(_rotary, kv_heads), sizes))


def _attended(kv_heads: str, alone: bool, sizes: Sizes) -> Ready:
    attend, x = Attention(sizes, kv_heads=kv_heads, alone=alone), stream(sizes)
    return Ready(lambda: (attend(x),), (x,))


Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The product of activations with a weight, as functional.linear has it."""


class Attention(torch.nn.Module):
    """CausalSelfAttention with CoreAttention."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        kv_heads: str = "kv_heads",
        alone: bool = False,
        column: Linear = functional.linear,
        row: Linear = functional.linear,
        flash: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        """``sizes`` has the heads of this rank; ``flash`` takes what ``flash_attn_varlen_func`` does. ``alone``: the
        output lies in memory as o_proj takes it, as that of one sequence does.
        """
        super().__init__()
        self._alone = alone
        self._batch, self._sequence, self._each = (sizes[name] for name in ("batch", "sequence", "head_dim"))
        self._heads, self._kv_heads = sizes["heads"], sizes[kv_heads]
        self._column, self._row, self._flash = column, row, flash or _flash
        self.qkv = weight((self._heads + 2 * self._kv_heads) * self._each, sizes["hidden"])
        self.o = weight(sizes["hidden"], self._heads * self._each)
        self._angles, self._mask = _angles(sizes), torch.empty(self._batch, self._sequence, dtype=torch.bool)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to the residual stream."""
        batch, sequence, each = self._batch, self._sequence, self._each
        qkv = self._column(x, self.qkv)
        if self._kv_heads == self._heads:
            q, k, v = qkv.view(sequence, batch, 3, self._heads, each).permute(2, 1, 0, 3, 4).contiguous()
        else:
            states = torch.split(qkv, [n * each for n in (self._heads, self._kv_heads, self._kv_heads)], dim=-1)
            q, k, v = (one.transpose(0, 1).contiguous().view(batch, sequence, -1, each) for one in states)
        kv = torch.cat([k.unsqueeze(0), v.unsqueeze(0)], dim=0).permute(1, 2, 0, 3, 4).contiguous()
        q, kv = _Rotary.apply(q, *self._angles), _RotaryOfKeys.apply(kv, *self._angles)
        k, v = torch.split(kv, 1, dim=2)
        q, k, v = (one.view(batch * sequence, -1, each) for one in (q, k, v))
        ends = []
        for _ in range(2):  # of queries and of keys, each layer anew
            end = torch.zeros(batch + 1, dtype=torch.int32)
            torch.cumsum(self._mask.sum(-1, dtype=torch.int32), dim=0, dtype=torch.int32, out=end[1:])
            ends.append(end)
        out = self._flash(q, k, v, *ends, sequence, sequence)
        if self._alone:
            return self._row(out.view(sequence, batch, self._heads * each), self.o)
        return self._row(out.contiguous().view(batch, sequence, self._heads * each).transpose(0, 1), self.o)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *ends: Any) -> torch.Tensor:
    """Return causal attention: flash_attn_varlen_func is the same kernel."""
    return torch.ops.aten._flash_attention_forward(q, k, v, *ends, 0.0, True, False)[0]  # noqa: SLF001 - nothing public takes documents


class Mlp(torch.nn.Module):
    """MLP with GLUActivation, gate and up in one product."""

    def __init__(self, sizes: Sizes, *, column: Linear = functional.linear, row: Linear = functional.linear) -> None:
        super().__init__()
        self._column, self._row = column, row
        self.up, self.down = weight(2 * sizes["ffn"], sizes["hidden"]), weight(sizes["hidden"], sizes["ffn"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to the residual stream."""
        merged = self._column(x, self.up)
        gate_states, up_states = torch.split(merged, merged.shape[-1] // 2, dim=-1)
        return self._row(functional.silu(gate_states) * up_states, self.down)


class _Norm(torch.nn.Module):
    """TritonRMSNorm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight, self._multiprocessors = weight(sizes["hidden"]), sizes["multiprocessors"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, normed."""
        return RmsNorm.apply(x, self.weight, NORM, self._multiprocessors)


class Layer(torch.nn.Module):
    """LlamaDecoderLayer."""

    def __init__(self, sizes: Sizes, *, attend: Attention, mlp: Mlp) -> None:
        super().__init__()
        self.attend, self.mlp = attend, mlp
        self.before_attention, self.before_mlp = _Norm(sizes), _Norm(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream behind it."""
        x = self.attend(self.before_attention(x)) + x
        return self.mlp(self.before_mlp(x)) + x


def mlp(sizes: Sizes) -> Run:
    """Return what the MLP runs, gate and up in one product."""

    def build(sizes: Sizes) -> Ready:
        module, x = Mlp(sizes), stream(sizes)
        return Ready(lambda: (module(x),), (x,))

    return run(build, sizes)


def embedding(sizes: Sizes) -> Run:
    """Return what the embedding of tokens runs."""

    def build(sizes: Sizes) -> Ready:
        table = weight(sizes["vocab"], sizes["hidden"])
        tokens = torch.empty(sizes["batch"], sizes["sequence"], dtype=torch.int64)
        return Ready(lambda: (functional.embedding(tokens.transpose(0, 1), table),))

    return run(build, sizes)


def loss(sizes: Sizes) -> Run:
    """Return what head, cast to fp32 and Loss run: the fp32 logits live on until all of it has run forward."""

    def build(sizes: Sizes) -> Ready:
        x, head = stream(sizes), weight(sizes["vocab"], sizes["hidden"])
        labels = torch.empty(sizes["batch"], sizes["sequence"], dtype=torch.int64)
        mask = torch.empty(sizes["batch"], sizes["sequence"], dtype=torch.bool)

        def forward() -> tuple[torch.Tensor]:
            logits = functional.linear(x, head).float()
            each = _CrossEntropy.apply(logits, labels.transpose(0, 1).contiguous()).transpose(0, 1)
            return ((each * mask).sum(dtype=torch.float) / mask.sum(),)

        return Ready(forward, (x,))

    return run(build, sizes)


def _angles(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of half a head, cached in bf16."""
    cos, sin = (torch.empty(sizes["sequence"], sizes["head_dim"] // 2, dtype=torch.bfloat16) for _ in range(2))
    return cos, sin
