"""torchtitan's Llama and Qwen3, as its code has them: torch alone, eager, bf16 parameters as FSDP2 gathers them.

``models/common`` and ``components/loss.py`` of torchtitan 0.3.0, without tensor parallelism. torch runs ``nn.RMSNorm``
as one op on CUDA, which the meta device takes apart: its kernels are noted launch by launch.
"""

from __future__ import annotations

import functools

import torch
from torch import fx
from torch.nn import functional

from calibrate.software.counting.count import FlashAttention, Ready, Run, received, run
from calibrate.software.counting.layers import NormKernels, heads_of, weight
from calibrate.software.counting.sizes import Sizes
from calibrate.software.libraries.compiled import compiled, in_kernels

VERSION = "0.3.0"
NORM = NormKernels("_fused_rms_norm", "_fused_rms_norm_backward")
"""Of torch.nn.RMSNorm in torch 2.13 on Hopper and Blackwell: ``torch/_vendor/quack/rmsnorm.py``."""


def rotary(sizes: Sizes) -> Run:
    """Return what ComplexRoPE runs on queries and keys, with positions as data loaders give them."""

    def build(sizes: Sizes) -> Ready:
        q, k = heads_of(sizes, "heads", "batch", "sequence"), heads_of(sizes, "kv_heads", "batch", "sequence")
        cache, positions = _cache(sizes), _positions(sizes)

        def forward() -> tuple[torch.Tensor, ...]:
            _check(positions, cache)
            return _complex(q, k, cache, positions)

        return Ready(forward, (q, k))

    return run(build, sizes)


def _check(positions: torch.Tensor, cache: torch.Tensor) -> None:
    """Check positions on the GPU, as is done where nothing is compiled: ``_maybe_check_max_pos``."""
    torch._assert_async(torch.all(positions <= cache.shape[0] - 1))  # noqa: SLF001 - its public name


