"""Plays a plan: each rank attends the tasks that a planner gave it, whose inputs come from wherever they live.

While a rank computes one division, the rows arrive that the next one needs first: keys and values, and queries where a
task is not on their rank, each once, by point-to-point messages of irregular sizes (as DCP does it, arXiv:2510.10620).
Partial outputs of others' queries go home after the last division that adds to them, and their owner merges them by
their log-sum-exp. Backward the same rows come again, queries with dout, log-sum-exp and delta, and the sums of dq, dk
and dv go home in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sim.base.errors import InputError
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import mask_of
from sim.schedule.ir.ops import Delta, Exchange, HostSync, Message
from sim.schedule.ir.plan import Plans, plan_of, require_ranks
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.ir.views import Split, View
from sim.schedule.model.layer import AttentionPlan, build_around
from sim.schedule.write.accumulate import Gradients, GradientSum, SoftmaxAccumulator, attend_backward, new_sums
from sim.schedule.write.attention import Saved, Shard, all_heads
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.movement import Attended, Division, Held, Movement, Rows, movement, num_rows, starts
from sim.words.mesh import Mesh
from sim.words.options import OverlapOptions, SumOptions
from sim.words.workload import DTYPE_BYTES, Dtype, Workload, accumulation_dtype, gradient_dtype


@dataclass(frozen=True, kw_only=True)
class PlannedOptions(SumOptions, OverlapOptions):
    """Options of schedules that play a plan."""


def planned(plans: Plans, name: str = "planned") -> Callable[..., Schedule]:
    """Return the builder of a schedule that plays a plan, for ``longstep.Setup(schedule=...)``. Its ring has as many
    ranks as the plan, and its sequence as many tokens.
    """
    builder = partial(build, plans, name)
    builder.__qualname__ = name  # type: ignore[attr-defined]  # what setups call it
    return builder


def build(
    plans: Plans, name: str, workload: Workload, mesh: Mesh, options: PlannedOptions = PlannedOptions()
) -> Schedule:
    """Return attention as planned, along the axis ring; raises InputError for a plan of other ranks or tokens, and for
    layers around ranks without any.
    """
    mesh.only(name, "ring")
    if any(one.window not in {workload.window, None} for one, _ in workload.kinds()):
        raise InputError(
            f"{workload.model.name} has windows layer by layer, and a plan is of one mask: set `schedule` ring"
        )
    fetch, back = (Communicator(name=one, groups=mesh.groups("ring")) for one in ("fetch", "return"))

    def around(work: Workload) -> AttentionPlan:
        plan = plan_of(plans, work)
        require_ranks(plan, mesh)
        for rank, tokens in enumerate(plan.layout) if work.scope != "attention" else ():
            if not num_tokens(tokens):
                raise InputError(
                    f"rank {rank} of the plan has no tokens, and layers need some on each: set `scope` attention, or "
                    f"make a plan for fewer ranks"
                )
        flow = movement(plan, mask_of(work), work.seq)

        def shard(rank: int) -> Shard:
            return all_heads(work.model, plan.layout[mesh.place(rank)["ring"]])

        return AttentionPlan(
            name=name,
            communicators=(fetch, back) if mesh.ring > 1 else (),
            shard=shard,
            attention=lambda b: PlannedAttention(b, fetch, back, flow, shard(b.rank), options),
            wire_bytes=lambda work: _wire_bytes(work, options, flow),
            source="the plan: each row of another rank once, and what becomes of it (arXiv:2510.10620)",
        )

    return build_around(around, workload, mesh, options)


Bundle = tuple[View, ...]
"""Tensors of the same rows, or of the same buffer of them."""

Pair = tuple[Bundle, Bundle]
"""Of queries, and of keys."""

Made = tuple[dict[Held, Bundle], dict[Held, Bundle]]
"""By buffer, of queries, and of keys."""

Homecoming = tuple[list[tuple[Rows, Bundle]], list[tuple[Rows, Bundle]]]
"""What arrives of own queries, and of own keys: of which rows, and where it lies."""


class PlannedAttention:
    """What one rank does of a plan."""

    def __init__(
        self,
        builder: ProgramBuilder,
        fetch: Communicator,
        back: Communicator,
        flow: Movement,
        shard: Shard,
        options: PlannedOptions,
    ) -> None:
        self._b = builder
        self._fetch, self._return = fetch, back
        self._ring, self._position = fetch.group_of(builder.rank), fetch.position(builder.rank)
        self._flow = flow
        self._divisions = flow[self._position]
        self._own: Held = (Rows(self._position, 0, num_tokens(shard.tokens)),)
        self._arrived: list[tuple[View, View]] = []
        self._options = options
        self.saved_shard = shard

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """Division by division; what others have computed of own queries is merged a division later."""
        b, own, sums = self._b, self._own, dict[Held, SoftmaxAccumulator]()
        parts = Counter(one.queries for division in self._divisions for one in division.attended)
        parts[own] += sum(
            rows.owner == self._position for _, one in self._others() for held in one.last_queries for rows in held
        )
        if num_rows(own):
            sums[own] = SoftmaxAccumulator(b, q, parts[own])
        arrived: list[tuple[Rows, Bundle]] = []
        for at, queries, keys in self._tour((q,), (k, v)):
            for held in self._divisions[at].queries:
                sums[held] = SoftmaxAccumulator(b, queries[held][0], parts[held], "attention")
            for one in self._divisions[at].attended:
                keys_at, values_at = keys[one.keys]
                sums[one.queries].attend(one.block, keys_at, values_at, _named(one))
            self._merge(sums, arrived)
            made: Made = ({held: (sums[held].out, sums[held].lse) for held in self._divisions[at].last_queries}, {})
            like = (sums[own].out, sums[own].lse) if num_rows(own) else ()
            arrived, _ = self._bring_home(at, made, (like, ()), "out", b.workload.dtype)
        self._merge(sums, arrived)
        if not num_rows(own):
            batch, none, heads, _ = q.slices
            return q, Saved(q, k, v, out=q, lse=View(q.buffer, (batch, heads, none)))
        return sums[own].out, Saved(q, k, v, sums[own].out, sums[own].lse)

    def _merge(self, sums: dict[Held, SoftmaxAccumulator], arrived: list[tuple[Rows, Bundle]]) -> None:
        for rows, (out, lse) in arrived:
            sums[self._own].merge((out, lse), "from another", slice(rows.begin, rows.end))

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """Division by division again; gradients of what was fetched go home after the last one that adds to them."""
        b, own, delta = self._b, self._own, saved.lse
        dq, dk, dv = dict[Held, GradientSum](), dict[Held, GradientSum](), dict[Held, GradientSum]()
        if num_rows(own):
            delta = b.lse("delta", num_rows(own), saved.q.shape[2], "attention")
            b.add(Delta(label="delta", out=saved.out, dout=dout, delta=delta))
            likes = {"dq": saved.q, "dk": saved.k, "dv": saved.v}
            dq[own], dk[own], dv[own] = new_sums(b, self._options, likes)
        arrived: Homecoming = ([], [])
        for at, queries, keys in self._tour((saved.q, dout, saved.lse, delta), (saved.k, saved.v)):
            division = self._divisions[at]
            for held in division.queries:
                (dq[held],) = self._of_others({"dq": queries[held][0]})
            for held in division.keys:
                dk[held], dv[held] = self._of_others(dict(zip(("dk", "dv"), keys[held], strict=True)))
            for one in division.attended:
                q, dout_of, lse, delta_of = queries[one.queries]
                operands = Saved(q, keys[one.keys][0], keys[one.keys][1], out=q, lse=lse)  # delta serves for out
                sums = Gradients(dq[one.queries], dk[one.keys], dv[one.keys])
                attend_backward(b, one.block, operands, dout_of, sums, _named(one), delta_of)
            self._add(arrived, dq, dk, dv)
            made: Made = (
                {held: (dq[held].total,) for held in division.last_queries},
                {held: (dk[held].total, dv[held].total) for held in division.last_keys},
            )
            like, dtype = ((saved.q,), (saved.k, saved.v)), gradient_dtype(b.workload, self._options)
            arrived = self._bring_home(at, made, like, "gradients", dtype)
        self._add(arrived, dq, dk, dv)
        if not num_rows(own):
            return saved.q, saved.k, saved.v
        for total in (dq[own], dk[own], dv[own]):
            total.fill()
        return dq[own].finished("dq"), dk[own].finished("dk"), dv[own].finished("dv")

    def _add(self, arrived: Homecoming, *sums: dict[Held, GradientSum]) -> None:
        """Add what others have summed of dq, and of dk and dv."""
        for some, found in zip((sums[:1], sums[1:]), arrived, strict=True):
            for rows, bundle in found:
                for total, view in zip(some, bundle, strict=True):
                    total[self._own].take(view, "from another", slice(rows.begin, rows.end))

    def _of_others(self, likes: Mapping[str, View]) -> list[GradientSum]:
        return new_sums(self._b, self._options, likes, "for another")

    def _others(self, at: int | None = None) -> Iterator[tuple[int, Division]]:
        """Yield what each other rank does in one division, or in all of them, by the rank's place in the ring."""
        for peer, divisions in enumerate(self._flow):
            for division in divisions if at is None else divisions[at : at + 1]:
                if peer != self._position:
                    yield peer, division

    def _tour(self, queries: Bundle, keys: Bundle) -> Iterator[tuple[int, dict[Held, Bundle], dict[Held, Bundle]]]:
        """Yield each division with the queries and keys that are held by then, having asked for what the next needs."""
        own, held, packed = (queries, keys), ({self._own: queries}, {self._own: keys}), dict[View, View]()
        for at in range(len(self._divisions) + 1):
            arrived, self._arrived = self._arrived, []
            if at < len(self._divisions):
                self._fetch_for(at, own, held, packed)
            for view, into in arrived:
                self._b.copy(view, into, "unpack")
            if at:
                yield at - 1, *held

    def _fetch_for(self, at: int, own: Pair, held: Made, packed: dict[View, View]) -> None:
        """Append what goes around before a division; what arrives is held from now on."""
        mine, sends, recvs = self._divisions[at], [], []
        for peer, division in self._others(at):
            for wanted, bundle in zip((division.queries, division.keys), own, strict=True):
                for rows in (rows for coming in wanted for rows in coming if rows.owner == self._position):
                    parts = [_part(view, rows.begin, rows.end) for view in bundle]
                    sends += [(peer, self._in_one_piece(part, packed)) for part in parts]
        for wanted, bundle, into in zip((mine.queries, mine.keys), own, held, strict=True):
            for coming in wanted:
                into[coming] = tuple([self._room(view, num_rows(coming), "fetched") for view in bundle])
                for rows, begin in zip(coming, starts(coming), strict=False):
                    recvs += [(rows.owner, self._place(view, begin, begin + rows.size)) for view in into[coming]]
        self._swap(self._fetch, sends, recvs, f"fetch {at}")

    def _bring_home(self, at: int, made: Made, like: Pair, what: str, dtype: Dtype) -> Homecoming:
        """Append the return of what was made of others' queries and keys; return what arrives of own ones."""
        sends = [
            (rows.owner, self._in_one_piece(_part(view, begin, begin + rows.size), {}))
            for of_side in made
            for going, bundle in of_side.items()
            for rows, begin in zip(going, starts(going), strict=False)
            for view in bundle
        ]
        recvs: list[tuple[int, View]] = []
        arrived: Homecoming = ([], [])
        for peer, division in self._others(at):
            for ended, bundle, found in zip((division.last_queries, division.last_keys), like, arrived, strict=True):
                for rows in (rows for going in ended for rows in going) if bundle else ():
                    if rows.owner == self._position:
                        into = tuple([self._room(view, rows.size, f"{what} from another", dtype) for view in bundle])
                        found.append((rows, into))
                        recvs += [(peer, view) for view in into]
        self._swap(self._return, sends, recvs, f"return {what} {at}")
        return arrived

    def _room(self, like: View, size: int, name: str, dtype: Dtype | None = None) -> View:
        """Return a new buffer for so many rows of a tensor, or of a log-sum-exp or delta."""
        if len(like.shape) == 3:
            return self._b.lse(name, size, like.shape[1], "communication")
        return self._b.tensor(name, size, like.shape[2], "communication", dtype)

    def _place(self, view: View, begin: int, end: int) -> View:
        """Return where some rows of a buffer can arrive: there, or in one of their own to be copied from, where they
        have gaps.
        """
        part = _part(view, begin, end)
        if self._b.parts_are_contiguous(Split(part, 0, 1)):
            return part
        alone = self._room(view, end - begin, "arrived", self._b.dtype(view))
        self._arrived.append((alone, part))
        return alone

    def _in_one_piece(self, view: View, packed: dict[View, View]) -> View:
        """Return what can be sent: the view itself, or a copy where it has gaps, one for all who get it."""
        if self._b.parts_are_contiguous(Split(view, 0, 1)):
            return view
        if view not in packed:
            packed[view] = self._b.like("to send", view, "communication")
            self._b.copy(view, packed[view], "pack")
        return packed[view]

    def _swap(
        self, over: Communicator, sends: Sequence[tuple[int, View]], recvs: Sequence[tuple[int, View]], label: str
    ) -> None:
        """Append an exchange, if there is anything to send or to receive."""
        if not (sends or recvs):
            return
        out, into = (tuple([Message(self._ring[peer], view) for peer, view in some]) for some in (sends, recvs))
        self._b.add(Exchange(label=label, communicator=over.name, sends=out, recvs=into))
        if not self._options.overlap:
            self._b.add(HostSync(label=f"wait for {label}", streams=(over.name,)))


