"""DistFlashAttn's load-balanced schedule: ranks without causal work help those that have it (arXiv:2310.03294 §3.2).

After its own block, rank p attends in round t = 1 … P/2 to the keys of rank p - t, which it fetches; a rank p < t has
none there, and takes the queries of rank p - t + P instead, attends with its own keys, and returns (out, lse) for their
owner to merge. For even P the last round has no helpers, since its owners get there themselves. What the next round
needs is fetched during this one, and results return during the next. Backward dK and dV return in the same way, and dQ
from helpers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sim.base.errors import InputError
from sim.schedule.ir.layout import contiguous
from sim.schedule.ir.masks import CAUSAL, FULL, Tokens
from sim.schedule.ir.ops import Attend, Exchange, HostSync, Message
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.ir.views import View
from sim.schedule.model.layer import AttentionPlan, build_around
from sim.schedule.write.accumulate import Gradients, GradientSum, SoftmaxAccumulator, attend_backward, new_sums
from sim.schedule.write.attention import Saved, all_heads
from sim.schedule.write.blocks import Block
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.options import OverlapOptions, SumOptions
from sim.words.workload import DTYPE_BYTES, Workload, accumulation_dtype, gradient_dtype


@dataclass(frozen=True, kw_only=True)
class BalancedOptions(SumOptions, OverlapOptions):
    """Options of the balanced ring."""


def build(workload: Workload, mesh: Mesh, options: BalancedOptions = BalancedOptions()) -> Schedule:
    """Return load-balanced attention; raises InputError for masks that leave nothing to balance."""
    mesh.only("balanced-ring", "ring")
    other = workload.has_window or workload.documents or workload.block_mask or workload.pattern
    if workload.mask != "causal" or other:
        raise InputError(
            "schedule 'balanced-ring' balances a causal mask without a window, no other: allowed are `mask` causal "
            "without `window`, `documents` and `block_mask`, or `schedule` ring"
        )
    layout = contiguous(workload.seq, mesh.ring)
    fetch, back = (Communicator(name=name, groups=mesh.groups("ring")) for name in ("fetch", "return"))
    plan = AttentionPlan(
        name="balanced-ring",
        communicators=(fetch, back) if mesh.ring > 1 else (),
        shard=lambda rank: all_heads(workload.model, layout[mesh.place(rank)["ring"]]),
        attention=lambda b: BalancedAttention(b, fetch, back, layout, options),
        wire_bytes=lambda work: _wire_bytes(work, options, mesh.ring),
        source="arXiv:2310.03294 §3.2",
    )
    return build_around(plan, workload, mesh, options)


class _Round(NamedTuple):
    """What a member of the ring does in one round; a peer, by its place there, of None is nobody."""

    attends_to: int | None
    """Whose keys its own queries meet."""
    helps: int | None
    """Whose queries its own keys meet."""
    serves: int | None
    """Who fetches its keys."""
    helped_by: int | None
    """Who takes its queries."""


def _rounds(rank: int, size: int) -> list[_Round]:
    """Return the rounds of a member after its own block."""
    found = []
    for t in range(1, size // 2 + 1):
        helpers = 2 * t < size
        found.append(
            _Round(
                attends_to=rank - t if rank >= t else None,
                helps=rank - t + size if rank < t and helpers else None,
                serves=rank + t if rank + t < size else None,
                helped_by=rank + t - size if rank + t >= size and helpers else None,
            )
        )
    return found


class BalancedAttention:
    """Load-balanced attention of one rank."""

    def __init__(
        self,
        builder: ProgramBuilder,
        fetch: Communicator,
        back: Communicator,
        layout: tuple[Tokens, ...],
        options: BalancedOptions,
    ) -> None:
        self._b = builder
        self._fetch, self._return = fetch, back
        self._options = options
        self._ring, self._position = fetch.group_of(builder.rank), fetch.position(builder.rank)
        self._plan = _rounds(self._position, len(layout))
        self.saved_shard = all_heads(builder.workload.model, layout[self._position])
        rows = slice(0, builder.workload.seq // len(layout))
        self._own, self._other = Block(rows, rows, CAUSAL), Block(rows, rows, FULL)

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """Own block, then rounds of fetched keys or queries; results of helpers are merged a round later."""
        b = self._b
        parts = 1 + sum((one.attends_to is not None) + (one.helped_by is not None) for one in self._plan)
        softmax = SoftmaxAccumulator(b, q, num_parts=parts)
        fetched = self._fetch_round(0, (q,), (k, v))
        softmax.attend(self._own, k, v, "own")
        arrived: tuple[View, ...] = ()
        for t, one in enumerate(self._plan):
            here, fetched = fetched, self._fetch_round(t + 1, (q,), (k, v))
            made: tuple[View, ...] = ()
            if one.attends_to is not None:
                softmax.attend(self._other, here[0], here[1], f"kv{one.attends_to}")
            elif one.helps is not None:
                made = (
                    b.like("out for another", here[0], "attention"),
                    b.lse("lse for another", here[0].shape[1], here[0].shape[2], "attention"),
                )
                b.add(
                    Attend(label=f"attend for q{one.helps}", q=here[0], k=k, v=v, out=made[0], lse=made[1], band=FULL)
                )
            if arrived:
                softmax.merge((arrived[0], arrived[1]), f"what helped q{self._position}")
            arrived = self._return_round(one.helps, made, one.helped_by, (softmax.out, softmax.lse), "out")
        if arrived:
            softmax.merge((arrived[0], arrived[1]), f"what helped q{self._position}")
        return softmax.out, Saved(q, k, v, softmax.out, softmax.lse)

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """Own block, then the same rounds; gradients of what was fetched return to its owner a round later."""
        b = self._b
        queries = (saved.q, saved.out, saved.lse, dout)
        total = Gradients(*new_sums(b, self._options, {"dq": saved.q, "dk": saved.k, "dv": saved.v}))
        fetched = self._fetch_round(0, queries, (saved.k, saved.v))
        attend_backward(b, self._own, saved, dout, total, "own")
        arrived: list[tuple[GradientSum, View]] = []
        for t, one in enumerate(self._plan):
            here, fetched = fetched, self._fetch_round(t + 1, queries, (saved.k, saved.v))
            made: tuple[View, ...] = ()
            if one.attends_to is not None:
                dk, dv = self._elsewhere({"dk": here[0], "dv": here[1]})
                operands = saved._replace(k=here[0], v=here[1])
                attend_backward(b, self._other, operands, dout, Gradients(total.dq, dk, dv), f"kv{one.attends_to}")
                made = (dk.total, dv.total)
            elif one.helps is not None:
                q, out, lse, dout_of = here
                (dq,) = self._elsewhere({"dq": q})
                operands = Saved(q, saved.k, saved.v, out, lse)
                attend_backward(b, self._other, operands, dout_of, total._replace(dq=dq), f"q{one.helps}")
                made = (dq.total,)
            for sum_of, view in arrived:
                sum_of.take(view, "from another")
            to = one.attends_to if one.attends_to is not None else one.helps
            wanted: tuple[GradientSum, ...] = (total.dk, total.dv) if one.serves is not None else (total.dq,)
            source = one.serves if one.serves is not None else one.helped_by
            views = self._return_round(to, made, source, tuple(sum_of.total for sum_of in wanted), "gradients")
            arrived = list(zip(wanted, views, strict=False))  # nobody returns anything to some ranks in the last round
        for sum_of, view in arrived:
            sum_of.take(view, "from another")
        return total.dq.finished("dq"), total.dk.finished("dk"), total.dv.finished("dv")

    def _elsewhere(self, likes: dict[str, View]) -> list[GradientSum]:
        """Return sums of gradients that belong to another rank."""
        return new_sums(self._b, self._options, likes, "for another")

    def _fetch_round(self, t: int, queries: tuple[View, ...], keys: tuple[View, ...]) -> tuple[View, ...]:
        """Append what goes around before round t, if there is one; return what this rank gets: keys, or queries."""
        if t >= len(self._plan):
            return ()
        one = self._plan[t]
        sends = [(one.serves, keys), (one.helped_by, queries)]
        recvs = [(one.attends_to, keys), (one.helps, queries)]
        return self._swap(self._fetch, sends, recvs, f"fetch {t}")

    def _return_round(
        self, to: int | None, made: tuple[View, ...], source: int | None, like: tuple[View, ...], what: str
    ) -> tuple[View, ...]:
        """Append the return of what was made for another rank; return what another one has made for this."""
        return self._swap(self._return, [(to, made)], [(source, like)], f"return {what}")

    def _swap(
        self,
        over: Communicator,
        sends: list[tuple[int | None, tuple[View, ...]]],
        recvs: list[tuple[int | None, tuple[View, ...]]],
        label: str,
    ) -> tuple[View, ...]:
        """Append an exchange with the peers that there are; return new buffers, like those given, that it receives."""
        b = self._b
        into = [
            (peer, b.like(f"{label} slot", view, "communication")) for peer, views in recvs if peer is not None
            for view in views
        ]  # fmt: skip
        out = [Message(self._ring[peer], view) for peer, views in sends if peer is not None for view in views]
        if out or into:
            taken = tuple([Message(self._ring[peer], view) for peer, view in into])
            b.add(Exchange(label=label, communicator=over.name, sends=tuple(out), recvs=taken))
            if not self._options.overlap:
                b.add(HostSync(label=f"wait for {label}", streams=(over.name,)))
        return tuple(view for _, view in into)


def _wire_bytes(workload: Workload, options: SumOptions, size: int) -> int:
    """Over all ranks: in round t P - t ranks fetch KV and return dKV, t send q and get (out, lse) back; backward q,
    out, lse and dout, and get dq back.
    """
    model, total = workload.model, 0
    rows = workload.batch * (workload.seq // size)
    element, wide = DTYPE_BYTES[workload.dtype], DTYPE_BYTES[accumulation_dtype(workload.dtype)]
    summed = DTYPE_BYTES[gradient_dtype(workload, options)]
    kv, q, lse = (
        2 * rows * model.num_kv_heads * model.head_dim,
        rows * model.num_heads * model.head_dim,
        rows * model.num_heads,
    )
    for t in range(1, size // 2 + 1):
        helped = t if 2 * t < size else 0
        if workload.forward:
            total += (size - t) * kv * element + helped * (2 * q * element + lse * wide)
        if workload.backward:
            total += (size - t) * kv * (element + summed)
            total += helped * (3 * q * element + lse * wide + q * summed)
    return total
