"""What one layer of a model computes: its tensors, and one line an equation.

The Llama block (arXiv:2302.13971 §2.2): RMSNorm, projections, rotary embedding, attention, output projection, residual;
RMSNorm, SwiGLU, residual. What a model has beside or instead is a line of ``block_of``. What is written, counted and
proved of a layer follows from here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from sim.base.errors import InputError
from sim.schedule.ir.tensors import Tensor
from sim.schedule.model.adapters import Linear, adapted, adapts_mlp
from sim.schedule.model.equations import (
    Around,
    Block,
    Equation,
    add,
    back,
    eagerly,
    geglu,
    gelu,
    joined,
    linear,
    mlp_in_tiles,
    norm,
    rope,
    scaled,
    swiglu,
)
from sim.words.options import ModulesName, ProductsName
from sim.words.workload import LoraTarget, ModelSpec, QkNormName

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

attended, mixed = (Tensor(name, "activation", ("embed",)) for name in ("attended", "mixed"))
post_norm1, post_norm2 = (Tensor(name, "weight", ("embed",)) for name in ("post_norm1", "post_norm2"))
rstd_post1, rstd_post2 = (
    Tensor(name, "activation", (), numbers="accumulation") for name in ("rstd_post1", "rstd_post2")
)

bq, bo = Tensor("bq", "weight", ("heads",)), Tensor("bo", "weight", ("embed",))
bk, bv = (Tensor(name, "weight", ("kv_heads",)) for name in ("bk", "bv"))
b_gate, b_up = (Tensor(name, "weight", ("ffn",)) for name in ("b_gate", "b_up"))
b_down = Tensor("b_down", "weight", ("embed",))
BIASES = (bq, bk, bv, bo, b_gate, b_up, b_down)

q_normed, k_normed = Tensor("q_normed", "activation", ("heads",)), Tensor("k_normed", "activation", ("kv_heads",))
norm_q, norm_k = (Tensor(name, "weight", ("head_dim",)) for name in ("norm_q", "norm_k"))
rstd_q = Tensor("rstd_q", "activation", ("num_heads",), numbers="accumulation")
rstd_k = Tensor("rstd_k", "activation", ("num_kv_heads",), numbers="accumulation")
norm_all_q, norm_all_k = Tensor("norm_all_q", "weight", ("heads",)), Tensor("norm_all_k", "weight", ("kv_heads",))
rstd_all_q, rstd_all_k = (
    Tensor(name, "activation", (), numbers="accumulation") for name in ("rstd_all_q", "rstd_all_k")
)


class Tile(NamedTuple):
    """An MLP in tiles of so many tokens, each computed again in backward: it saves what goes into it only."""

    tokens: int
    saves: bool
    """As of Equation."""


@lru_cache(maxsize=256)
def block_of(
    model: ModelSpec, tile: Tile | None = None, modules: ModulesName = "fused", products: ProductsName = "apart"
) -> Block:
    """Return the block of a model's layers, with its MLP whole or in tiles; norms around that are not tiled. Eager
    modules make and keep more than fused ones, of the same gradients; joined products make the same as those apart.
    """
    passes = _passes(model, tile, modules, products)
    if modules != "fused":
        eager = partial(eagerly, norms=modules == "eager")
        passes = [Around(*(tuple(map(eager, part)) for part in around)) for around in passes]
    return _block(*passes)


def _passes(model: ModelSpec, tile: Tile | None, modules: ModulesName, products: ProductsName) -> list[Around]:
    """Return the forward equations of a layer, and the same in the order in which gradients are led through."""
    biases, before, after = model.biases or (), model.norms != "after", bool(model.norms)
    frozen = model.is_frozen

    def product(
        target: LoraTarget, x: Tensor, weight: Tensor, made: Tensor, bias: Tensor | None, led: Tensor | None = None
    ) -> Linear:
        """Return a linear layer with its adapter."""
        return adapted(model, target, linear(x, weight, made, bias, led=led, frozen=frozen), led, modules)

    # norm, projections, rotary embedding
    normed = (norm(x, norm1, h1, rstd1, frozen=frozen),) if before else ()
    of_tokens = h1 if before else x
    of_q, of_k, of_v = (bq, bk, bv) if "qkv" in biases else (None, None, None)
    turns = model.rotary_dims != 0
    of_views = products == "joined-views" and model.num_heads == model.num_kv_heads
    raw = (q_raw._replace(beside=2), k_raw) if of_views else (q_raw, k_raw)
    to_turn = ((q_normed, k_normed) if model.qk_norm else raw) if turns else (q, k)
    to_norm = (q_raw, k_raw) if model.qk_norm else to_turn
    together = _together if products == "apart" else _joined
    projected = together(
        product("q", of_tokens, wq, to_norm[0], of_q),
        product("k", of_tokens, wk, to_norm[1], of_k),
        product("v", of_tokens, wv, v, of_v),
    )
    evened = _qk_norms(model.qk_norm, *to_turn, frozen=frozen) if model.qk_norm else ()
    turned = tuple(map(rope, to_turn, (q, k))) if turns else ()
    # attention: q, k, v -> out, lse; backward: q, k, v, out, lse, dout -> dq, dk, dv
    of_out = bo if "out" in biases else None
    if model.parallel_residual:
        from_heads = product("o", out, wo, middle, of_out, following)
        mlp = _mlp(model, h1, following, tile, product, together)
        both, residual = add(middle, following, "sum of both")._replace(backward=()), add(x, following, "residual")
        return [
            Around(
                (*normed, *projected.forward, *evened, *turned), (*from_heads.forward, *mlp.forward, both, residual)
            ),
            Around((*mlp.back, *from_heads.back), (*turned, *evened, *projected.back, *normed, residual)),
        ]
    # output projection, residual; norm, MLP, residual
    factor = model.residual_scale
    from_heads = product("o", out, wo, attended if after or factor else middle, of_out)
    behind = (norm(attended, post_norm1, middle, rstd_post1, frozen=frozen),) if after else ()
    behind = (scaled(attended, middle, factor, "scale attention"),) if factor else behind
    residual = add(x, middle, "residual of attention")
    normed_again = (norm(middle, norm2, h2, rstd2, frozen=frozen),) if before else ()
    mlp = _mlp(model, h2 if before else middle, mixed if after or factor else following, tile, product, together)
    last = (norm(mixed, post_norm2, following, rstd_post2, frozen=frozen),) if after else ()
    last = (scaled(mixed, following, factor, "scale mlp"),) if factor else last
    second_residual = add(middle, following, "residual of mlp")
    return [
        Around(
            (*normed, *projected.forward, *evened, *turned),
            (*from_heads.forward, *behind, residual, *normed_again, *mlp.forward, *last, second_residual),
        ),
        Around(
            (*last, *mlp.back, *normed_again, second_residual, *behind, *from_heads.back),
            (*turned, *evened, *projected.back, *normed, residual),
        ),
    ]


def _together(*layers: Linear) -> Linear:
    """Return several linear layers of one input, one behind the other."""
    return Linear(*(tuple([one for part in parts for one in part]) for parts in zip(*layers, strict=True)))


def _joined(*layers: Linear) -> Linear:
    """Return them as one product; those with adapters are apart, and so is one alone."""
    own = [one.forward for one in layers]
    if len(own) == 1 or any(len(forward) > 1 for forward in own):
        return _together(*layers)
    both = (joined(*[equation for (equation,) in own]),)
    return Linear(both, both)


def _qk_norms(kind: QkNormName, of_q: Tensor, of_k: Tensor, *, frozen: bool) -> tuple[Equation, ...]:
    """Return the norms of q and k behind their projections."""
    of_heads = kind == "head"
    weights = (norm_q, norm_k, rstd_q, rstd_k) if of_heads else (norm_all_q, norm_all_k, rstd_all_q, rstd_all_k)
    return (
        norm(q_raw, weights[0], of_q, weights[2], of_heads=of_heads, frozen=frozen),
        norm(k_raw, weights[1], of_k, weights[3], of_heads=of_heads, frozen=frozen),
    )


def _mlp(
    model: ModelSpec,
    given: Tensor,
    made: Tensor,
    tile: Tile | None,
    product: Callable[..., Linear],
    together: Callable[..., Linear],
) -> Linear:
    """Return the equations of an MLP; ``product`` is what makes its linear layers, ``together`` joins those of one
    input.
    """
    biased = "mlp" in (model.biases or ())
    if tile and (biased or model.mlp):
        raise InputError(
            f"`set` schedule.mlp computes MLPs of SwiGLU without biases in tiles, not that of {model.name}"
        )
    if tile and adapts_mlp(model):
        raise InputError(
            f"`set` schedule.mlp computes MLPs in tiles, and those of {model.name} have adapters: leave it out, or set "
            f"model.lora_targets=q+k+v+o"
        )
    if tile:
        weights, size = (w_gate, w_up, w_down), tile.tokens
        tiled = (mlp_in_tiles(given, weights, made, size, saves=tile.saves, frozen=model.is_frozen),)
        return Linear(tiled, tiled)
    of_gate, of_up, of_down = (b_gate, b_up, b_down) if biased else (None, None, None)
    down = product("down", act, w_down, made, of_down)
    widened = [product("up", given, w_up, up, of_up)]
    if model.mlp == "gelu":
        activated = gelu(up, act)
    else:
        widened = [product("gate", given, w_gate, gate, of_gate), *widened]
        activated = (geglu if model.mlp == "geglu" else swiglu)(gate, up, act)
    both = together(*widened)
    return Linear((*both.forward, activated, *down.forward), (*down.back, activated, *both.back))


def _block(forward: Around, backward: Around) -> Block:
    """Return a block of forward equations, of which ``backward`` has the order in which gradients are led through."""
    before = len(back(*backward.before))
    led = back(*backward.before, *backward.after)
    return Block(*(x, q, k, v, out), _saved(forward, led), forward, Around(led[:before], led[before:]))


def _saved(forward: Around, backward: tuple[Equation, ...]) -> tuple[Tensor, ...]:
    """Return what backward equations need of what forward ones make, in that order, but for attention's inputs."""
    results = [[tensor for one in part for tensor in reversed(one.results)] for part in forward]
    needed = {out, *(tensor for one in backward for tensor in one.operands)} - {q, k, v}
    return tuple([tensor for tensor in dict.fromkeys((x, *results[0], out, *results[1])) if tensor in needed])
