"""Plays a plan over gathered keys: ranks attend their own queries, of any sizes (WLB-LLM, arXiv:2503.17924 §5).

As attention over gathered keys (``allgather``), but shards differ in size and lie in any order: parts of collectives
have sizes, and one kernel attends to all blocks of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.ops import AllGather, Copy, ReduceScatter
from sim.schedule.ir.plan import Plans, plan_of, require_ranks
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.ir.views import TOKENS, Split, View
from sim.schedule.methods.allgather import AllGatherAttention, AllGatherOptions, build_over
from sim.schedule.write.accumulate import GradientSum
from sim.schedule.write.blocks import together
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.workload import Dtype, Workload


def gathered(plans: Plans, name: str = "gathered") -> Callable[..., Schedule]:
    """Return the builder of a schedule in which ranks attend their own queries of a plan to gathered keys, for
    ``longstep.Setup(schedule=...)``. Its ring has as many ranks as the plan, each of which has tokens, without strides.
    """
    builder = partial(build, plans, name)
    builder.__qualname__ = name  # type: ignore[attr-defined]  # what setups call it
    return builder


_DEFAULT = AllGatherOptions()


def build(plans: Plans, name: str, workload: Workload, mesh: Mesh, options: AllGatherOptions = _DEFAULT) -> Schedule:
    """Return attention over gathered keys, along the axis ring; raises InputError for a plan of other ranks. The layout
    is that of the plan, not of the options.
    """
    mesh.only(name, "ring")

    def layout(work: Workload) -> tuple[Tokens, ...]:
        plan = plan_of(plans, work)
        require_ranks(plan, mesh)
        return plan.layout

    return build_over(name, layout, GatheredAttention, workload, mesh, options)


class GatheredAttention(AllGatherAttention):
    """Attention of one rank's queries to the keys of its group; ``layout[i]`` are the tokens of its member i."""

    def __init__(
        self, builder: ProgramBuilder, everyone: Communicator, layout: tuple[Tokens, ...], options: AllGatherOptions
    ) -> None:
        super().__init__(builder, everyone, layout, options)
        self._blocks = (together(self._blocks),)
        self._parts = tuple(map(num_tokens, layout))
        self._chunks = tuple(span.size for tokens in layout for span in tokens)
        self._moves = self._order != tuple(range(len(self._order)))

    def _gather(self, k: View, v: View) -> tuple[View, View]:
        """Return both as (B, S, H_kv, D) of all tokens in the order of positions; gather both before copying either."""
        if self._size == 1:
            return super()._gather(k, v)
        by_rank = [self._whole(f"{name} gathered", local) for name, local in (("k", k), ("v", v))]
        for name, local, into in zip(("k", "v"), (k, v), by_rank, strict=True):
            for some, recvs in self._sequences(local, into):
                self._b.add(AllGather(label=f"gather {name}", communicator=self._everyone.name, send=some, recvs=recvs))
        if not self._moves:
            return by_rank[0], by_rank[1]
        found = []
        for name, view in zip(("k", "v"), by_rank, strict=True):
            found.append(self._whole(f"all {name}", view))
            source, target = self._chunked(view, in_order=False), self._chunked(found[-1], in_order=True)
            self._b.add(Copy(label=f"order {name}", source=source, target=target, order=self._order))
        return found[0], found[1]

    def _scatter(self, whole: View, name: str) -> GradientSum:
        """Return the sum over all ranks of a gradient of this rank's own tokens."""
        if self._size == 1:
            return super()._scatter(whole, name)
        b, by_rank, dtype = self._b, whole, self._b.dtype(whole)
        if self._moves:
            by_rank = self._whole(f"{name} packed", whole, dtype)
            places = tuple(sorted(range(len(self._order)), key=self._order.__getitem__))
            source, target = self._chunked(whole, in_order=True), self._chunked(by_rank, in_order=False)
            b.add(Copy(label=f"order {name}", source=source, target=target, order=places))
        own = b.tensor(f"{name} own", self._parts[self._position], whole.shape[2], "attention", dtype)
        for some, sends in self._sequences(own, by_rank):
            b.add(ReduceScatter(label=f"scatter {name}", communicator=self._everyone.name, sends=sends, recv=some))
        return GradientSum(b, name, own, empty=False)

    def _whole(self, name: str, like: View, dtype: Dtype | None = None) -> View:
        """Return a buffer of all tokens, in the data type of the workload if none is given."""
        return self._b.tensor(name, self._b.workload.seq, like.shape[2], "communication", dtype)

    def _sequences(self, own: View, by_rank: View) -> list[tuple[View, Split]]:
        """Return own rows, and those of all ranks in parts, of each sequence of the batch: only of one do the parts
        follow each other in memory.
        """
        sizes = self._parts if len(set(self._parts)) > 1 else ()
        return [
            (own[one : one + 1], Split(by_rank[one : one + 1], TOKENS, self._size, sizes))
            for one in range(own.shape[0])
        ]

    def _chunked(self, whole: View, *, in_order: bool) -> Split:
        """Return all tokens in the spans of the layout, by rank or in the order of positions."""
        places = self._order if in_order else range(len(self._chunks))
        return Split(whole, TOKENS, len(self._chunks), tuple(self._chunks[place] for place in places))
