"""Double ring: rings inside nodes, and a ring of rings across them (LoongTrain, arXiv:2406.18485 §4.3).

P = n * w ranks, w neighbours to an inner ring. In each of n outer rounds the keys at hand go around the inner ring,
while those that this rank began the round with go one inner ring further: so the slow links have a whole round for one
hop, and all of a node's links to the outside carry keys at once. Backward the sums of dK and dV go around the inner
ring with their keys, home to the rank that began the round, and from there one inner ring further, where what the next
round adds meets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from sim.base.errors import InputError
from sim.schedule.ir.layout import laid_out, num_tokens
from sim.schedule.ir.masks import Tokens, mask_of
from sim.schedule.ir.ops import Accumulate
from sim.schedule.ir.program import Schedule
from sim.schedule.ir.views import View
from sim.schedule.methods.hints import Hints
from sim.schedule.methods.ring import HopOptions, Rings, ring_communicators, sum_slots, travel_slots, travelling
from sim.schedule.model.layer import AttentionPlan, build_around
from sim.schedule.write.accumulate import Gradients, GradientSum, SoftmaxAccumulator, attend_backward, new_sums
from sim.schedule.write.attention import Saved, all_heads
from sim.schedule.write.blocks import Block, kept_blocks
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.halves import HostMasks
from sim.schedule.write.hops import Lane, hop, to_send
from sim.words.mesh import Mesh
from sim.words.options import LayoutName, SumOptions
from sim.words.workload import DTYPE_BYTES, Workload, gradient_dtype


@dataclass(frozen=True, kw_only=True)
class DoubleRingOptions(HopOptions):
    """Options of rings of rings."""

    layout: LayoutName = "zigzag"
    communicators: Literal["one", "two"] = "two"
    """See rings. InternEvo, LoongTrain's code, has process groups of their own for dKV (DKV_INTRA_WINDOW and
    DKV_INTER_WINDOW)."""
    inner_ring_degree: Annotated[int, Meta(ge=1)] | None = None
    """Ranks of the inner rings; by default the largest divisor of the ring degree that is at most the GPUs of a node:
    inside one node all of them, one ring."""


def build(
    workload: Workload, mesh: Mesh, options: DoubleRingOptions = DoubleRingOptions(), hints: Hints = Hints()
) -> Schedule:
    """Return attention over a ring of rings; raises InputError where the inner degree does not divide P."""
    mesh.only("double-ring", "ring")
    size = mesh.ring
    width = inner_degree(options, size, max(1, hints.gpus_per_node // mesh.tp))
    nodes = [[ring[first : first + width] for first in range(0, size, width)] for ring in mesh.groups("ring")]
    inner = ring_communicators(tuple(node for ring in nodes for node in ring), options, "inner")
    outer = ring_communicators(tuple(peers for ring in nodes for peers in zip(*ring, strict=True)), options, "outer")

    def plan(work: Workload) -> AttentionPlan:
        layout = laid_out(options.layout, work, size, options.sharding)
        return AttentionPlan(
            name="double-ring",
            communicators=(*(inner.declared if width > 1 else ()), *(outer.declared if size > width else ())),
            shard=lambda rank: all_heads(work.model, layout[mesh.place(rank)["ring"]]),
            attention=lambda b: DoubleRingAttention(b, inner, outer, layout, options),
            wire_bytes=lambda work: _wire_bytes(work, options, size // width, width),
            source="arXiv:2406.18485 §4.3",
        )

    return build_around(plan, workload, mesh, options)


def inner_degree(options: DoubleRingOptions, size: int, gpus_per_node: int) -> int:
    """Return how many ranks an inner ring has."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    if options.inner_ring_degree is None:
        return max(n for n in divisors if n <= gpus_per_node)
    if options.inner_ring_degree not in divisors:
        raise InputError(
            f"inner ring degree {options.inner_ring_degree} does not divide {size} ranks: allowed are "
            f"{', '.join(map(str, divisors))}; with `set` schedule.inner_ring_degree"
        )
    return options.inner_ring_degree


