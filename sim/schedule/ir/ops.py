"""The ops of the intermediate representation.

The op set is a closed union: what is common to ops they declare themselves, and every reader that treats kinds
differently ends in ``assert_never``, so that the type checker names the reader that forgot a kind. ``reads`` and
``writes``, all that dependencies are derived from, follow from the annotations (``declare``). Dims:
``sim.words.workload``.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from sim.schedule.ir.declare import In, InOut, Out, readers, side, writers
from sim.schedule.ir.masks import Band, DocumentBlock, RowBlock, Tokens, rectangles
from sim.schedule.ir.views import Data, Split, View
from sim.words.options import AttentionName

COMPUTE = "compute"
"""The stream of all kernels; every communicator has a stream of its own name."""
HOST = "host"
"""Where it shows what the host does itself: waiting, and kernels of its CPU."""
OFFLOAD: Literal["to host"] = "to host"
FETCH: Literal["from host"] = "from host"
"""The streams of copies to the host's memory, and back: GPUs have a copy engine for each."""
STREAMS = (COMPUTE, HOST, OFFLOAD, FETCH)
"""Those that are no communicator's."""

NO_LABEL = -100
"""The label of a token that has no loss, as torch.nn.CrossEntropyLoss has it."""

Part = Literal["forward", "backward"]
GemmForm = Literal["nn", "nt", "tn"]
CollectiveName = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce", "barrier"]
"""As in profiles."""
Activity = Literal["compute", "copy", "communication", "synchronisation"]
Family = Literal[
    "attention", "matrix product", "norm, rope, SwiGLU", "merge, accumulate", "copy", "transfer", "synchronisation",
    "other",
]  # fmt: skip
"""Kinds that share a colour in plots."""
_ACTIVITIES: dict[Family, Activity] = {
    "copy": "copy",
    "transfer": "communication",
    "synchronisation": "synchronisation",
}


class Meta(NamedTuple):
    """What is said of a kind of op."""

    code: str
    """One letter, for grids."""
    meaning: str
    """What the letter stands for."""
    family: Family
    kernel: str = ""
    """Name in profiles: of a kernel that passes over its operands once, so that memory bounds it; of an exchange."""
    flops_per_element: int = 0
    """Of its first operand: what its formula needs, exp and sqrt as one."""

    @property
    def activity(self) -> Activity:
        """What a rank does meanwhile."""
        return _ACTIVITIES.get(self.family, "compute")


class Message(NamedTuple):
    """One tensor that an Exchange sends to, or receives from, ``peer``."""

    peer: int
    view: View


class _Op(Data, frozen=True, kw_only=True, tag=True):
    """What every op has: a short name for people, and the pass that it belongs to, which the builder sets."""

    label: str
    part: Part = "forward"

    meta: ClassVar[Meta]

    @property
    def reads(self) -> tuple[View, ...]:
        """The views that it reads."""
        return readers(type(self))(self)

    @property
    def writes(self) -> tuple[View, ...]:
        """The views that it writes."""
        return writers(type(self))(self)


class _Kernel(_Op, frozen=True, kw_only=True):
    """What every kernel has: the stream of all."""

    stream: ClassVar[str] = COMPUTE


class Attend(_Kernel, frozen=True, kw_only=True):
    """out, lse = attention of one block with its log-sum-exp. q, out: bshd; k, v: bshd; lse: bhs.

    A standard kernel keeps the probabilities too, ``probs``: (B, H, S_q, S_k).
    """

    meta = Meta("A", "attend", "attention")
    q: Annotated[View, In("bqhd")]
    k: Annotated[View, In("bkgd")]
    v: Annotated[View, In("bkgd")]
    out: Annotated[View, Out("bqhd")]
    lse: Annotated[View, Out("bhq", "wide")]
    band: Band
    kernel: AttentionName = "flash"
    probs: Annotated[View | None, Out("bhqk")] = None
    documents: tuple[DocumentBlock, ...] | msgspec.UnsetType = msgspec.UNSET
    """Of several documents, in a variable-length kernel; ``band`` is FULL then. A query without keys has out 0 and lse
    -inf."""
    sparse: tuple[RowBlock, ...] | msgspec.UnsetType = msgspec.UNSET
    """Of a block-sparse mask; ``band`` is FULL then, too. So is a query without keys."""
    scale: float | msgspec.UnsetType = msgspec.UNSET
    """What scores are multiplied by, one over the root of D where that is unset."""
    softcap: float | msgspec.UnsetType = msgspec.UNSET
    """Scores are this times tanh of scores by this, where it is set."""


