"""USP: heads are split by Ulysses over U ranks, and the sequence by a ring over R (arXiv:2405.07719 §3).

An all-to-all among U ranks gives each the tokens of a ring member for H/U heads; with these it takes part in a ring.
Groups of neighbouring ranks share a node, so the placement says which of the two uses the faster links.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.options import OF_LAYERS, Options, only
from sim.schedule.ir.layout import LAYOUTS, shared_out
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.methods.ring import (
    RING_OPTIONS,
    Heads,
    RingAttention,
    Rings,
    check_backward,
    ring_bytes,
    ring_communicators,
)
from sim.schedule.methods.ulysses import UlyssesAttention, check_heads, ulysses_bytes
from sim.schedule.model.layer import AttentionPlan, build_around
from sim.schedule.write.attention import DistributedAttention, Shard, all_heads
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.head_trade import TRADE_OPTIONS
from sim.workload import Parallel, Workload


def build(workload: Workload, parallel: Parallel) -> Schedule:
    """Return USP attention over U * R ranks; raises InputError where heads or tokens do not divide over them."""
    options, model = parallel.options, workload.model
    only(options, "usp", "placement", *RING_OPTIONS, *TRADE_OPTIONS, *OF_LAYERS)
    mesh = Mesh(parallel)
    check_heads(model, mesh.ulysses_degree)
    check_backward(workload, options)
    plan = AttentionPlan(
        name="usp",
        communicators=mesh.communicators,
        shard=mesh.shards(workload),
        attention=mesh.attention(workload, UlyssesAttention),
        wire_bytes=ulysses_bytes(workload, mesh.ulysses_degree) + mesh.ring_bytes(workload),
        source="arXiv:2405.07719 §3; its rings as in ring-flash-attention",
    )
    return build_around(plan, workload, parallel)


class Mesh:
    """Ranks as a grid of Ulysses groups and rings."""

    def __init__(self, parallel: Parallel) -> None:
        self.ulysses_degree, self.ring_degree = parallel.ulysses_degree, parallel.ring_degree
        self._options = parallel.options
        u, r = self.ulysses_degree, self.ring_degree
        inner = parallel.options.placement == "ulysses-inner"
        ranks = [[ring * u + head if inner else head * r + ring for head in range(u)] for ring in range(r)]
        self._place = {rank: (ring, head) for ring, row in enumerate(ranks) for head, rank in enumerate(row)}
        self.ulysses = Communicator(name="ulysses", groups=tuple(map(tuple, ranks)))
        self.rings = ring_communicators(tuple(zip(*ranks, strict=True)), parallel.options)

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """All communicators; without a ring there is none for it."""
        return (self.ulysses, *(self.rings.declared if self.ring_degree > 1 else ()))

    def shards(self, workload: Workload) -> Callable[[int], Shard]:
        """Return which tokens each rank owns: a share of those of its place in the ring."""
        tokens = shared_out(self._options.layout, workload.seq, self.ring_degree, self.ulysses_degree)

        def shard(rank: int) -> Shard:
            ring, head = self._place[rank]
            return all_heads(workload.model, tokens[ring][head])

        return shard

    def attention(
        self, workload: Workload, outside: Callable[..., DistributedAttention]
    ) -> Callable[[ProgramBuilder], DistributedAttention]:
        """Return the attention of each rank: ``outside`` trades heads, and inside it the ring goes around."""
        layout = LAYOUTS[self._options.layout](workload.seq, self.ring_degree)

        def attention(b: ProgramBuilder) -> DistributedAttention:
            ring, _ = self._place[b.rank]
            return outside(b, self.ulysses, layout[ring], _inside(self.rings, layout, self._options), self._options)

        return attention

    def ring_bytes(self, workload: Workload) -> int:
        """Return what the rings send: U of them, each with its share of the heads."""
        model, u = workload.model, self.ulysses_degree
        heads = Heads(model.num_heads // u, max(1, model.num_kv_heads // u))
        return u * ring_bytes(workload, self._options, self.ring_degree, heads)


def _inside(
    rings: Rings, layout: tuple[Tokens, ...], options: Options
) -> Callable[[ProgramBuilder, Shard], DistributedAttention]:
    return lambda b, shard: RingAttention(b, rings, layout, shard, options)
