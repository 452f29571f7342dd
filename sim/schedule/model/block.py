"""What one layer of a model computes: its tensors, and one line an equation.

The Llama block (arXiv:2302.13971 §2.2): RMSNorm, projections, rotary embedding, attention, output projection, residual;
RMSNorm, SwiGLU, residual. What a model has beside or instead is a line of ``block_of``. What is written, counted and
proved of a layer follows from here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from sim.schedule.ir.tensors import Tensor
from sim.schedule.model.equations import Around, Block, Equation, add, back, linear, mlp_in_tiles, norm, rope, swiglu
from sim.workload import ModelSpec

x, h1, middle, h2 = (Tensor(name, "activation", ("embed",)) for name in ("x", "h1", "middle", "h2"))
gate, up, act = (Tensor(name, "activation", ("ffn",)) for name in ("gate", "up", "act"))
q_raw, q, out = (Tensor(name, "activation", ("heads",)) for name in ("q_raw", "q", "out"))
k_raw, k, v = (Tensor(name, "activation", ("kv_heads",)) for name in ("k_raw", "k", "v"))
lse = Tensor("lse", "activation", ("heads",), numbers="accumulation")
rstd1, rstd2 = (Tensor(name, "activation", (), numbers="accumulation") for name in ("rstd1", "rstd2"))
following = x.later(1)

norm1, norm2 = (Tensor(name, "weight", ("embed",)) for name in ("norm1", "norm2"))
wq, wo = Tensor("wq", "weight", ("embed", "heads")), Tensor("wo", "weight", ("heads", "embed"))
wk, wv = (Tensor(name, "weight", ("embed", "kv_heads")) for name in ("wk", "wv"))
w_gate, w_up = (Tensor(name, "weight", ("embed", "ffn")) for name in ("w_gate", "w_up"))
w_down = Tensor("w_down", "weight", ("ffn", "embed"))


class Tile(NamedTuple):
    """An MLP in tiles of so many tokens, each computed again in backward: it saves what goes into it only."""

    tokens: int
    saves: bool
    """As of Equation."""


@lru_cache(maxsize=256)
def block_of(model: ModelSpec, tile: Tile | None = None) -> Block:
    """Return the block of a model's layers, with its MLP whole or in tiles; norms around that are not tiled."""
    normed = norm(x, norm1, h1, rstd1)
    projected = (linear(h1, wq, q_raw), linear(h1, wk, k_raw), linear(h1, wv, v))
    turned = (rope(q_raw, q), rope(k_raw, k))
    # attention: q, k, v -> out, lse; backward: q, k, v, out, lse, dout -> dq, dk, dv
    from_heads = linear(out, wo, middle)
    residual = add(x, middle, "residual of attention")
    normed_again = norm(middle, norm2, h2, rstd2)
    mlp = _mlp(h2, following, tile)
    second_residual = add(middle, following, "residual of mlp")
    return _block(
        forward=Around((normed, *projected, *turned), (from_heads, residual, normed_again, *mlp[0], second_residual)),
        backward=Around((*mlp[1], normed_again, second_residual, from_heads), (*turned, *projected, normed, residual)),
    )


def _mlp(given: Tensor, made: Tensor, tile: Tile | None) -> tuple[tuple[Equation, ...], tuple[Equation, ...]]:
    """Return the equations of an MLP, forward and in the order in which gradients are led through."""
    if tile:
        tiled = (mlp_in_tiles(given, w_gate, w_up, w_down, made, tile.tokens, saves=tile.saves),)
        return tiled, tiled
    widened = (linear(given, w_gate, gate), linear(given, w_up, up))
    activated, down = swiglu(gate, up, act), linear(act, w_down, made)
    return (*widened, activated, down), (down, activated, *widened)


def _block(forward: Around, backward: Around) -> Block:
    """Return a block of forward equations, of which ``backward`` has the order in which gradients are led through."""
    before = len(back(*backward.before))
    led = back(*backward.before, *backward.after)
    return Block(*(x, q, k, v, out), _saved(forward, led), forward, Around(led[:before], led[before:]))


def _saved(forward: Around, backward: tuple[Equation, ...]) -> tuple[Tensor, ...]:
    """Return what backward equations need of what forward ones make, in that order, but for attention's inputs."""
    results = [[tensor for one in part for tensor in reversed(one.results)] for part in forward]
    needed = {tensor for one in backward for tensor in one.operands} - {q, k, v}
    return tuple([tensor for tensor in dict.fromkeys((x, *results[0], out, *results[1])) if tensor in needed])