class AttendBackward(_Kernel, frozen=True, kw_only=True):
    """dq, dk, dv of one block, from the global lse and the global out, or delta instead, all that is needed of it.

    Shapes as in Attend; dout, dq: bshd; dk, dv: bshd; delta: bhs (see Delta).
    """

    meta = Meta("B", "backward", "attention")
    q: Annotated[View, In("bqhd")]
    k: Annotated[View, In("bkgd")]
    v: Annotated[View, In("bkgd")]
    out: Annotated[View | None, In("bqhd")] = None
    delta: Annotated[View | None, In("bhq", "wide")] = None
    lse: Annotated[View, In("bhq", "wide")]
    dout: Annotated[View, In("bqhd")]
    dq: Annotated[View, Out("bqhd")]
    dk: Annotated[View, Out("bkgd")]
    dv: Annotated[View, Out("bkgd")]
    band: Band
    kernel: AttentionName = "flash"
    probs: Annotated[View | None, In("bhqk")] = None
    documents: tuple[DocumentBlock, ...] | msgspec.UnsetType = msgspec.UNSET
    """As in Attend."""
    sparse: tuple[RowBlock, ...] | msgspec.UnsetType = msgspec.UNSET
    """As in Attend."""
    scale: float | msgspec.UnsetType = msgspec.UNSET
    """As in Attend."""
    softcap: float | msgspec.UnsetType = msgspec.UNSET
    """As in Attend."""


def parts_of(op: Attend | AttendBackward) -> tuple[DocumentBlock, ...]:
    """Return the rectangles that one kernel attends to; none where it is a whole block under one band."""
    return op.documents or rectangles(op.sparse or ())


class LinearAttend(_Kernel, frozen=True, kw_only=True):
    """out = causal linear attention of tokens that follow each other to themselves, ``chunk`` at a time: within a chunk
    (q k^T * mask) v / sqrt(D), and of all chunks before by a state (arXiv:2401.04658 §3). q, out: bshd; k, v: bsgd.
    """

    meta = Meta("a", "linear attention", "attention")
    q: Annotated[View, In("bshd")]
    k: Annotated[View, In("bsgd")]
    v: Annotated[View, In("bsgd")]
    out: Annotated[View, Out("bshd")]
    chunk: int


class LinearAttendBackward(_Kernel, frozen=True, kw_only=True):
    """dq, dk and dv of LinearAttend, from its inputs alone. dout, dq: bshd; dk, dv: bsgd."""

    meta = Meta("l", "linear attention backward", "attention")
    q: Annotated[View, In("bshd")]
    k: Annotated[View, In("bsgd")]
    v: Annotated[View, In("bsgd")]
    dout: Annotated[View, In("bshd")]
    dq: Annotated[View, Out("bshd")]
    dk: Annotated[View, Out("bsgd")]
    dv: Annotated[View, Out("bsgd")]
    chunk: int


class StateSum(_Kernel, frozen=True, kw_only=True):
    """state = the sum of a^T b / sqrt(D) over tokens and over the heads that share it: of keys and values the state of
    linear attention, of queries and dout its gradient. a, b: bshd; state: bgdd, in the accumulation data type.
    """

    meta = Meta("z", "state sum", "attention")
    a: Annotated[View, In("bshd")]
    b: Annotated[View, In("bshd")]
    state: Annotated[View, Out("bgdd", "wide")]


class StateProduct(_Kernel, frozen=True, kw_only=True):
    """into += x state, or x state^T, per head: what linear attention has of tokens that a state stands for.

    x, into: bshd; state: bgdd.
    """

    meta = Meta("p", "state product", "attention")
    x: Annotated[View, In("bshd")]
    state: Annotated[View, In("bgdd", "wide")]
    into: Annotated[View, InOut("bshd")]
    transposed: bool


class Delta(_Kernel, frozen=True, kw_only=True):
    """delta = the sum of dout * out over the head dim, of the global out (arXiv:2307.08691 algorithm 2, line 4).

    out, dout: bshd; delta: bhs, in the accumulation data type.
    """

    meta = Meta("D", "delta", "other", "delta", 2)
    out: Annotated[View, In("bqhd")]
    dout: Annotated[View, In("bqhd")]
    delta: Annotated[View, Out("bhq", "wide")]


class Merge(_Kernel, frozen=True, kw_only=True):
    """Fold the partial (out, lse) of more keys into an accumulated one of the same queries."""

    meta = Meta("M", "merge", "merge, accumulate", "merge", 3)
    out: Annotated[View, In("bqhd")]
    lse: Annotated[View, In("bhq", "wide")]
    into_out: Annotated[View, InOut("bqhd", "wide")]
    into_lse: Annotated[View, InOut("bhq", "wide")]


class Accumulate(_Kernel, frozen=True, kw_only=True):
    """into += source, in its data type or wider; or the larger one of each element."""

    meta = Meta("+", "accumulate", "merge, accumulate", "accumulate", 1)
    source: Annotated[View, In("...")]
    into: Annotated[View, InOut("...", "alike or wide")]
    largest: Literal[True] | msgspec.UnsetType = msgspec.UNSET


class Zero(_Kernel, frozen=True, kw_only=True):
    """into = 0: a sum of gradients to which nothing has been added yet."""

    meta = Meta("0", "zero", "other", "zero", 0)
    into: Annotated[View, Out("...")]


class Hold(_Kernel, frozen=True, kw_only=True):
    """Nothing runs, but kernels behind it wait for what writes these buffers, as with wait() of a collective's work in
    torch; and code holds them here, though no op may use them any more: a function in Python does until it returns.
    """

    meta = Meta("k", "hold", "other", "hold")
    held: Annotated[tuple[View, ...], In(numbers="any")]