class DoubleRingAttention:
    """Attention of one rank in its inner and its outer ring; ``layout[i]`` are the tokens of the i-th rank of both."""

    def __init__(
        self, builder: ProgramBuilder, inner: Rings, outer: Rings, layout: Sequence[Tokens], options: DoubleRingOptions
    ) -> None:
        self._b = builder
        self._inner, self._outer = inner, outer
        self._layout = layout
        self._options = options
        self._width = len(inner.on.group_of(builder.rank))
        self._rounds = len(outer.on.group_of(builder.rank))
        self._node, self._place = outer.on.position(builder.rank), inner.on.position(builder.rank)
        self._mask = mask_of(builder.workload)
        self._masks = HostMasks(builder, options.halves)
        self._rows = num_tokens(layout[self._source(0, 0)])
        self.saved_shard = all_heads(builder.workload.model, layout[self._source(0, 0)])

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """Play n rounds of w steps: n * w - 1 hops of KV in all."""
        found = [[self._blocks(r, s) for s in range(self._width)] for r in range(self._rounds)]
        softmax = SoftmaxAccumulator(self._b, q, num_parts=sum(len(step) for one in found for step in one))
        starts, pool = self._starts((k, v)), travel_slots(self._b, self._inner.on, (k, v), "kv", self._width)
        self._masks.begin(backward=False)
        for r in range(self._rounds):
            for s, (k_here, v_here) in enumerate(self._round(r, starts, pool)):
                for block in found[r][s]:
                    with self._masks.around(block, self._rows, backward=False):
                        softmax.attend(block, k_here, v_here, f"kv{self._source(r, s)}")
        return softmax.out, Saved(q, k, v, softmax.out, softmax.lse)

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """Play n rounds of w steps again: w hops of dKV in each round, and one outward after it."""
        b, names, kv = self._b, ("dk", "dv"), (saved.k, saved.v)
        likes = dict(zip(names, kv, strict=True))
        starts, pool = self._starts(kv), travel_slots(b, self._inner.on, kv, "kv", self._width)
        (dq,) = new_sums(b, self._options, {"dq": saved.q})
        arrived: tuple[View, ...] = ()
        self._masks.begin(backward=True)
        for r in range(self._rounds):
            # New ones in each round: those of the last one are still on their way outward.
            slots = sum_slots(b, self._inner.behind, self._options, likes, self._width)
            for s, (k_here, v_here) in enumerate(self._round(r, starts, pool)):
                source, here = self._source(r, s), slots[s % 2]
                sums = [GradientSum(b, name, view, empty=s == 0) for name, view in zip(names, here, strict=True)]
                for block in self._blocks(r, s):
                    operands = saved._replace(k=k_here, v=v_here)
                    with self._masks.around(block, self._rows, backward=True):
                        attend_backward(b, block, operands, dout, Gradients(dq, *sums), f"kv{source}")
                for total in sums if s == 0 else ():
                    total.fill()
                if self._width > 1:
                    self._hop(self._inner.behind, here, slots[(s + 1) % 2], f"send dkv{source}")
            home = slots[self._width % 2 if self._width > 1 else 0]
            for name, view, into in zip(names, arrived, home, strict=False):
                b.add(Accumulate(label=f"add {name} of round{r}", source=view, into=into))
            if self._rounds > 1:
                arrived = travelling(b, self._outer.behind, self._options, likes, "from afar")
                self._hop(self._outer.behind, home, arrived, f"send outward dkv{self._source(r, 0)}")
        dk, dv = (GradientSum(b, name, view, empty=False) for name, view in zip(names, arrived or home, strict=True))
        return dq.finished("dq"), dk.finished("dk"), dv.finished("dv")

    def _source(self, outer: int, inner: int) -> int:
        """Return whose keys are at hand in a step of a round."""
        return (self._node - outer) % self._rounds * self._width + (self._place - inner) % self._width

    def _blocks(self, outer: int, inner: int) -> tuple[Block, ...]:
        queries, keys = self._layout[self._source(0, 0)], self._layout[self._source(outer, inner)]
        return kept_blocks(self._mask, queries, keys, self._options.sharding)

    def _starts(self, kv: tuple[View, View]) -> list[tuple[View, ...]]:
        """Return which buffers hold the keys that each round begins with: the own ones, then two in turns."""
        pool = travel_slots(self._b, self._outer.on, kv, "outer kv", self._rounds)
        own = to_send(self._b, self._outer.on, kv, "kv") if self._width * self._rounds > 1 else kv
        return [own, *(pool[i % 2] for i in range(self._rounds - 1))]

    def _round(
        self, r: int, starts: list[tuple[View, ...]], pool: list[tuple[View, ...]]
    ) -> Iterator[tuple[View, ...]]:
        """Yield the keys at hand in each step of a round; send on what later rounds and steps need."""
        if r < self._rounds - 1:
            self._hop(self._outer.on, starts[r], starts[r + 1], f"send outward kv{self._source(r, 0)}")
        here = starts[r]
        for s in range(self._width):
            there = pool[s % len(pool)] if pool else here
            if s < self._width - 1:
                self._hop(self._inner.on, here, there, f"send kv{self._source(r, s)}")
            yield here
            here = there

    def _hop(self, over: Lane, here: Sequence[View], there: Sequence[View], label: str) -> None:
        hop(self._b, over, here, there, 1, label, overlap=self._options.overlap)


def _wire_bytes(workload: Workload, options: SumOptions, rounds: int, width: int) -> int:
    """Over all ranks: P(P-1) hops of KV in each pass; of dKV w hops in each of n rounds, and n outward."""
    size, model = rounds * width, workload.model
    shard = 2 * workload.batch * workload.seq // size * model.num_kv_heads * model.head_dim
    element = DTYPE_BYTES[workload.dtype]
    hops = (size if width > 1 else 0) + (rounds if rounds > 1 else 0)
    summed = hops * DTYPE_BYTES[gradient_dtype(workload, options)]
    return size * shard * ((size - 1) * element * (workload.forward + workload.backward) + summed * workload.backward)
