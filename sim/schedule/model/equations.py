"""What an equation of tokens is, and a block of them around attention: what is written, counted and proved."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from sim.schedule.ir.ops import (
    Accumulate,
    BiasedGemm,
    CrossEntropy,
    EagerGeGlu,
    EagerGeGluBackward,
    EagerHeadNorm,
    EagerHeadNormBackward,
    EagerNorm,
    EagerNormBackward,
    EagerSwiGlu,
    EagerSwiGluBackward,
    Embed,
    EmbedBackward,
    ExpSum,
    GeGlu,
    GeGluBackward,
    Gelu,
    GeluBackward,
    Gemm,
    HeadNorm,
    HeadNormBackward,
    JoinedGemm,
    LargestLogit,
    LogitLoss,
    RmsNorm,
    RmsNormBackward,
    Rope,
    Scale,
    SwiGlu,
    SwiGluBackward,
    TiledKernel,
    TiledMlp,
    TiledMlpBackward,
    TokenKernel,
    TokenSum,
)
from sim.schedule.ir.tensors import Tensor, d
from sim.words.workload import ModelSpec


class Equation(NamedTuple):
    """What one kernel makes of each token by itself. Operands and results stand in the order of the op's fields."""

    kind: type[TokenKernel | JoinedGemm | TiledKernel | Accumulate]
    label: str
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    variant: tuple[tuple[str, Any], ...] = ()
    """Fields of the op that say which of its products or rotations it is."""
    adds: bool = False
    """Whether the result is added to what an earlier equation has made of it."""
    backward: tuple[Equation, ...] = ()
    """What makes the gradients of the operands of those of the results."""
    saves: bool = False
    """Whether it is a function that saves its own operands, as torch does once it has run: then checkpointing runs it
    again."""
    lacks: tuple[str, ...] = ()
    """Fields of the op that are operands or results where a weight is trained, and are not where it is frozen."""
    joins: tuple[Equation, ...] = ()
    """The products that it comes to, of a JoinedGemm."""

    def gemm_flops(self, model: ModelSpec) -> int:
        """Return the FLOPs of matrix products for one token: 2 for each weight; where a loop over tiles leads gradients
        back one more product for those of what it multiplies, and one for its own; 0 of other kernels.
        """
        if self.joins:
            return sum([one.gemm_flops(model) for one in self.joins])
        given, made = ([math.prod(tensor.shape(model)) for tensor in some if tensor.of_weight] for some in self[2:4])
        if self.kind is TiledMlp:
            return 2 * sum(given)
        if self.kind is TiledMlpBackward:
            return 4 * sum(given) + 2 * sum(made)
        return 2 * (given or made)[0] if is_product(self) else 0


class Around(NamedTuple):
    """The equations of one pass before its attention and after it, each in the order of issue."""

    before: tuple[Equation, ...]
    after: tuple[Equation, ...]


class Block(NamedTuple):
    """What one layer computes of x around attention; x of the next layer leaves it."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    saved: tuple[Tensor, ...]
    """What the backward equations need of the forward ones, in the order in which it is made."""
    forward: Around
    backward: Around
    projections: tuple[Equation, ...] = ()
    """Forward equations that attention has written when it asks for its inputs (see ``projections``)."""

    @property
    def equations(self) -> tuple[Equation, ...]:
        """All of them."""
        return (*self.forward.before, *self.forward.after, *self.backward.before, *self.backward.after)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that the equations speak of, as of the first layer."""
        spoken = (tensor for one in self.equations for tensor in (*one.operands, *one.results))
        return tuple(dict.fromkeys(tensor._replace(layer=0) for tensor in spoken))

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """All weights."""
        return tuple(tensor for tensor in self.tensors if tensor.kind == "weight")


def back(*equations: Equation) -> tuple[Equation, ...]:
    """Return the backward equations of forward ones; gradients of what several of them read add up."""
    found: list[Equation] = []
    for equation in (one for forward in equations for one in forward.backward):
        made = {tensor for earlier in found for tensor in earlier.results}
        found.append(equation._replace(adds=not made.isdisjoint(equation.results)))
    return tuple(found)


def is_product(equation: Equation) -> bool:
    """Return whether it is a linear layer, or a product that leads back through one."""
    return equation.kind in {Gemm, BiasedGemm, JoinedGemm}


def is_of_weights(equation: Equation) -> bool:
    """Return whether all that it makes are gradients of weights."""
    return all(tensor.kind == "weight gradient" for tensor in equation.results)