class Copy(_Kernel, frozen=True, kw_only=True):
    """Part i of target = part i of source, or part ``order[i]``, in one kernel: layout copies, packing, casts."""

    meta = Meta("C", "copy", "copy", "copy", 0)
    source: Annotated[Split, In(numbers="any")]
    target: Annotated[Split, Out(numbers="any")]
    order: tuple[int, ...] = ()


class Fold(_Kernel, frozen=True, kw_only=True):
    """Part i of target = the sum of parts i * n to i * n + n - 1 of source, which has n times as many parts: gradients
    of key/value heads that were replicated.
    """

    meta = Meta("F", "fold", "other", "fold", 1)
    source: Annotated[Split, In()]
    target: Annotated[Split, Out(numbers="alike or wide")]


class Gemm(_Kernel, frozen=True, kw_only=True):
    """One matrix product of a linear layer with tokens x and weight w, by its form as BLAS names it.

    nn: out = x w           x (B, S, fan in), w (fan in, fan out), out (B, S, fan out)
    nt: out = dy w^T        dy (B, S, fan out), out (B, S, fan in)
    tn: out = x^T dy        out (fan in, fan out), summed over batch and tokens of this rank

    With ``accumulate`` it is added to what out holds. Heads and head dim count as one dimension: (B, S, H, D) is
    (B, S, H * D).
    """

    meta = Meta("L", "linear", "matrix product")
    letters: ClassVar[dict[GemmForm, tuple[str, str, str]]] = {
        "nn": ("bs*i", "io", "bs*o"),
        "nt": ("bs*o", "io", "bs*i"),
        "tn": ("bs*i", "bs*o", "io"),
    }
    """Dimensions of a, b and out."""
    form: GemmForm
    a: Annotated[View, In()]
    b: Annotated[View, In()]
    out: Annotated[View, Out(read_if="accumulate")]
    accumulate: bool = False
    factor: float | msgspec.UnsetType = msgspec.UNSET
    """What the product is multiplied by where it is written, BLAS's alpha; 1 where that is unset."""


class BiasedGemm(Gemm, frozen=True, kw_only=True):
    """out = x w + bias, in the product's own kernel, as cuBLAS adds it where it writes its result: form nn alone."""

    meta = Meta("w", "linear with bias", "matrix product")
    bias: Annotated[View, In()]


class JoinedGemm(_Kernel, frozen=True, kw_only=True):
    """Linear layers of one input as one matrix product, as if their weights lay side by side in one matrix; dimensions
    as in Gemm.

    nn: out[i] = a[0] b[i], plus bias[i] where there are biases
    nt: out[0] = the sum of a[i] b[i]^T
    tn: out[i] = a[0]^T b[i]

    Executed it is a product for each.
    """

    meta = Meta("y", "joined linear", "matrix product")
    form: GemmForm
    a: Annotated[tuple[View, ...], In()]
    b: Annotated[tuple[View, ...], In()]
    out: Annotated[tuple[View, ...], Out(read_if="accumulate")]
    bias: Annotated[tuple[View, ...], In()] = ()
    accumulate: bool = False

    @property
    def products(self) -> tuple[Gemm, ...]:
        """What it comes to: a product for each layer; raises ValueError where sides have unlike numbers of them."""
        count, label, part, form = len(self.b), self.label, self.part, self.form
        a, out = (one * count if len(one) == 1 else one for one in (self.a, self.out))
        if self.bias:
            return tuple(
                [
                    BiasedGemm(label=label, part=part, form=form, a=x, b=weight, out=made, bias=bias)
                    for x, weight, made, bias in zip(a, self.b, out, self.bias, strict=True)
                ]
            )
        begun = len(self.out) < count  # by the first, to which the others add
        return tuple(
            [
                Gemm(label=label, part=part, form=form, a=x, b=other, out=made, accumulate=self.accumulate or adds)
                for x, other, made, adds in zip(a, self.b, out, [False, *[begun] * (count - 1)], strict=True)
            ]
        )


class TokenSum(_Kernel, frozen=True, kw_only=True):
    """total (O) = the sum of dout (B, S, O) over the tokens of this rank: the gradient of a bias."""

    meta = Meta("v", "sum over tokens", "other", "token_sum", 1)
    dout: Annotated[View, In("bs*o")]
    total: Annotated[View, Out("o")]


class RmsNorm(_Kernel, frozen=True, kw_only=True):
    """out = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + epsilon) over the last dimension (arXiv:1910.07467).

    rstd is in the accumulation data type.
    """

    meta = Meta("n", "norm", "norm, rope, SwiGLU", "rms_norm", 4)
    x: Annotated[View, In("bs*e")]
    weight: Annotated[View, In("e")]
    out: Annotated[View, Out("bs*e")]
    rstd: Annotated[View, Out("bs", "wide")]
    epsilon: float