def _gathered(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return angles of positions: ``_reshape_for_broadcast``."""
    batch, sequence, width = *positions.shape, cache.shape[-1]
    index = positions.view(batch, sequence, 1, 1).expand(batch, sequence, 1, width)
    return torch.gather(cache[None, :, None, :].expand(batch, -1, -1, -1), dim=1, index=index)


def _complex(
    q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs of neighbours: ``apply_rotary_emb`` of ComplexRoPE."""
    angles = _gathered(cache, positions)
    q_, k_ = (torch.view_as_complex(one.float().reshape(*one.shape[:-1], -1, 2)) for one in (q, k))
    q_out, k_out = (torch.view_as_real(one * angles).flatten(3) for one in (q_, k_))
    return q_out.type_as(q), k_out.type_as(k)


def rotary_of_halves(sizes: Sizes) -> Run:
    """Return what CosSinRoPE runs on queries and keys, with positions: Qwen3's."""

    def build(sizes: Sizes) -> Ready:
        q, k = heads_of(sizes, "heads", "batch", "sequence"), heads_of(sizes, "kv_heads", "batch", "sequence")
        cache = torch.empty(sizes["sequence"], 2 * sizes["head_dim"], dtype=torch.float32)
        positions = _positions(sizes)

        def forward() -> tuple[torch.Tensor, ...]:
            _check(positions, cache)
            return _halves(q, k, cache, positions)

        return Ready(forward, (q, k))

    return run(build, sizes)


def _halves(
    q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate halves of heads: ``apply_rotary_emb`` of CosSinRoPE."""
    angles = _gathered(cache, positions)
    cos, sin = angles.chunk(2, dim=-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        first, second = wide[..., : wide.shape[-1] // 2], wide[..., wide.shape[-1] // 2 :]
        return ((wide * cos) + (torch.cat((-second, first), dim=-1) * sin)).type_as(x)

    return rotated(q), rotated(k)


def attention(sizes: Sizes) -> Run:
    """Return what GQAttention runs with FusedQKVLinear and a fused attention kernel, less the rotary embedding."""
    return run(_attention, sizes).without(rotary(sizes))


def _attention(sizes: Sizes) -> Ready:
    x, cache, positions = _stream(sizes), _cache(sizes), _positions(sizes)
    weights = _attention_weights(sizes)

    def forward() -> tuple[torch.Tensor]:
        _check(positions, cache)
        return (_attended(sizes, x, *weights, cache, positions),)

    return Ready(forward, (x,))


def _attention_weights(sizes: Sizes) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    heads, kv_heads, each = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
    return weight((heads + 2 * kv_heads) * each, sizes["hidden"]), weight(sizes["hidden"], heads * each)


def _attended(
    sizes: Sizes,
    x: torch.Tensor,
    of_qkv: torch.Tensor,
    of_out: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    batch, sequence, kv_heads, each = (sizes[name] for name in ("batch", "sequence", "kv_heads", "head_dim"))
    groups = sizes["heads"] // kv_heads
    qkv = functional.linear(x, of_qkv).view(batch, sequence, kv_heads, groups + 2, each)
    parts = torch.split(qkv, [groups, 1, 1], dim=-2)
    q, k, v = (one.reshape(batch, sequence, -1, each).contiguous() for one in parts)
    q, k = _complex(q, k, cache, positions)
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    with FlashAttention():
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=None, enable_gqa=True)
    return functional.linear(out.transpose(1, 2).contiguous().flatten(2), of_out)


def layer(sizes: Sizes) -> Run:
    """Return what a compiled block of Llama runs and keeps; what computes complex numbers Inductor leaves to ATen."""
    graphs: list[fx.Graph] = []

    def build(sizes: Sizes) -> Ready:
        norms = tuple(weight(sizes["hidden"]) for _ in range(2))
        x, cache, positions = _stream(sizes), _cache(sizes), _positions(sizes)

        def forward(
            norms: tuple[torch.Tensor, ...],
            attention: tuple[torch.Tensor, ...],
            mlp: tuple[torch.Tensor, ...],
            x: torch.Tensor,
            cache: torch.Tensor,
            positions: torch.Tensor,
        ) -> torch.Tensor:
            first, second = (functools.partial(_normed, one) for one in norms)
            of_qkv, of_out = attention
            x = x + _attended(sizes, first(x), of_qkv, of_out, cache, positions)
            return x + _fed_forward(second(x), *mlp)

        weights = norms, _attention_weights(sizes), _mlp_weights(sizes)
        return compiled(forward, (x,), graphs, *weights, x, cache, positions)

    return in_kernels(run(build, sizes), graphs)


def _normed(of: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, of.shape, of, 1e-5)


def mlp(sizes: Sizes) -> Run:
    """Return what FeedForward runs."""

    def build(sizes: Sizes) -> Ready:
        x, weights = _stream(sizes), _mlp_weights(sizes)
        return Ready(lambda: (_fed_forward(x, *weights),), (x,))

    return run(build, sizes)


def _mlp_weights(sizes: Sizes) -> tuple[torch.nn.Parameter, ...]:
    shape = sizes["ffn"], sizes["hidden"]
    return weight(*shape), weight(*reversed(shape)), weight(*shape)


def _fed_forward(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    return functional.linear(functional.silu(functional.linear(x, w1)) * functional.linear(x, w3), w2)


def embedding(sizes: Sizes) -> Run:
    """Return what the embedding of tokens runs."""

    def build(sizes: Sizes) -> Ready:
        table = weight(sizes["vocab"], sizes["hidden"])
        tokens = torch.empty(sizes["batch"], sizes["sequence"], dtype=torch.int64)
        return Ready(lambda: (functional.embedding(tokens, table),))

    return run(build, sizes)


def loss(sizes: Sizes) -> Run:
    """Return what ChunkedLossWrapper runs beside its chunks: the gradient in fp32, filled chunk by chunk, and cast."""

    def build(sizes: Sizes) -> Ready:
        x = torch.empty(sizes["batch"], sizes["sequence"], sizes["hidden"], dtype=torch.bfloat16)

        def forward() -> tuple[()]:
            gradients = torch.zeros_like(x, dtype=torch.float32)
            torch.zeros((), dtype=torch.float32)
            gradients.to(x.dtype)
            return ()

        return Ready(forward)

    return run(build, sizes)


def chunk(sizes: Sizes) -> Run:
    """Return what one more chunk of ChunkedLossWrapper runs, all of it in forward, and the most that is allocated."""
    three, two = (run(functools.partial(_in_chunks, chunks), sizes) for chunks in (3, 2))
    return three.without(two)._replace(kept=[])


def _in_chunks(chunks: int, sizes: Sizes) -> Ready:
    """Return a loss of so many chunks, each of which runs backward before the next.

    FSDP2 adds the gradient of the head to one in fp32, ``accumulate_unsharded_grad_if_needed`` of its parameters.
    """
    head = weight(sizes["vocab"], sizes["hidden"])
    chunk, hidden = sizes["chunk"], sizes["hidden"]
    x = torch.empty(1, chunks * chunk, hidden, dtype=torch.bfloat16)
    labels = torch.empty(1, chunks * chunk, dtype=torch.int64)
    valid, gradients = torch.empty((), dtype=torch.int64), torch.empty(1, chunks * chunk, hidden)
    total, of_head = torch.empty(()), torch.empty(head.shape)

    def forward() -> tuple[()]:
        nonlocal total, of_head
        of_x = [one.clone().detach().requires_grad_() for one in torch.split(x, chunk, dim=1)]
        of_labels = [one.clone() for one in torch.split(labels, chunk, dim=1)]
        for at, (part, given) in enumerate(zip(of_x, of_labels, strict=True)):
            logits = functional.linear(part, head)
            each = functional.cross_entropy(logits.flatten(0, 1).float(), given.flatten(0, 1), reduction="sum") / valid
            total = total + each.detach()
            each.backward()
            assert part.grad is not None
            assert head.grad is not None
            of_head += head.grad
            head.grad = None
            gradients[:, at * chunk : (at + 1) * chunk] = part.grad.to(torch.float32)
            part.grad = None
        return ()

    return Ready(forward)


def _stream(sizes: Sizes) -> torch.Tensor:
    return received(torch.bfloat16, sizes["batch"], sizes["sequence"], sizes["hidden"])


def _cache(sizes: Sizes) -> torch.Tensor:
    return torch.empty(sizes["sequence"], sizes["head_dim"] // 2, dtype=torch.complex64)


def _positions(sizes: Sizes) -> torch.Tensor:
    return torch.empty(sizes["batch"], sizes["sequence"], dtype=torch.int64)
