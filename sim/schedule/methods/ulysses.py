"""DeepSpeed-Ulysses: an all-to-all turns sequence shards into head shards and back (arXiv:2309.14509 §3).

Every rank attends over all tokens of its group for H/U heads, by the attention that lies inside: that of one device,
or a ring (``usp``). Backward is the mirror image. Q, K and V go as three calls, as in the published code, or packed as
one. Where there are fewer key/value heads than ranks, each is sent to U / H_kv ranks, and their gradients are summed up
when they come back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from sim.base.errors import InputError
from sim.schedule.ir.layout import contiguous, num_tokens
from sim.schedule.ir.masks import Span, Tokens
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.ir.shares import model_of_share
from sim.schedule.ir.views import View
from sim.schedule.methods.single import SingleAttention
from sim.schedule.model.layer import AttentionPlan, build_around
from sim.schedule.write.attention import DistributedAttention, Saved, Shard, all_heads
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.head_trade import HeadTrade, TradeOptions
from sim.words.mesh import Mesh
from sim.words.workload import DTYPE_BYTES, ModelSpec, Workload

Inside = Callable[[ProgramBuilder, Shard], DistributedAttention]
"""Makes the attention of the heads that a rank was given."""


def build(workload: Workload, mesh: Mesh, options: TradeOptions = TradeOptions()) -> Schedule:
    """Return Ulysses attention along the axis ulysses; raises InputError where heads do not divide over it."""
    mesh.only("ulysses", "ulysses")
    check_heads(workload.model, mesh)
    ulysses = Communicator(name="ulysses", groups=mesh.groups("ulysses"))

    def plan(work: Workload) -> AttentionPlan:
        layout = contiguous(work.seq, mesh.ulysses)
        return AttentionPlan(
            name="ulysses",
            communicators=(ulysses,),
            shard=lambda rank: all_heads(work.model, layout[mesh.place(rank)["ulysses"]]),
            attention=lambda b: UlyssesAttention(b, ulysses, (Span(0, work.seq),), SingleAttention, options),
            wire_bytes=lambda work: ulysses_bytes(work, mesh.ulysses),
            source="arXiv:2309.14509 §3.2",
            laid_out_bytes=lambda work: input_bytes(work, mesh.ulysses),
            alike=("ulysses",),
        )

    return build_around(plan, workload, mesh, options)


class UlyssesAttention:
    """Ulysses attention of one rank: member i of the group attends to ``tokens`` with the i-th H/U heads."""

    def __init__(
        self, builder: ProgramBuilder, ulysses: Communicator, tokens: Tokens, inside: Inside, options: TradeOptions
    ) -> None:
        self._b = builder
        self._trade = HeadTrade(builder, ulysses, options)
        model, size, position = builder.workload.model, self._trade.size, self._trade.position
        self._replicas = replicas_of(model, size)
        self.saved_shard = shard_of_heads(model, size, position, tokens)
        self._inside = inside(builder, self.saved_shard)
        self._local_tokens = num_tokens(tokens) // size

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """All-to-alls of q, k and v, attention, one all-to-all of the output."""
        if self._trade.size == 1:
            return self._inside.forward(q, k, v)
        out, saved = self._inside.forward(*self.lay_out(q, k, v))
        local = self._local("out", self._b.workload.model.num_heads)
        self._trade.to_tokens({"out": out}, {"out": local})
        return local, saved

    def lay_out(self, q: View, k: View, v: View) -> tuple[View, View, View]:
        """All-to-alls of q, k and v."""
        if self._trade.size == 1:
            return q, k, v
        q, k, v = self._trade.to_heads({"q": q, "k": k, "v": v}, "saved", self._replicas)
        return q, k, v

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """One all-to-all in, attention backward, all-to-alls of dq, dk and dv."""
        if self._trade.size == 1:
            return self._inside.backward(saved, dout)
        (dout,) = self._trade.to_heads({"dout": dout}, "attention")
        names, model = ("dq", "dk", "dv"), self._b.workload.model
        whole = dict(zip(names, self._inside.backward(saved, dout), strict=True))
        local = {name: self._local(name, model.num_heads if name == "dq" else model.num_kv_heads) for name in names}
        self._trade.to_tokens(whole, local)
        return local["dq"], local["dk"], local["dv"]

    def _local(self, name: str, heads: int) -> View:
        """Return a new buffer for this rank's tokens."""
        return self._b.tensor(name, self._local_tokens, heads, "attention")


@lru_cache(maxsize=256)  # every rank asks for all of its group
def kv_heads_of(model: ModelSpec, size: int) -> tuple[int, ...]:
    """Return the first key/value head of every member of a group, or the head that each of ``size`` replicas is of."""
    return tuple(member * model.num_kv_heads // size for member in range(size))


def replicas_of(model: ModelSpec, size: int) -> dict[str, tuple[int, ...]]:
    """Return, where key/value heads are fewer than members of a group, which one each gets."""
    return dict.fromkeys(("k", "v") if model.num_kv_heads < size else (), kv_heads_of(model, size))


def shard_of_heads(model: ModelSpec, size: int, position: int, tokens: Tokens) -> Shard:
    """Return what a member of a group has of these tokens: the heads of its place."""
    heads, kv_heads = model.num_heads // size, max(1, model.num_kv_heads // size)
    first = kv_heads_of(model, size)[position]
    return Shard(tokens, Span(position * heads, (position + 1) * heads), Span(first, first + kv_heads))


def check_heads(whole: ModelSpec, mesh: Mesh) -> None:
    """Raise InputError where the heads that a rank has of a model do not divide over the axis ulysses, nor key/value
    heads by replication.
    """
    model, degree = model_of_share(whole, mesh.tp), mesh.ulysses
    if not _divides(model, degree):
        allowed = [n for n in range(1, model.num_heads + 1) if _divides(model, n)]
        of_share = f" on each of {mesh.tp} tensor-parallel ranks" if mesh.tp > 1 else ""
        raise InputError(
            f"Ulysses degree {degree} does not divide num_heads {model.num_heads} of {model.name}{of_share}, or its "
            f"num_kv_heads {model.num_kv_heads} neither divide nor are divided by it: allowed are "
            f"{', '.join(map(str, allowed))}; set `ulysses_degree`, or `set` model.num_kv_heads=N"
        )


def _divides(model: ModelSpec, degree: int) -> bool:
    kv_heads = model.num_kv_heads
    return model.num_heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def sent_heads(model: ModelSpec, size: int) -> int:
    """Return how many heads of k and v together travel, replicas counted."""
    return 2 * max(model.num_kv_heads, size)


def traded_bytes(workload: Workload, heads: int, size: int) -> int:
    """Return what all ranks send to trade so many heads of all tokens within groups of ``size``: all but (U-1)/U."""
    elements = heads * workload.model.head_dim * workload.batch * workload.seq
    return elements * DTYPE_BYTES[workload.dtype] * (size - 1) // size


def input_bytes(workload: Workload, size: int) -> int:
    """Return what all ranks send of q, k and v."""
    return traded_bytes(workload, workload.model.num_heads + sent_heads(workload.model, size), size)


def ulysses_bytes(workload: Workload, size: int) -> int:
    """Return what all ranks send, in each pass: (2H + 2H_kv) * D * S * e * (U-1)/U (arXiv:2309.14509 §3.2), where H_kv
    counts replicas.
    """
    heads = 2 * workload.model.num_heads + sent_heads(workload.model, size)
    return (workload.forward + workload.backward) * traded_bytes(workload, heads, size)