def norm(
    x: Tensor, weight: Tensor, out: Tensor, rstd: Tensor, *, of_heads: bool = False, frozen: bool = False
) -> Equation:
    """Return out = x * rstd * weight, of all features of a token or of each head."""
    kind, back_kind = (HeadNorm, HeadNormBackward) if of_heads else (RmsNorm, RmsNormBackward)
    gradients, lacks = ((d(x),), ("dweight",)) if frozen else ((d(x), d(weight)), ())
    backward = Equation(back_kind, f"back through {weight.name}", (x, weight, rstd, d(out)), gradients, lacks=lacks)
    return Equation(kind, weight.name, (x, weight), (out, rstd), backward=(backward,))


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    led: Tensor | None = None,
    transposed: bool = False,
    frozen: bool = False,
) -> Equation:
    """Return out = x weight, or x weight^T; or x weight + bias. Its gradient is that of ``led`` where that is a sum to
    which out is added alone. Through frozen weights it leads back to x alone.
    """
    gradient = d(led or out)
    on, back_on, sides = ("nt", "nn", (gradient, x)) if transposed else ("nn", "nt", (x, gradient))
    backward = [Equation(Gemm, f"back through {weight.name}", (gradient, weight), (d(x),), (("form", back_on),))]
    if not frozen:
        backward.append(Equation(Gemm, f"gradient {d(weight).name}", sides, (d(weight),), (("form", "tn"),)))
    if bias is None:
        return Equation(Gemm, weight.name, (x, weight), (out,), (("form", on),), backward=tuple(backward))
    if not frozen:
        backward.append(Equation(TokenSum, f"gradient {d(bias).name}", (gradient,), (d(bias),)))
    kept = (x, weight, bias)
    return Equation(BiasedGemm, weight.name, kept, (out,), (("form", on),), backward=tuple(backward))


def joined(*layers: Equation) -> Equation:
    """Return linear layers of one input as one product, and one that leads back through all, and one that makes all
    gradients of weights; those of biases are apart.
    """
    led, *others = zip(*[one.backward[:2] for one in layers], strict=True)
    biases = [sums for one in layers for sums in one.backward[2:]]
    return _as_one(layers)._replace(backward=(_as_one(led), *map(_as_one, others), *biases))


def _as_one(products: tuple[Equation, ...]) -> Equation:
    first, *others = products
    label = " ".join([first.label, *(one.label.split()[-1] for one in others)])
    operands = tuple(dict.fromkeys([tensor for one in products for tensor in one.operands]))
    results = tuple(dict.fromkeys([tensor for one in products for tensor in one.results]))
    return Equation(JoinedGemm, label, operands, results, first.variant, joins=products)


def rope(x: Tensor, out: Tensor) -> Equation:
    """Return out = x rotated, in place."""
    backward = Equation(Rope, f"rope {d(out).name}", (d(out),), (d(x),), (("inverse", True),))
    return Equation(Rope, f"rope {out.name}", (x,), (out,), (("inverse", False),), backward=(backward,))


def swiglu(gate: Tensor, up: Tensor, out: Tensor) -> Equation:
    """Return out = silu(gate) * up."""
    backward = Equation(SwiGluBackward, "back through swiglu", (gate, up, d(out)), (d(gate), d(up)))
    return Equation(SwiGlu, "swiglu", (gate, up), (out,), backward=(backward,))


def geglu(gate: Tensor, up: Tensor, out: Tensor) -> Equation:
    """Return out = gelu(gate) * up."""
    backward = Equation(GeGluBackward, "back through geglu", (gate, up, d(out)), (d(gate), d(up)))
    return Equation(GeGlu, "geglu", (gate, up), (out,), backward=(backward,))


def gelu(x: Tensor, out: Tensor) -> Equation:
    """Return out = x where x is large, and nothing where it is small (arXiv:1606.08415)."""
    backward = Equation(GeluBackward, "back through gelu", (x, d(out)), (d(x),))
    return Equation(Gelu, "gelu", (x,), (out,), backward=(backward,))


def mlp_in_tiles(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor], out: Tensor, tile: int, *, saves: bool, frozen: bool
) -> Equation:
    """Return out = (silu(x gate) * (x up)) down for weights gate, up and down, so many tokens at a time."""
    size, lacks = (("tile", tile),), ("dw_gate", "dw_up", "dw_down") if frozen else ()
    gradients, given = (d(x), *(() if frozen else map(d, weights))), (x, *weights, d(out))
    backward = Equation(TiledMlpBackward, "back through mlp in tiles", given, gradients, size, lacks=lacks)
    return Equation(TiledMlp, "mlp in tiles", (x, *weights), (out,), size, backward=(backward,), saves=saves)


