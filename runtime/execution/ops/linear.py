"""Kernels of causal linear attention, chunk by chunk, with states in the data type of sums.

q, out, dout, dq (B, S, H, D); k, v, dk, dv (B, S, G, D), G key/value heads; states (B, G, D, D): of keys the sum of
k^T v, of gradients that of q^T dout, both divided by sqrt(D), so that products with a state need no factor.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def state_sum(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Return the sum of a^T b over tokens, and over the query heads that share one of ``heads``."""
    wide = torch.promote_types(a.dtype, torch.float32)
    found = torch.einsum("bshd,bshe->bhde", a.to(wide), b.to(wide)) * a.shape[-1] ** -0.5
    return found.unflatten(1, (heads, -1)).sum(dim=2)


def state_product(x: Tensor, state: Tensor, *, transposed: bool) -> Tensor:
    """Return x (B, S, H, D) times the state of the key/value head of each of its heads."""
    of_heads = state.repeat_interleave(x.shape[2] // state.shape[1], dim=1)
    return torch.einsum("bshd,bhed->bshe" if transposed else "bshd,bhde->bshe", x.to(state.dtype), of_heads)


def linear_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, chunk: int) -> None:
    """Write the attention of all tokens to each other to out."""
    state = _empty(k)
    for some in _chunks(q, chunk):
        qc, kc, vc = (x[:, some].to(state.dtype) for x in (q, k, v))
        found = state_product(qc, state, transposed=False)
        out[:, some] = found.add_(torch.einsum("bhij,bjhd->bihd", _scores(qc, kc), _of_heads(vc, qc)))
        state += state_sum(kc, vc, k.shape[2])


def linear_backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, grads: tuple[Tensor, Tensor, Tensor],
                    chunk: int) -> None:  # fmt: skip
    """Write the gradients of attention of all tokens to each other to ``grads``: forward over chunks that of q,
    backward over them those of k and v.
    """
    dq, dk, dv = grads
    state, dstate, groups = _empty(k), _empty(k), k.shape[2]
    for some in _chunks(q, chunk):
        kc, vc, do = (x[:, some].to(state.dtype) for x in (k, v, dout))
        found = state_product(do, state, transposed=True)
        dq[:, some] = found.add_(torch.einsum("bhij,bjhd->bihd", _scores(do, vc), _of_heads(kc, do)))
        state += state_sum(kc, vc, groups)
    for some in reversed(_chunks(q, chunk)):
        qc, kc, vc, do = (x[:, some].to(state.dtype) for x in (q, k, v, dout))
        for into, x, scores, other, transposed in (
            (dk, vc, _scores(do, vc), qc, True), (dv, kc, _scores(qc, kc), do, False),
        ):  # fmt: skip
            of_queries = torch.einsum("bhij,bihd->bjhd", scores, other).unflatten(2, (groups, -1)).sum(dim=3)
            into[:, some] = state_product(x, dstate, transposed=transposed).add_(of_queries)
        dstate += state_sum(qc, do, groups)


def _scores(a: Tensor, b: Tensor) -> Tensor:
    """Return a b^T / sqrt(D) of a chunk, (B, H, C, C), without what the causal mask drops."""
    return torch.einsum("bihd,bjhd->bhij", a, _of_heads(b, a)).mul_(a.shape[-1] ** -0.5).tril_()


def _of_heads(x: Tensor, queries: Tensor) -> Tensor:
    """Return keys or values of each query head."""
    return x.repeat_interleave(queries.shape[2] // x.shape[2], dim=2)


def _empty(k: Tensor) -> Tensor:
    batch, _, heads, dim = k.shape
    return k.new_zeros((batch, heads, dim, dim), dtype=torch.promote_types(k.dtype, torch.float32))


def _chunks(q: Tensor, chunk: int) -> list[slice]:
    return [slice(begin, min(begin + chunk, q.shape[1])) for begin in range(0, q.shape[1], chunk)]