def _named(one: Attended) -> str:
    return f"q{_owners(one.queries)} kv{_owners(one.keys)}"


def _owners(held: Held) -> str:
    owners = sorted({rows.owner for rows in held})
    return "+".join(map(str, owners)) if len(owners) <= _SPELLED else f"{owners[0]}+…+{owners[-1]}"


_SPELLED = 3
"""Ranks that a label names one by one."""


def _part(view: View, begin: int, end: int) -> View:
    """Return rows of a tensor, bshd, or of a log-sum-exp or delta, bhs."""
    part = slice(begin, end)
    return view[:, :, part] if len(view.shape) == 3 else view[:, part]


def _wire_bytes(workload: Workload, options: SumOptions, flow: Movement) -> int:
    """Over all ranks: forward K and V of fetched keys, q of fetched queries and their (out, lse) back; backward K, V,
    dK and dV, and of queries q, dout, lse and delta, and dq back.
    """
    divisions = [division for of_rank in flow for division in of_rank]
    keys = workload.batch * sum(num_rows(held) for division in divisions for held in division.keys)
    queries = workload.batch * sum(num_rows(held) for division in divisions for held in division.queries)
    model, element = workload.model, DTYPE_BYTES[workload.dtype]
    wide, summed = DTYPE_BYTES[accumulation_dtype(workload.dtype)], DTYPE_BYTES[gradient_dtype(workload, options)]
    kv, q = 2 * keys * model.num_kv_heads * model.head_dim, queries * model.num_heads * model.head_dim
    lse = queries * model.num_heads
    forward = kv * element + 2 * q * element + lse * wide
    backward = kv * (element + summed) + q * (2 * element + summed) + 2 * lse * wide
    return forward * workload.forward + backward * workload.backward