def scaled(x: Tensor, out: Tensor, factor: float, label: str) -> Equation:
    """Return out = x * factor."""
    by = (("factor", factor),)
    backward = Equation(Scale, f"{label} d", (d(out),), (d(x),), by)
    return Equation(Scale, label, (x,), (out,), by, backward=(backward,))


def add(x: Tensor, into: Tensor, label: str) -> Equation:
    """Return into += x."""
    backward = Equation(Accumulate, label, (d(into),), (d(x),))
    return Equation(Accumulate, label, (x,), (into,), adds=True, backward=(backward,))


def embed(ids: Tensor, table: Tensor, out: Tensor, *, frozen: bool = False) -> Equation:
    """Return out = the rows of a table that ids name."""
    backward = Equation(EmbedBackward, f"gradient {d(table).name}", (d(out), ids), (d(table),))
    return Equation(Embed, table.name, (table, ids), (out,), backward=() if frozen else (backward,))


def cross_entropy(logits: Tensor, labels: Tensor, loss: Tensor) -> Equation:
    """Return loss = the cross-entropy of each token; the gradient of the logits takes their place at once."""
    return Equation(CrossEntropy, loss.name, (logits, labels), (d(logits), loss))


def cross_entropy_by_shares(
    logits: Tensor, sums: tuple[Tensor, Tensor, Tensor], labels: Tensor, loss: Tensor
) -> tuple[Equation, Equation, Equation]:
    """Return the same of a share of the vocabulary: the largest of its logits; the sum of their exponentials, and what
    is there of the label's; loss and gradient, of those of all shares.
    """
    top, exponentials, target = sums
    return (
        Equation(LargestLogit, f"largest {logits.name}", (logits,), (top,)),
        Equation(ExpSum, f"exponentials of {logits.name}", (logits, top, labels), (exponentials, target)),
        Equation(LogitLoss, loss.name, (logits, *sums, labels), (d(logits), loss)),
    )


def subtracting(scored: Equation) -> Equation:
    """Return a cross-entropy that holds logits less their largest beside them."""
    return scored._replace(variant=(("subtracts", True),))


def by_torch(scored: Equation) -> Equation:
    """Return a cross-entropy as torch's own ops make it."""
    return scored._replace(variant=(("eager", True),))


_EAGER_NORMS = {RmsNorm: (EagerNorm, EagerNormBackward), HeadNorm: (EagerHeadNorm, EagerHeadNormBackward)}
_EAGER_MLPS = {SwiGlu: (EagerSwiGlu, EagerSwiGluBackward), GeGlu: (EagerGeGlu, EagerGeGluBackward)}


def beside(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what eager modules keep of an activation: a copy in the data type of sums and what a norm's weight
    multiplies, or what an activation function makes of it.
    """
    copied = x._replace(name=f"{x.name}_wide", numbers="wide")
    return copied, x._replace(name=f"{x.name}_normed"), x._replace(name=f"{x.name}_active")


def eagerly(one: Equation, *, norms: bool = True) -> Equation:
    """Return a norm (where ``norms`` are eager) or an MLP's activation as eager modules compute it, in kernels whose
    results they keep; all others as they are.
    """
    if one.kind is TiledMlp:
        by, (led,) = (*one.variant, ("eager", True)), one.backward
        return one._replace(variant=by, backward=(led._replace(variant=by),))
    if norms and one.kind in _EAGER_NORMS:
        (x, weight), (out, rstd), (led,) = one.operands, one.results, one.backward
        copied, normed, _ = beside(x)
        kind, back_kind = _EAGER_NORMS[one.kind]
        needs, lacks = ((), ("normed", "dweight")) if led.lacks else ((normed,), ())
        led = led._replace(kind=back_kind, operands=(*needs, weight, copied, rstd, d(out)), lacks=lacks)
        return one._replace(kind=kind, results=(out, copied, rstd, normed), backward=(led,))
    if one.kind in _EAGER_MLPS:
        (gate, up), (out,), (led,) = one.operands, one.results, one.backward
        *_, active = beside(gate)
        activated, back_activated = _EAGER_MLPS[one.kind]
        led = led._replace(kind=back_activated, operands=(gate, up, active, d(out)))
        return one._replace(kind=activated, results=(out, active), backward=(led,))
    return one
