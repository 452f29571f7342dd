"""Attention over gathered keys: every rank gathers all of them, then attends (Llama 3, arXiv:2407.21783 §3.3.2).

Nothing overlaps and nothing is merged. Backward gathers again, so that no rank keeps all keys, and scatters the sums of
dK and dV. The gathered keys are put in the order of their positions, which makes every block a causal one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sim.schedule.ir.layout import LAYOUTS
from sim.schedule.ir.masks import Span, Tokens, mask_of
from sim.schedule.ir.ops import AllGather, Copy, ReduceScatter
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.ir.views import TOKENS, Split, View
from sim.schedule.model.layer import AttentionPlan, build_around
from sim.schedule.write.accumulate import Gradients, GradientSum, SoftmaxAccumulator, attend_backward, new_sums
from sim.schedule.write.attention import Saved, all_heads
from sim.schedule.write.blocks import blocks
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.options import SumOptions
from sim.words.workload import DTYPE_BYTES, Workload, gradient_dtype


@dataclass(frozen=True, kw_only=True)
class AllGatherOptions(SumOptions):
    """Options of gathered keys."""

    layout: Literal["contiguous", "zigzag"] = "zigzag"
    """Which tokens lie on which rank: see ``layout``."""
    gradients: Literal["fp32", "model"] = "model"


def build(workload: Workload, mesh: Mesh, options: AllGatherOptions = AllGatherOptions()) -> Schedule:
    """Return attention over keys gathered along the axis ring."""
    mesh.only("allgather", "ring")
    return build_over(
        "allgather",
        lambda work: LAYOUTS[options.layout](work.seq, mesh.ring),
        AllGatherAttention,
        workload,
        mesh,
        options,
    )


def build_over(
    name: str,
    layout_of: Callable[[Workload], tuple[Tokens, ...]],
    attention: type[AllGatherAttention],
    workload: Workload,
    mesh: Mesh,
    options: AllGatherOptions,
) -> Schedule:
    """Return attention over keys gathered along the axis ring, whose rank i has the tokens number i of a layout."""
    everyone = Communicator(name="gather", groups=mesh.groups("ring"))

    def plan(work: Workload) -> AttentionPlan:
        layout = layout_of(work)
        return AttentionPlan(
            name=name,
            communicators=(everyone,) if mesh.ring > 1 else (),
            shard=lambda rank: all_heads(work.model, layout[mesh.place(rank)["ring"]]),
            attention=lambda b: attention(b, everyone, layout, options),
            wire_bytes=lambda work: _wire_bytes(work, options, mesh.ring),
            source="arXiv:2407.21783 §3.3.2",
        )

    return build_around(plan, workload, mesh, options)


class AllGatherAttention:
    """Attention of one rank's queries to the keys of its group; ``layout[i]`` are the tokens of its member i."""

    def __init__(
        self, builder: ProgramBuilder, everyone: Communicator, layout: tuple[Tokens, ...], options: AllGatherOptions
    ) -> None:
        self._b = builder
        self._everyone = everyone
        self._size = len(layout)
        self._options = options
        self._position = everyone.position(builder.rank)
        own = layout[self._position]
        self.saved_shard = all_heads(builder.workload.model, own)
        self._blocks = blocks(mask_of(builder.workload), own, (Span(0, builder.workload.seq),))
        # In the order of positions, chunk i lies at place order[i] of what was gathered rank by rank.
        spans = [span for tokens in layout for span in tokens]
        self._order = tuple(sorted(range(len(spans)), key=lambda place: spans[place].start))

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """Gather K and V, attend."""
        whole = self._gather(k, v)
        softmax = SoftmaxAccumulator(self._b, q, num_parts=len(self._blocks))
        for number, block in enumerate(self._blocks):
            softmax.attend(block, *whole, f"block{number}")
        return softmax.out, Saved(q, k, v, softmax.out, softmax.lse)

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """Gather K and V again, attend backward, scatter the sums of dK and dV."""
        b = self._b
        k, v = self._gather(saved.k, saved.v)
        sums = Gradients(*new_sums(b, self._options, {"dq": saved.q, "dk": k, "dv": v}))
        for number, block in enumerate(self._blocks):
            attend_backward(b, block, saved._replace(k=k, v=v), dout, sums, f"block{number}")
        for total in sums:
            total.fill()
        dk, dv = self._scatter(sums.dk.total, "dk"), self._scatter(sums.dv.total, "dv")
        return sums.dq.finished("dq"), dk.finished("dk"), dv.finished("dv")

    def _gather(self, k: View, v: View) -> tuple[View, View]:
        """Return both as (B, S, H_kv, D) of all tokens in the order of positions; gather both before copying either."""
        b = self._b
        if self._size == 1:
            return k, v
        batch, tokens, heads, dim = k.shape
        found: list[View] = []
        copies: list[tuple[Split, View, str]] = []
        for name, local in (("k", k), ("v", v)):
            whole = b.tensor(f"all {name}", tokens * self._size, heads, "communication")
            arrived = Split(whole, TOKENS, self._size)
            if not self._in_order(whole):
                shape = (self._size * batch, tokens, heads, dim)
                arrived = Split(b.buffer(f"{name} gathered", "bshd", shape, b.dtype(k), "communication"), 0, self._size)
                copies.append((arrived, whole, f"order {name}"))
            b.add(AllGather(label=f"gather {name}", communicator=self._everyone.name, send=local, recvs=arrived))
            found.append(whole)
        for arrived, whole, label in copies:
            self._reorder(arrived, whole, label, back=False)
        return found[0], found[1]

    def _scatter(self, whole: View, name: str) -> GradientSum:
        """Return the sum over all ranks of a gradient of this rank's own tokens."""
        b = self._b
        if self._size == 1:
            return GradientSum(b, name, whole, empty=False)
        batch, seq, heads, dim = whole.shape
        tokens, dtype = seq // self._size, b.dtype(whole)
        shape = (self._size * batch, tokens, heads, dim)
        packed = Split(whole, TOKENS, self._size)
        if not self._in_order(whole):
            packed = Split(b.buffer(f"{name} packed", "bshd", shape, dtype, "communication"), 0, self._size)
            self._reorder(packed, whole, f"order {name}", back=True)
        own = b.tensor(f"{name} own", tokens, heads, "attention", dtype)
        b.add(ReduceScatter(label=f"scatter {name}", communicator=self._everyone.name, sends=packed, recv=own))
        return GradientSum(b, name, own, empty=False)

    def _in_order(self, whole: View) -> bool:
        """Return whether the shards of all ranks, one after the other, are in the order of positions."""
        alone = len(self._order) == self._size
        return alone and self._b.parts_are_contiguous(Split(whole, TOKENS, self._size))

    def _reorder(self, by_rank: Split, whole: View, label: str, *, back: bool) -> None:
        """Copy what lies rank by rank into the order of positions, or back: chunk by chunk if ranks have several."""
        b, spans = self._b, len(self._order) // self._size
        each = by_rank.view.shape[TOKENS] // spans
        for span in range(spans):
            some = Split(by_rank.view[:, span * each : (span + 1) * each], 0, self._size)
            places = [self._order.index(rank * spans + span) for rank in range(self._size)]
            descending = places[0] > places[-1]
            part = whole[:, min(places) * each : (max(places) + 1) * each]
            order = tuple(reversed(range(self._size))) if descending else ()
            run = Split(part, TOKENS, self._size)
            source, target = (run, some) if back else (some, run)
            b.add(Copy(label=label, source=source, target=target, order=tuple(order)))


def _wire_bytes(workload: Workload, options: SumOptions, size: int) -> int:
    """Over all ranks: forward P(P-1) shards of KV; backward as many again, and as many of dKV."""
    model = workload.model
    whole = 2 * workload.batch * workload.seq * model.num_kv_heads * model.head_dim
    element = DTYPE_BYTES[workload.dtype]
    backward = element + DTYPE_BYTES[gradient_dtype(workload, options)]
    return (size - 1) * whole * (element * workload.forward + backward * workload.backward)