class RmsNormBackward(_Kernel, frozen=True, kw_only=True):
    """dx and dweight (summed over batch and tokens of this rank) of RmsNorm; of a frozen weight dx alone."""

    meta = Meta("N", "norm backward", "norm, rope, SwiGLU", "rms_norm_backward", 10)
    x: Annotated[View, In("bs*e")]
    weight: Annotated[View, In("e")]
    rstd: Annotated[View, In("bs", "wide")]
    dout: Annotated[View, In("bs*e")]
    dx: Annotated[View, Out("bs*e")]
    dweight: Annotated[View | None, Out("e")] = None


class HeadNorm(RmsNorm, frozen=True, kw_only=True):
    """RmsNorm of each head (B, S, H, D) by itself, by one weight (D) for all; rstd is (B, S, H)."""

    meta = Meta("m", "norm of heads", "norm, rope, SwiGLU", "rms_norm", 4)
    x: Annotated[View, In("bshd")]
    weight: Annotated[View, In("d")]
    out: Annotated[View, Out("bshd")]
    rstd: Annotated[View, Out("bsh", "wide")]


class HeadNormBackward(RmsNormBackward, frozen=True, kw_only=True):
    """dx and dweight (summed over batch, tokens and heads of this rank) of HeadNorm."""

    meta = Meta("J", "norm of heads backward", "norm, rope, SwiGLU", "rms_norm_backward", 10)
    x: Annotated[View, In("bshd")]
    weight: Annotated[View, In("d")]
    rstd: Annotated[View, In("bsh", "wide")]
    dout: Annotated[View, In("bshd")]
    dx: Annotated[View, Out("bshd")]
    dweight: Annotated[View | None, Out("d")] = None


class EagerNorm(_Kernel, frozen=True, kw_only=True):
    """RmsNorm as Hugging Face's module computes it: wide is x in the accumulation data type, normed = wide * rstd in
    that of x, out = weight * normed (transformers 4.57.6 src/transformers/models/llama/modeling_llama.py).

    Where x has the accumulation data type wide is a copy all the same.
    """

    meta = Meta("I", "eager norm", "norm, rope, SwiGLU", "rms_norm", 4)
    x: Annotated[View, In("bs*e")]
    weight: Annotated[View, In("e")]
    out: Annotated[View, Out("bs*e")]
    wide: Annotated[View, Out("bs*e", "wide")]
    rstd: Annotated[View, Out("bs", "wide")]
    normed: Annotated[View, Out("bs*e")]
    epsilon: float


class EagerNormBackward(_Kernel, frozen=True, kw_only=True):
    """dx and dweight (summed over batch and tokens of this rank) of EagerNorm, as autograd runs them; of a frozen
    weight dx alone, which needs no normed.
    """

    meta = Meta("K", "eager norm backward", "norm, rope, SwiGLU", "rms_norm_backward", 10)
    normed: Annotated[View | None, In("bs*e")] = None
    weight: Annotated[View, In("e")]
    wide: Annotated[View, In("bs*e", "wide")]
    rstd: Annotated[View, In("bs", "wide")]
    dout: Annotated[View, In("bs*e")]
    dx: Annotated[View, Out("bs*e")]
    dweight: Annotated[View | None, Out("e")] = None


class EagerHeadNorm(EagerNorm, frozen=True, kw_only=True):
    """EagerNorm of each head (B, S, H, D) by itself, by one weight (D) for all; rstd is (B, S, H)."""

    meta = Meta("d", "eager norm of heads", "norm, rope, SwiGLU", "rms_norm", 4)
    x: Annotated[View, In("bshd")]
    weight: Annotated[View, In("d")]
    out: Annotated[View, Out("bshd")]
    wide: Annotated[View, Out("bshd", "wide")]
    rstd: Annotated[View, Out("bsh", "wide")]
    normed: Annotated[View, Out("bshd")]


class EagerHeadNormBackward(EagerNormBackward, frozen=True, kw_only=True):
    """dx and dweight (summed over batch, tokens and heads of this rank) of EagerHeadNorm."""

    meta = Meta("f", "eager norm of heads backward", "norm, rope, SwiGLU", "rms_norm_backward", 10)
    normed: Annotated[View | None, In("bshd")] = None
    weight: Annotated[View, In("d")]
    wide: Annotated[View, In("bshd", "wide")]
    rstd: Annotated[View, In("bsh", "wide")]
    dout: Annotated[View, In("bshd")]
    dx: Annotated[View, Out("bshd")]
    dweight: Annotated[View | None, Out("d")] = None


class Rope(_Kernel, frozen=True, kw_only=True):
    """Rotate x (bshd) in place by the positions of its tokens, halves paired as in Llama (arXiv:2104.09864).

    ``inverse`` rotates back, which is the backward pass.
    """

    meta = Meta("o", "rope", "norm, rope, SwiGLU", "rope", 3)
    x: Annotated[View, InOut("bshd")]
    tokens: Tokens
    theta: float
    inverse: bool = False
    rotated: int | msgspec.UnsetType = msgspec.UNSET
    """How many features of each head are rotated, the first ones; all where that is unset."""


class SwiGlu(_Kernel, frozen=True, kw_only=True):
    """out = silu(gate) * up (arXiv:2002.05202)."""

    meta = Meta("g", "swiglu", "norm, rope, SwiGLU", "swiglu", 5)
    gate: Annotated[View, In("bse")]
    up: Annotated[View, In("bse")]
    out: Annotated[View, Out("bse")]


