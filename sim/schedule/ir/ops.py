"""The ops of the intermediate representation.

The op set is a closed union: every reader ends in ``assert_never``, so that the type checker names the reader that
forgot a kind. ``reads`` and ``writes`` of an op are all that dependencies are derived from. Dims: ``sim.workload``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from sim.options import AttentionName
from sim.schedule.ir.masks import Band, Tokens
from sim.schedule.ir.views import Data, Split, View

COMPUTE = "compute"
"""The stream of all kernels; every communicator has a stream of its own name."""
HOST = "host"
"""Where the host's own waiting shows."""
OFFLOAD, FETCH = "to host", "from host"
"""The streams of copies to the host's memory, and back: GPUs have a copy engine for each."""
STREAMS = (COMPUTE, HOST, OFFLOAD, FETCH)
"""Those that are no communicator's."""

Part = Literal["forward", "backward"]
GemmForm = Literal["nn", "nt", "tn"]


class Message(NamedTuple):
    """One tensor that an Exchange sends to, or receives from, ``peer``."""

    peer: int
    view: View


class _Op(Data, frozen=True, kw_only=True, tag=True):
    """What every op has: its stream, the pass that it belongs to, and a short name for people."""

    stream: str
    part: Part
    label: str


class Attend(_Op, frozen=True, kw_only=True):
    """out, lse = attention of one block with its log-sum-exp. q, out: bshd; k, v: bshd; lse: bhs.

    A standard kernel keeps the probabilities too, ``probs``: (B, H, S_q, S_k).
    """

    q: View
    k: View
    v: View
    out: View
    lse: View
    band: Band
    kernel: AttentionName = "flash"
    probs: View | None = None

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.q, self.k, self.v)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.out, self.lse) if self.probs is None else (self.out, self.lse, self.probs)


class AttendBackward(_Op, frozen=True, kw_only=True):
    """dq, dk, dv of one block, from the global out and lse. Shapes as in Attend; dout, dq: bshd; dk, dv: bshd.

    ``out`` may be delta (bhs) instead, all that backward needs of it: see Delta.
    """

    q: View
    k: View
    v: View
    out: View
    lse: View
    dout: View
    dq: View
    dk: View
    dv: View
    band: Band
    kernel: AttentionName = "flash"
    probs: View | None = None

    @property
    def from_delta(self) -> bool:
        """Whether delta stands in the place of out."""
        return len(self.out.slices) == 3

    @property
    def reads(self) -> tuple[View, ...]:
        given = (self.q, self.k, self.v, self.out, self.lse, self.dout)
        return given if self.probs is None else (*given, self.probs)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.dq, self.dk, self.dv)


class Delta(_Op, frozen=True, kw_only=True):
    """delta = the sum of dout * out over the head dim, of the global out (arXiv:2307.08691 algorithm 2, line 4).

    out, dout: bshd; delta: bhs, in the accumulation data type.
    """

    out: View
    dout: View
    delta: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.out, self.dout)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.delta,)


class Merge(_Op, frozen=True, kw_only=True):
    """Fold the partial (out, lse) of more keys into an accumulated one of the same queries."""

    out: View
    lse: View
    into_out: View
    into_lse: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.out, self.lse, self.into_out, self.into_lse)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.into_out, self.into_lse)


class Accumulate(_Op, frozen=True, kw_only=True):
    """into += source; data types may differ."""

    source: View
    into: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.source, self.into)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.into,)


class Zero(_Op, frozen=True, kw_only=True):
    """into = 0: a sum of gradients to which nothing has been added yet."""

    into: View

    @property
    def reads(self) -> tuple[View, ...]:
        return ()

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.into,)


class Copy(_Op, frozen=True, kw_only=True):
    """Part i of target = part i of source, or part ``order[i]``, in one kernel: layout copies, packing, casts."""

    source: Split
    target: Split
    order: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.source.view,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.target.view,)


class Fold(_Op, frozen=True, kw_only=True):
    """Part i of target = the sum of parts i * n to i * n + n - 1 of source, which has n times as many parts: gradients
    of key/value heads that were replicated.
    """

    source: Split
    target: Split

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.source.view,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.target.view,)


class Gemm(_Op, frozen=True, kw_only=True):
    """One matrix product of a linear layer with tokens x and weight w, by its form as BLAS names it.

    nn: out = x w           x (B, S, fan in), w (fan in, fan out), out (B, S, fan out)
    nt: out = dy w^T        dy (B, S, fan out), out (B, S, fan in); with ``accumulate`` added to what out holds
    tn: out = x^T dy        out (fan in, fan out), summed over batch and tokens of this rank

    Heads and head dim count as one dimension: (B, S, H, D) is (B, S, H * D).
    """

    form: GemmForm
    a: View
    b: View
    out: View
    accumulate: bool = False

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.a, self.b, self.out) if self.accumulate else (self.a, self.b)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.out,)


