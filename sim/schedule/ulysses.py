"""DeepSpeed-Ulysses: an all-to-all turns sequence shards into head shards and back (arXiv:2309.14509 §3).

Every rank attends over the whole sequence for H/P heads. Q, K and V go as three calls, as in the published code, each
with the layout copies that it needs; backward is the mirror image.
"""

from __future__ import annotations

from sim.errors import InputError
from sim.schedule.accumulate import SoftmaxAccumulator
from sim.schedule.attention import Saved, Shard, all_heads
from sim.schedule.builder import ProgramBuilder
from sim.schedule.ir import Communicator, Schedule
from sim.schedule.layer import AttentionPlan, build_around
from sim.schedule.layout import contiguous
from sim.schedule.masks import MASKS, Span
from sim.schedule.views import Category, Split, View
from sim.workload import DTYPE_BYTES, ModelSpec, Parallel, Workload

TOKENS, HEADS = 1, 2
"""Dimensions of (B, S, H, D)."""


def build(workload: Workload, parallel: Parallel) -> Schedule:
    """Return Ulysses attention over all ranks; raises InputError where heads do not divide over them."""
    ranks = tuple(range(parallel.num_ranks))
    check_heads(workload.model, len(ranks))
    layout = contiguous(workload.seq, len(ranks))
    ulysses = Communicator(name="ulysses", groups=(ranks,))
    plan = AttentionPlan(
        name="ulysses",
        communicators=(ulysses,),
        shard=lambda rank: all_heads(workload.model, layout[rank]),
        attention=lambda b: UlyssesAttention(b, ulysses),
        wire_bytes=_wire_bytes(workload, len(ranks)),
        source="arXiv:2309.14509 §3.2",
    )
    return build_around(plan, workload, parallel)


class UlyssesAttention:
    """Ulysses attention of one rank: member i of the group attends with the i-th H/P heads."""

    def __init__(self, builder: ProgramBuilder, ulysses: Communicator) -> None:
        self._b = builder
        self._ulysses = ulysses
        group = ulysses.group_of(builder.rank)
        self._size = len(group)
        position = group.index(builder.rank)
        model = builder.workload.model
        heads, kv_heads = model.num_heads // self._size, model.num_kv_heads // self._size
        self.saved_shard = Shard(
            tokens=(Span(0, builder.workload.seq),),
            heads=Span(position * heads, (position + 1) * heads),
            kv_heads=Span(position * kv_heads, (position + 1) * kv_heads),
        )

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """Three all-to-alls in, attention, one all-to-all out."""
        q, k, v = (self._to_heads(view, name, "saved") for view, name in ((q, "q"), (k, "k"), (v, "v")))
        softmax = SoftmaxAccumulator(self._b, q, num_blocks=1)
        softmax.attend(k, v, MASKS[self._b.workload.mask], "all")
        return self._to_tokens(softmax.out, "out"), Saved(q, k, v, softmax.out, softmax.lse)

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """One all-to-all in, attention backward, three all-to-alls out."""
        b = self._b
        dout = self._to_heads(dout, "dout", "attention")
        dq, dk, dv = (
            b.like(f"{name} of heads", like, "attention") for name, like in zip(("dq", "dk", "dv"), saved, strict=False)
        )
        b.attend_backward(saved, dout, (dq, dk, dv), MASKS[b.workload.mask], "backward all")
        return self._to_tokens(dq, "dq"), self._to_tokens(dk, "dk"), self._to_tokens(dv, "dv")

    def _to_heads(self, local: View, name: str, category: Category) -> View:
        """Return (B, S, H/P, D) of the whole sequence from (B, S/P, H, D) of this rank's tokens."""
        if self._size == 1:
            return local
        _, tokens, heads, _ = local.shape
        whole = self._b.tensor(f"{name} of heads", tokens * self._size, heads // self._size, category)
        self._all_to_all(self._split(local, HEADS), self._split(whole, TOKENS), name)
        return whole

    def _to_tokens(self, whole: View, name: str) -> View:
        """Return (B, S/P, H, D) of this rank's tokens from (B, S, H/P, D) of the whole sequence."""
        if self._size == 1:
            return whole
        _, seq, heads, _ = whole.shape
        local = self._b.tensor(name, seq // self._size, heads * self._size, "attention")
        self._all_to_all(self._split(whole, TOKENS), self._split(local, HEADS), name)
        return local

    def _split(self, view: View, dim: int) -> Split:
        return Split(view, dim, self._size)

    def _all_to_all(self, sends: Split, recvs: Split, name: str) -> None:
        """Append the all-to-all, with a copy before and after it where the parts do not follow each other in memory."""
        b = self._b
        if not b.parts_are_contiguous(sends):
            packed = self._staging(f"{name} packed", sends)
            b.copy_parts(sends, packed, f"pack {name}")
            sends = packed
        if b.parts_are_contiguous(recvs):
            b.all_to_all(self._ulysses, sends, recvs, f"all-to-all {name}")
        else:
            arrived = self._staging(f"{name} arrived", recvs)
            b.all_to_all(self._ulysses, sends, arrived, f"all-to-all {name}")
            b.copy_parts(arrived, recvs, f"unpack {name}")

    def _staging(self, name: str, like: Split) -> Split:
        """Return a new buffer in which the parts of ``like`` follow each other."""
        batch, *rest = like.part_shape
        view = self._b.buffer(name, "bshd", (self._size * batch, *rest), self._b.dtype(like.view), "repartition")
        return Split(view, 0, self._size)


def check_heads(model: ModelSpec, degree: int) -> None:
    """Raise InputError where query or key/value heads do not divide over ``degree`` ranks."""
    for name, heads in (("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)):
        if heads % degree:
            allowed = [n for n in range(1, heads + 1) if model.num_heads % n == 0 and model.num_kv_heads % n == 0]
            raise InputError(
                f"Ulysses degree {degree} does not divide {name} {heads} of {model.name}: allowed are "
                f"{', '.join(map(str, allowed))}; set --gpus, or --set model.{name}=N"
            )


def _wire_bytes(workload: Workload, size: int) -> int:
    """Over all ranks, in each pass: (2H + 2H_kv) * D * S/P * (P-1)/P per rank (arXiv:2309.14509 §3.2)."""
    model = workload.model
    elements = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim * workload.batch * workload.seq
    passes = workload.forward + workload.backward
    return passes * elements * DTYPE_BYTES[workload.dtype] * (size - 1) // size