class SwiGluBackward(_Kernel, frozen=True, kw_only=True):
    """dgate and dup of SwiGlu."""

    meta = Meta("W", "swiglu backward", "norm, rope, SwiGLU", "swiglu_backward", 12)
    gate: Annotated[View, In("bse")]
    up: Annotated[View, In("bse")]
    dout: Annotated[View, In("bse")]
    dgate: Annotated[View, Out("bse")]
    dup: Annotated[View, Out("bse")]


class GeGlu(SwiGlu, frozen=True, kw_only=True):
    """out = gelu(gate) * up, by tanh (arXiv:2002.05202, arXiv:1606.08415 §2). It moves what SwiGlu does."""

    meta = Meta("j", "geglu", "norm, rope, SwiGLU", "swiglu", 10)


class GeGluBackward(SwiGluBackward, frozen=True, kw_only=True):
    """dgate and dup of GeGlu."""

    meta = Meta("Z", "geglu backward", "norm, rope, SwiGLU", "swiglu_backward", 20)


class EagerSwiGlu(_Kernel, frozen=True, kw_only=True):
    """active = silu(gate), out = active * up: SwiGlu in two kernels."""

    meta = Meta("i", "eager swiglu", "norm, rope, SwiGLU", "swiglu", 5)
    gate: Annotated[View, In("bse")]
    up: Annotated[View, In("bse")]
    out: Annotated[View, Out("bse")]
    active: Annotated[View, Out("bse")]


class EagerSwiGluBackward(_Kernel, frozen=True, kw_only=True):
    """dgate and dup of EagerSwiGlu, as autograd runs them."""

    meta = Meta("q", "eager swiglu backward", "norm, rope, SwiGLU", "swiglu_backward", 12)
    gate: Annotated[View, In("bse")]
    up: Annotated[View, In("bse")]
    active: Annotated[View, In("bse")]
    dout: Annotated[View, In("bse")]
    dgate: Annotated[View, Out("bse")]
    dup: Annotated[View, Out("bse")]


class EagerGeGlu(EagerSwiGlu, frozen=True, kw_only=True):
    """active = gelu(gate), by tanh, out = active * up: GeGlu in two kernels."""

    meta = Meta("r", "eager geglu", "norm, rope, SwiGLU", "swiglu", 10)


class EagerGeGluBackward(EagerSwiGluBackward, frozen=True, kw_only=True):
    """dgate and dup of EagerGeGlu."""

    meta = Meta("s", "eager geglu backward", "norm, rope, SwiGLU", "swiglu_backward", 20)


class Gelu(_Kernel, frozen=True, kw_only=True):
    """out = gelu(x), by tanh (arXiv:1606.08415 §2)."""

    meta = Meta("u", "gelu", "norm, rope, SwiGLU", "gelu", 9)
    x: Annotated[View, In("bse")]
    out: Annotated[View, Out("bse")]


class GeluBackward(_Kernel, frozen=True, kw_only=True):
    """dx of Gelu."""

    meta = Meta("Y", "gelu backward", "norm, rope, SwiGLU", "gelu_backward", 15)
    x: Annotated[View, In("bse")]
    dout: Annotated[View, In("bse")]
    dx: Annotated[View, Out("bse")]


class Scale(_Kernel, frozen=True, kw_only=True):
    """out = x * factor."""

    meta = Meta("x", "scale", "other", "scale", 1)
    x: Annotated[View, In("bs*e")]
    out: Annotated[View, Out("bs*e")]
    factor: float


class TiledMlp(_Kernel, frozen=True, kw_only=True):
    """out = (silu(x w_gate) * (x w_up)) w_down, of ``tile`` tokens at a time: a loop over all tokens of batch and
    sequence, so that no more of what is ffn wide is held (arXiv:2506.13996 §3.1). ``derive.tiles`` says what it runs.

    x, out (B, S, E); w_gate, w_up (E, F); w_down (F, E).
    """

    meta = Meta("t", "tiled mlp", "matrix product")
    x: Annotated[View, In("bse", contiguous=True)]
    w_gate: Annotated[View, In("ef")]
    w_up: Annotated[View, In("ef")]
    w_down: Annotated[View, In("fe")]
    out: Annotated[View, Out("bse", contiguous=True)]
    tile: int
    eager: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether a tile's activation is EagerSwiGlu."""


class TiledMlpBackward(_Kernel, frozen=True, kw_only=True):
    """dx and the gradients of all weights of TiledMlp, each tile computed again; gradients of weights are summed over
    tiles in their own data type, and there are none of frozen ones.
    """

    meta = Meta("b", "tiled mlp backward", "matrix product")
    x: Annotated[View, In("bse", contiguous=True)]
    w_gate: Annotated[View, In("ef")]
    w_up: Annotated[View, In("ef")]
    w_down: Annotated[View, In("fe")]
    dout: Annotated[View, In("bse", contiguous=True)]
    dx: Annotated[View, Out("bse", contiguous=True)]
    dw_gate: Annotated[View | None, Out("ef")] = None
    dw_up: Annotated[View | None, Out("ef")] = None
    dw_down: Annotated[View | None, Out("fe")] = None
    tile: int
    eager: bool | msgspec.UnsetType = msgspec.UNSET
    """As in TiledMlp."""


