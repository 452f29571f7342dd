"""The Llama block (arXiv:2302.13971 §2.2): its tensors, and what it computes, one line an equation.

RMSNorm, projections, rotary embedding, attention, output projection, residual; RMSNorm, SwiGLU, residual. What is
written, counted and proved of a layer follows from here.
"""

from __future__ import annotations

from functools import lru_cache

from sim.schedule.ir.tensors import Tensor
from sim.schedule.model.equations import Around, Block, add, back, linear, mlp_in_tiles, norm, rope, swiglu

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

normed = norm(x, norm1, h1, rstd1)
to_q, to_k, to_v = linear(h1, wq, q_raw), linear(h1, wk, k_raw), linear(h1, wv, v)
turned_q, turned_k = rope(q_raw, q), rope(k_raw, k)
# attention: q, k, v -> out, lse; backward: q, k, v, out, lse, dout -> dq, dk, dv
from_heads = linear(out, wo, middle)
residual = add(x, middle, "residual of attention")
normed_again = norm(middle, norm2, h2, rstd2)
to_gate, to_up = linear(h2, w_gate, gate), linear(h2, w_up, up)
activated = swiglu(gate, up, act)
down = linear(act, w_down, following)
second_residual = add(middle, following, "residual of mlp")

LLAMA = Block(
    *(x, q, k, v, out),
    saved=(x, rstd1, h1, out, middle, rstd2, h2, gate, up, act),
    forward=Around(
        (normed, to_q, to_k, to_v, turned_q, turned_k),
        (from_heads, residual, normed_again, to_gate, to_up, activated, down, second_residual),
    ),
    backward=Around(
        back(down, activated, to_gate, to_up, normed_again, second_residual, from_heads),
        back(turned_q, turned_k, to_q, to_k, to_v, normed, residual),
    ),
)


@lru_cache(maxsize=64)
def with_tiles(tile: int, *, saves: bool) -> Block:
    """Return the block whose MLP is computed in tiles of so many tokens, each again in backward: it saves h2 only.

    ``saves`` as of Equation. The norm before it is not tiled.
    """
    mlp = mlp_in_tiles(h2, w_gate, w_up, w_down, following, tile, saves=saves)
    return LLAMA._replace(
        saved=(x, rstd1, h1, out, middle, rstd2, h2),
        forward=Around(LLAMA.forward.before, (from_heads, residual, normed_again, mlp, second_residual)),
        backward=Around(back(mlp, normed_again, second_residual, from_heads), LLAMA.backward.after),
    )