class RmsNorm(_Op, frozen=True, kw_only=True):
    """out = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + epsilon) over the last dimension (arXiv:1910.07467).

    x, out: bse; weight: i; rstd: bs, in the accumulation data type.
    """

    x: View
    weight: View
    out: View
    rstd: View
    epsilon: float

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.x, self.weight)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.out, self.rstd)


class RmsNormBackward(_Op, frozen=True, kw_only=True):
    """dx and dweight (summed over batch and tokens of this rank) of RmsNorm. Shapes as there."""

    x: View
    weight: View
    rstd: View
    dout: View
    dx: View
    dweight: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.x, self.weight, self.rstd, self.dout)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.dx, self.dweight)


class Rope(_Op, frozen=True, kw_only=True):
    """Rotate x (bshd) in place by the positions of its tokens, halves paired as in Llama (arXiv:2104.09864).

    ``inverse`` rotates back, which is the backward pass.
    """

    x: View
    tokens: Tokens
    theta: float
    inverse: bool = False

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.x,)


class SwiGlu(_Op, frozen=True, kw_only=True):
    """out = silu(gate) * up (arXiv:2002.05202). All bse."""

    gate: View
    up: View
    out: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.gate, self.up)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.out,)


class SwiGluBackward(_Op, frozen=True, kw_only=True):
    """dgate and dup of SwiGlu. All bse."""

    gate: View
    up: View
    dout: View
    dgate: View
    dup: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.gate, self.up, self.dout)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.dgate, self.dup)


class Exchange(_Op, frozen=True, kw_only=True):
    """Grouped point to point: all sends and receives begin together, as in ncclGroup and batch_isend_irecv."""

    communicator: str
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]

    @property
    def reads(self) -> tuple[View, ...]:
        return tuple([message.view for message in self.sends])

    @property
    def writes(self) -> tuple[View, ...]:
        return tuple([message.view for message in self.recvs])


class AllToAll(_Op, frozen=True, kw_only=True):
    """Part i of ``sends`` goes to member i of the group, part i of ``recvs`` comes from it; the own one is copied."""

    communicator: str
    sends: Split
    recvs: Split

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.sends.view,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.recvs.view,)


class AllGather(_Op, frozen=True, kw_only=True):
    """Part i of ``recvs`` = what member i sends."""

    communicator: str
    send: View
    recvs: Split

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.send,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.recvs.view,)


class ReduceScatter(_Op, frozen=True, kw_only=True):
    """recv = sum over the members of what each sends to this one; part i of ``sends`` is meant for member i."""

    communicator: str
    sends: Split
    recv: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.sends.view,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.recv,)


class AllReduce(_Op, frozen=True, kw_only=True):
    """view = sum of the members' views, in place."""

    communicator: str
    view: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.view,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.view,)


class HostCopy(_Op, frozen=True, kw_only=True):
    """target = source, one of which lies in the host's memory: carried out by a copy engine, which needs no SMs."""

    source: View
    target: View

    @property
    def reads(self) -> tuple[View, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[View, ...]:
        return (self.target,)


class HostSync(_Op, frozen=True, kw_only=True):
    """The host issues nothing more before all that it issued to ``streams`` has ended."""

    streams: tuple[str, ...]

    @property
    def reads(self) -> tuple[View, ...]:
        return ()

    @property
    def writes(self) -> tuple[View, ...]:
        return ()


class Barrier(_Op, frozen=True, kw_only=True):
    """Ends on no member before it has begun on all."""

    communicator: str

    @property
    def reads(self) -> tuple[View, ...]:
        return ()

    @property
    def writes(self) -> tuple[View, ...]:
        return ()


Collective: TypeAlias = AllToAll | AllGather | ReduceScatter | AllReduce | Barrier
Communication: TypeAlias = Exchange | Collective
AttentionKernel: TypeAlias = Attend | AttendBackward | Delta | Merge
TokenKernel: TypeAlias = Gemm | RmsNorm | RmsNormBackward | Rope | SwiGlu | SwiGluBackward
"""What a layer does to each token by itself."""
Kernel: TypeAlias = AttentionKernel | TokenKernel | Accumulate | Zero | Copy | Fold
Op: TypeAlias = Kernel | Communication | HostCopy | HostSync