class Embed(_Kernel, frozen=True, kw_only=True):
    """out = the rows of a table (V, E) that token ids (B, S) name; of a share of its rows zeros where an id names none
    of them (Megatron-LM core/tensor_parallel/layers.py, VocabParallelEmbedding).
    """

    meta = Meta("e", "embed", "other", "embedding")
    table: Annotated[View, In("io")]
    ids: Annotated[View, In("bs", "int64", contiguous=True)]
    out: Annotated[View, Out("bs*o", contiguous=True)]
    first: int | msgspec.UnsetType = msgspec.UNSET
    """The id of the table's first row, where that is a share."""


class EmbedBackward(_Kernel, frozen=True, kw_only=True):
    """dtable (V, E) = in each row the sum of dout (B, S, E) over the tokens of this rank that name it."""

    meta = Meta("E", "embed backward", "other", "embedding_backward", 1)
    dout: Annotated[View, In("bs*o")]
    ids: Annotated[View, In("bs", "int64")]
    dtable: Annotated[View, Out("io")]
    first: int | msgspec.UnsetType = msgspec.UNSET
    """As in Embed."""


class CrossEntropy(_Kernel, frozen=True, kw_only=True):
    """loss (B, S) = log(sum(exp(logits))) less the logit of the label; in place of the logits (B, S, V) the gradient of
    its mean over ``count`` tokens. Tokens with label ``NO_LABEL`` have neither.

    In one pass, as Liger's kernel does it (arXiv:2410.10989 §3.2); the loss is in the accumulation data type.
    """

    meta = Meta("c", "cross-entropy", "other", "cross_entropy", 5)
    logits: Annotated[View, InOut("bse")]
    labels: Annotated[View, In("bs", "int64")]
    loss: Annotated[View, Out("bs", "wide")]
    count: int
    scale: float | msgspec.UnsetType = msgspec.UNSET
    """What logits are multiplied by first, where it is set."""
    softcap: float | msgspec.UnsetType = msgspec.UNSET
    """Logits are then this times tanh of logits by this, where it is set."""
    eager: bool | msgspec.UnsetType = msgspec.UNSET
    """By torch's ops and their derivatives, of all tokens at once, where it is set: a cast, log_softmax, the gradient
    of its output, that of its input, and a cast back."""
    subtracts: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    """Whether all logits less the largest of their token are another tensor meanwhile, in the data type of sums."""


class LargestLogit(_Kernel, frozen=True, kw_only=True):
    """top (B, S) = the largest of the logits (B, S, V/T) of a share of the vocabulary, in the accumulation data type.

    This and the next two, with what sums up top, sums and target over all shares between them, are a cross-entropy of
    logits that are divided by columns (Megatron-LM core/tensor_parallel/cross_entropy.py, VocabParallelCrossEntropy;
    eager ones torch 2.13 distributed/tensor/parallel/loss.py, loss_parallel).
    """

    meta = Meta("^", "largest logit", "other", "largest_logit", 1)
    logits: Annotated[View, In("bse")]
    top: Annotated[View, Out("bs", "wide")]
    scale: float | msgspec.UnsetType = msgspec.UNSET
    """As in CrossEntropy."""
    softcap: float | msgspec.UnsetType = msgspec.UNSET
    """As in CrossEntropy."""
    eager: bool | msgspec.UnsetType = msgspec.UNSET
    """By torch's ops of all tokens at once, where it is set: a cast, and the largest of each row."""


class ExpSum(_Kernel, frozen=True, kw_only=True):
    """sums (B, S) = sum(exp(logits - top)) over a share of the vocabulary; target (B, S) = the logit of the label less
    top, 0 where the label is of another share or none.
    """

    meta = Meta("%", "sum of exponentials", "other", "exp_sum", 3)
    logits: Annotated[View, In("bse")]
    top: Annotated[View, In("bs", "wide")]
    labels: Annotated[View, In("bs", "int64")]
    sums: Annotated[View, Out("bs", "wide")]
    target: Annotated[View, Out("bs", "wide")]
    first: int
    """The id of the share's first logit."""
    scale: float | msgspec.UnsetType = msgspec.UNSET
    """As in CrossEntropy."""
    softcap: float | msgspec.UnsetType = msgspec.UNSET
    """As in CrossEntropy."""
    eager: bool | msgspec.UnsetType = msgspec.UNSET
    """As in LargestLogit: the logits less top, their exponentials, and the sum of these."""


class LogitLoss(_Kernel, frozen=True, kw_only=True):
    """loss (B, S) = log(sums) - target; in place of a share of the logits the gradient of its mean over ``count``
    tokens. Tokens with label ``NO_LABEL`` have neither.
    """

    meta = Meta("$", "loss of logits", "other", "logit_loss", 4)
    logits: Annotated[View, InOut("bse")]
    top: Annotated[View, In("bs", "wide")]
    sums: Annotated[View, In("bs", "wide")]
    target: Annotated[View, In("bs", "wide")]
    labels: Annotated[View, In("bs", "int64")]
    loss: Annotated[View, Out("bs", "wide")]
    count: int
    first: int
    """As in ExpSum."""
    scale: float | msgspec.UnsetType = msgspec.UNSET
    """As in CrossEntropy."""
    softcap: float | msgspec.UnsetType = msgspec.UNSET
    """As in CrossEntropy."""
    eager: bool | msgspec.UnsetType = msgspec.UNSET
    """As in LargestLogit: the logarithms of shares, the gradient of the labels', that of logits, and a cast back."""
    subtracts: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    """As in CrossEntropy."""


class Unpack(_Kernel, frozen=True, kw_only=True):
    """Each of ``weights``, one behind the other, = its elements in a flat tensor, cast: FSDP2 copies out what it
    gathered, replicated training the fp32 weights that the optimiser has updated.
    """

    meta = Meta("U", "unpack", "copy", "copy")
    flat: Annotated[View, In("i")]
    weights: Annotated[tuple[View, ...], Out("", "any", contiguous=True)]


class Pack(_Kernel, frozen=True, kw_only=True):
    """flat = the elements of all gradients, one behind the other, in its data type or wider; or flat += them."""

    meta = Meta("P", "pack", "copy", "copy")
    gradients: Annotated[tuple[View, ...], In(contiguous=True)]
    flat: Annotated[View, Out("i", "alike or wide", read_if="adds")]
    adds: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    by_products: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    """Whether the products that made matrices among them have added them already: on a GPU only the others take time.
    Executed, this kernel adds all."""


class Divide(_Kernel, frozen=True, kw_only=True):
    """A flat gradient divided where it lies, by the number of ranks whose gradients are summed. The gradient of a loss
    is that of its mean over the tokens of all ranks here, so that this writes what it reads.
    """

    meta = Meta("/", "divide", "other", "divide", 1)
    gradient: Annotated[View, InOut("i")]


class SquareSum(_Kernel, frozen=True, kw_only=True):
    """square (1) = the sum of the squares of a flat gradient's elements; or square += it."""

    meta = Meta("Q", "sum of squares", "other", "square_sum", 2)
    gradient: Annotated[View, In("i")]
    square: Annotated[View, Out("n", "wide", read_if="adds")]
    adds: Literal[True] | msgspec.UnsetType = msgspec.UNSET


class AdamW(_Kernel, frozen=True, kw_only=True):
    """Update flat weights and their moments in place by their gradient (arXiv:1711.05101 algorithm 2), which is scaled
    down where it lies if the norm of all gradients, the root of the sum of all ``squares``, is above a bound
    (arXiv:1211.5063; torch.nn.utils.clip_grad_norm_).
    """

    meta = Meta("O", "optimiser", "other", "adamw", 14)
    weights: Annotated[View, InOut("i")]
    gradient: Annotated[View, InOut("i")]
    first: Annotated[View, InOut("i")]
    second: Annotated[View, InOut("i")]
    squares: Annotated[View, In("n", "wide")]


class _Communication(_Op, frozen=True, kw_only=True):
    """What all communication has: its communicator, whose name its stream bears."""

    communicator: str

    @property
    def stream(self) -> str:
        """The stream of the communicator's ops."""
        return self.communicator


class Exchange(_Communication, frozen=True, kw_only=True):
    """Grouped point to point: all sends and receives begin together, as in ncclGroup and batch_isend_irecv. One message
    alone is isend or irecv.
    """

    meta = Meta("X", "exchange", "transfer", "exchange")
    sends: Annotated[tuple[Message, ...], In()]
    recvs: Annotated[tuple[Message, ...], Out()]
    by_copies: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    """Whether on GPUs copy engines write what it sends into the memory of peers in the same node, without SMs; else
    kernels of NCCL do. Executed they are messages as others."""

    @property
    def num_messages(self) -> int:
        """How many sends and receives it has."""
        return len(self.sends) + len(self.recvs)


class _Collective(_Communication, frozen=True, kw_only=True):
    """What every collective has. Of what it reads part i goes to member i, or, where it is one view, all of it to each;
    of what it writes part i comes from member i, or, where it is one view, is the sum of what all send.
    """

    name: ClassVar[CollectiveName]

    @property
    def given(self) -> View | Split | None:
        """What it reads."""
        return side(self, written=False)

    @property
    def taken(self) -> View | Split | None:
        """What it writes."""
        return side(self, written=True)


class AllToAll(_Collective, frozen=True, kw_only=True):
    """Part i of ``sends`` goes to member i of the group, part i of ``recvs`` comes from it; the own one is copied."""

    meta = Meta("T", "all-to-all", "transfer")
    name = "all_to_all"
    sends: Annotated[Split, In()]
    recvs: Annotated[Split, Out()]


class AllGather(_Collective, frozen=True, kw_only=True):
    """Part i of ``recvs`` = what member i sends."""

    meta = Meta("G", "all-gather", "transfer")
    name = "all_gather"
    send: Annotated[View, In()]
    recvs: Annotated[Split, Out()]


class ReduceScatter(_Collective, frozen=True, kw_only=True):
    """recv = sum over the members of what each sends to this one; part i of ``sends`` is meant for member i."""

    meta = Meta("R", "reduce-scatter", "transfer")
    name = "reduce_scatter"
    sends: Annotated[Split, In()]
    recv: Annotated[View, Out()]


class AllReduce(_Collective, frozen=True, kw_only=True):
    """view = sum of the members' views, in place; or the largest of each element."""

    meta = Meta("S", "all-reduce", "transfer")
    name = "all_reduce"
    view: Annotated[View, InOut()]
    largest: Literal[True] | msgspec.UnsetType = msgspec.UNSET


class Barrier(_Collective, frozen=True, kw_only=True):
    """Ends on no member before it has begun on all."""

    meta = Meta("|", "barrier", "synchronisation")
    name = "barrier"


class HostCopy(_Op, frozen=True, kw_only=True):
    """target = source, one of them in host memory: carried out by a copy engine, without SMs."""

    meta = Meta("V", "copy to the host or back", "copy")
    stream: Literal["to host", "from host"]
    source: Annotated[View, In("...")]
    target: Annotated[View, Out("...")]


class HostAdamW(_Op, frozen=True, kw_only=True):
    """AdamW by the CPU, on what lies in host memory; ``cast`` = the new weights in the model's data type, where passes
    use others than the optimiser.

    The host issues nothing more before it has ended: in DeepSpeed the thread that issues kernels calls it
    (arXiv:2101.06840 §5; ops/adam/cpu_adam.py). The gradient is scaled where it lies.
    """

    meta = Meta("h", "optimiser on the host", "other")
    stream: ClassVar[str] = HOST
    weights: Annotated[View, InOut("i")]
    gradient: Annotated[View, InOut("i")]
    first: Annotated[View, InOut("i")]
    second: Annotated[View, InOut("i")]
    squares: Annotated[View, In("n", "wide")]
    cast: Annotated[View | None, Out("i", "any")] = None


class HostSync(_Op, frozen=True, kw_only=True):
    """The host issues nothing more before all that it issued to ``streams`` has ended."""

    meta = Meta("H", "host sync", "synchronisation")
    stream: ClassVar[str] = HOST
    label: str = "host sync"
    streams: tuple[str, ...]
    calls: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET
    """Where the host has work of its own before it waits, as many eager calls: each takes what one of a small kernel
    does. Executed it only waits: what these calls find is known when the schedule is built."""


Collective: TypeAlias = AllToAll | AllGather | ReduceScatter | AllReduce | Barrier
Communication: TypeAlias = Exchange | Collective
AttentionKernel: TypeAlias = Attend | AttendBackward | Delta | Merge
LinearKernel: TypeAlias = LinearAttend | LinearAttendBackward | StateSum | StateProduct
LogitKernel: TypeAlias = LargestLogit | ExpSum | LogitLoss
"""The cross-entropy of a share of the vocabulary."""
EndKernel: TypeAlias = Embed | EmbedBackward | CrossEntropy | LogitKernel
"""What stands at both ends of the layers."""
EagerNormKernel: TypeAlias = EagerNorm | EagerNormBackward | EagerHeadNorm | EagerHeadNormBackward
NormKernel: TypeAlias = RmsNorm | RmsNormBackward | HeadNorm | HeadNormBackward | EagerNormKernel
EagerMlpKernel: TypeAlias = EagerSwiGlu | EagerSwiGluBackward | EagerGeGlu | EagerGeGluBackward
MlpKernel: TypeAlias = SwiGlu | SwiGluBackward | GeGlu | GeGluBackward | Gelu | GeluBackward | EagerMlpKernel
"""What stands between the products of an MLP."""
TokenKernel: TypeAlias = Gemm | BiasedGemm | TokenSum | NormKernel | Rope | MlpKernel | Scale | EndKernel
"""What a model does to each token by itself."""
ProductKernel: TypeAlias = Gemm | BiasedGemm | JoinedGemm
"""Products of matrices."""
TiledKernel: TypeAlias = TiledMlp | TiledMlpBackward
"""Loops of other kernels over tiles of tokens."""
StateKernel: TypeAlias = Unpack | Pack | Divide | SquareSum | AdamW
"""What handles weights and what an optimiser has of them, element by element."""
StreamingKernel: TypeAlias = (
    Delta | Merge | TokenSum | NormKernel | Rope | MlpKernel | Scale | EndKernel | StateKernel
    | Accumulate | Zero | Copy | Fold
)  # fmt: skip
"""What memory bounds."""
Kernel: TypeAlias = (
    AttentionKernel | LinearKernel | TokenKernel | JoinedGemm | TiledKernel | StateKernel
    | Accumulate | Zero | Hold | Copy | Fold
)  # fmt: skip
Op: TypeAlias = Kernel | HostAdamW | Communication | HostCopy | HostSync

KINDS: dict[str, type[Op]] = {kind.__name__: kind for kind in get_args(Op)}
"""Every kind of op by the name that traces have for it."""
