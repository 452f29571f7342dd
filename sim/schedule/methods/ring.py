"""Ring attention: queries stay, keys and values travel around the ring (arXiv:2310.01889 §3).

Step t of rank r attends to the keys of rank (r - t) mod P while it sends the keys at hand to r + 1 and receives the
next ones from r - 1. Backward something travels again, and the sums of its gradients one hop behind it: each rank adds
its part and passes them on (``RingOptions.ring_backward`` says what, and from where). Which tokens lie on which
rank is the layout's: contiguous slices, the zigzag's pairs of chunks, or stripes (arXiv:2311.09431). A rank skips what
the mask empties, but takes every hop; so with contiguous slices under a causal mask the last rank sets the time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.base.errors import InputError
from sim.schedule.ir.exchanges import Ints
from sim.schedule.ir.layout import laid_out, num_tokens
from sim.schedule.ir.masks import Tokens, mask_of
from sim.schedule.ir.ops import Delta, Hold
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.ir.stretches import Bound
from sim.schedule.ir.views import View
from sim.schedule.methods.torch_ring import TorchRing
from sim.schedule.model.layer import AttentionPlan, build_around
from sim.schedule.write.accumulate import Gradients, GradientSum, SoftmaxAccumulator, attend_backward, new_sums
from sim.schedule.write.attention import Saved, Shard, all_heads, needs_forward
from sim.schedule.write.blocks import Block, Met, keys_of, met
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.halves import Halves, HostMasks
from sim.schedule.write.hops import Lane, MessageForm, hop, lane, to_send
from sim.words.mesh import Mesh
from sim.words.options import LayoutName, OverlapOptions, Sharding, SumOptions
from sim.words.workload import DTYPE_BYTES, Workload, accumulation_dtype, gradient_dtype


@dataclass(frozen=True, kw_only=True)
class HopOptions(SumOptions, OverlapOptions):
    """Options of rings, and of rings of rings."""

    layout: LayoutName = "contiguous"
    """Which tokens lie on which member of a ring: see ``layout``."""
    sharding: Sharding = "sequence"
    """Whether these are chunks of the sequence, whatever its documents; or of each document, so that every rank has
    some of all of them and every step one variable-length kernel, as in ring-flash-attention and Transformer Engine.
    Their lengths have to divide then."""
    halves: Halves = "slices"
    """How zigzag code takes halves of several documents, which lie apart: by views that a kernel takes, or by a mask in
    host memory: see ``write.halves``."""
    communicators: Literal["one", "two"] = "one"
    """Whether gradients queue behind what hops on, as in ring-flash-attention and yunchang (both take one process
    group), or have a communicator of their own."""
    messages: MessageForm = "grouped"
    """How the sends and receives of a hop are issued: see ``write.hops``."""


@dataclass(frozen=True, kw_only=True)
class RingOptions(HopOptions):
    """Options of rings."""

    ring_backward: Literal["own-kv", "kv-at-hand", "queries"] = "own-kv"
    """What travels in a ring's backward pass: keys from their owner on, dKV in P hops (ring-flash-attention); keys from
    where the forward pass left them, dKV in P - 1 hops (Transformer Engine); or queries (arXiv:2509.19836 §3.1)."""
    sums: Literal["needed", "published"] = "needed"
    """How partial results are summed: in fp32 where there are several, in buffers that are freed behind their last use;
    or as ring-flash-attention and yunchang do it (yunchang 0.6.4 ring/zigzag_ring_flash_attn.py): in fp32 even where
    there is one, a ring of one sends dK and dV to itself, and what the backward function makes and is given is held
    until it returns."""
    rotation: Literal["hops", "torch"] = "hops"
    """How keys and values come around: from neighbour to neighbour, or as torch's context_parallel has them, with all
    that it copies: see ``torch_ring``."""


_OF_HOPS = {"ring_backward": "own-kv", "sums": "needed", "messages": "grouped", "halves": "slices"}
"""Options of what hops from neighbour to neighbour, where torch's context_parallel has no other way."""


def build(workload: Workload, mesh: Mesh, options: RingOptions = RingOptions()) -> Schedule:
    """Return ring attention along the axis ring."""
    mesh.only("ring", "ring")
    rings = ring_communicators(mesh.groups("ring"), options)
    check_backward(workload, options)

    def plan(work: Workload) -> AttentionPlan:
        layout = laid_out(options.layout, work, mesh.ring, options.sharding)

        def shard(rank: int) -> Shard:
            return all_heads(work.model, layout[mesh.place(rank)["ring"]])

        return AttentionPlan(
            name="ring",
            communicators=rings.declared,
            shard=shard,
            attention=lambda b: ring_attention(b, rings, layout, shard(b.rank), options),
            wire_bytes=lambda work: ring_bytes(work, options, mesh.ring),
            source=(
                "arXiv:2310.01889 §3; hops and data types as in ring-flash-attention, TransformerEngine or BurstEngine"
            ),
            keeps_inputs=keeps_inputs(options),
        )

    return build_around(plan, workload, mesh, options)


def keeps_inputs(options: RingOptions) -> bool:
    """Return whether a ring keeps keys and values in a form of its own."""
    return options.ring_backward == "kv-at-hand" or options.rotation == "torch"


def ring_attention(
    builder: ProgramBuilder, rings: Rings, layout: Sequence[Tokens], shard: Shard, options: RingOptions
) -> RingAttention | TorchRing:
    """Return ring attention of one rank, as its options have it."""
    if options.rotation == "hops":
        return RingAttention(builder, rings, layout, shard, options)
    return TorchRing(builder, rings, layout, shard, options, sharding=options.sharding, overlap=options.overlap)


class Rings(NamedTuple):
    """The lanes of a ring: of what hops on, and of the gradients that hop behind it."""

    on: Lane
    behind: Lane

    @property
    def declared(self) -> tuple[Communicator, ...]:
        """Each communicator once."""
        return tuple(dict.fromkeys((*self.on.declared, *self.behind.declared)))


def ring_communicators(groups: tuple[tuple[int, ...], ...], options: HopOptions, name: str = "ring") -> Rings:
    """Return the lanes of rings over these groups of ranks."""
    names = (f"{name} kv", f"{name} dkv") if options.communicators == "two" else (name, name)
    on, behind = (lane(Communicator(name=one, groups=groups), options.messages) for one in names)
    return Rings(on, behind)


def check_backward(workload: Workload, options: RingOptions) -> None:
    """Raise InputError where the backward pass alone lacks what the forward pass leaves, or sums as another library."""
    if options.ring_backward == "kv-at-hand":
        needs_forward(workload, "ring_backward kv-at-hand")
    if options.sums == "published" and options.ring_backward != "own-kv":
        raise InputError(
            f"`set` schedule.sums=published is how ring-flash-attention sums, which does not have schedule."
            f"ring_backward={options.ring_backward}: leave out one of them"
        )
    if options.rotation == "torch":
        needs_forward(workload, "rotation torch")
        for name, own in _OF_HOPS.items():
            if (value := getattr(options, name)) != own:
                raise InputError(
                    f"`set` schedule.rotation=torch is torch's context_parallel, which does not have schedule."
                    f"{name}={value}: leave out one of them"
                )


class _Step(NamedTuple):
    """A step of a ring."""

    number: int
    label: str
    """What is at hand, and whose."""
    source: int
    """The place of its owner."""
    way: int
    """How many members on it goes: one, or one back."""
    here: tuple[View, ...]
    there: tuple[View, ...]
    """Where it hops to; nothing in the last step."""


class _Tour(NamedTuple):
    """The steps of a ring."""

    what: str
    """What travels."""
    way: int
    begin: tuple[View, ...]
    """What is at hand first."""
    slots: list[tuple[View, ...]]
    """Where what arrives lies, by turns."""
    numbers: Ints
    """Of the steps."""
    sources: Ints
    """Of each step whose tensors are at hand."""

    @property
    def labels(self) -> list[str]:
        """Of each step."""
        return [f"{self.what}{source}" for source in self.sources.tolist()]

    def step(self, number: int) -> _Step:
        """Return a step."""
        source, is_last = int(self.sources[number]), number == len(self.numbers) - 1
        here = self.slots[(number - 1) % 2] if number else self.begin
        return _Step(number, f"{self.what}{source}", source, self.way, here, () if is_last else self.slots[number % 2])

    def kinds(self, met: Met) -> Ints:
        """Return of each step the number of the blocks that are attended to in it."""
        return np.array(met.which)[self.sources]

    def codes(self, met: Met, flags: NDArray[np.bool_]) -> list[int]:
        """Return of each step what tells it apart: its blocks, where it comes from and goes to, and a flag."""
        numbers, last = self.numbers, len(self.numbers) - 1
        ends = (numbers == 0) * 4 + (numbers == last) * 2 + numbers % 2
        return ((self.kinds(met) * 8 + ends) * 2 + flags).tolist()  # type: ignore[no-any-return]


class RingAttention:
    """Ring attention of one rank; ``layout[i]`` are the tokens of the i-th member of its ring, ``shard`` its own."""

    def __init__(
        self, builder: ProgramBuilder, rings: Rings, layout: Sequence[Tokens], shard: Shard, options: RingOptions
    ) -> None:
        self._b = builder
        self._rings = rings
        self._size = len(layout)
        self._position = rings.on.position(builder.rank)
        self._ends = {way: [over.ends(builder.rank, way) for over in rings] for way in (1, -1)}
        self._layout = layout
        self._options = options
        self._mask = mask_of(builder.workload)
        self._masks = HostMasks(builder, options.halves)
        self._rows = num_tokens(layout[self._position])
        self.saved_shard = shard

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """P - 1 hops of KV; every block is attended while the next KV is on its way."""
        met = self._met
        parts = np.array([len(blocks) for blocks in met.found])
        always, num_parts = self._options.sums == "published", int(parts[list(met.which)].sum())
        softmax = SoftmaxAccumulator(self._b, q, num_parts=num_parts, always=always)
        self._masks.begin(backward=False)
        tour = self._tour((k, v), "kv")
        counts = parts[tour.kinds(met)]
        left = num_parts - np.cumsum(counts) + counts

        def write(step: _Step) -> Bound | None:
            blocks = met.found[met.which[step.source]]
            softmax.left = int(left[step.number])
            key = "forward", keys_of(blocks), softmax.state(len(blocks))
            bound, is_new = self._bound(step, key, softmax.views, partial(self._attend, softmax, blocks, step))
            if not is_new:
                softmax.skip(blocks)
            return bound

        self._walk(tour, tour.codes(met, left == counts), lambda: softmax.filled, write)
        at_hand = tour.step(self._size - 1).here if self._options.ring_backward == "kv-at-hand" else ()
        return softmax.out, Saved(q, k, v, softmax.out, softmax.lse, at_hand)

    def _attend(self, softmax: SoftmaxAccumulator, blocks: Sequence[Block], step: _Step) -> None:
        for block in blocks:
            with self._masks.around(block, self._rows, backward=False):
                softmax.attend(block, step.here[0], step.here[1], step.label)

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """P - 1 hops of what travels, and P hops of its gradients (one less from the KV at hand)."""
        if self._options.ring_backward == "queries":
            return self._backward_of_queries(saved, dout)
        at_hand = self._options.ring_backward == "kv-at-hand"
        if at_hand:
            saved = saved._replace(k=saved.more[0], v=saved.more[1])
        b, kv, names, way = self._b, (saved.k, saved.v), ("dk", "dv"), -1 if at_hand else 1
        published, ours = self._options.sums == "published", (saved.q, saved.k, saved.v)
        made: list[View] = []
        if published:
            made = [b.like(f"d{name} of a block", view, "attention") for name, view in zip("qkv", ours, strict=True)]
        parts = made or (None, None, None)
        dq = GradientSum(b, "dq", b.gradient("dq sum", saved.q, self._options), part=parts[0])
        likes = dict(zip(names, kv, strict=True))
        pool = sum_slots(b, self._rings.behind, self._options, likes, self._size + published)
        hops = self._size - at_hand if self._size > 1 else 0
        self._masks.begin(backward=True)

        def attend(step: _Step, blocks: Sequence[Block]) -> None:
            operands = saved._replace(k=step.here[0], v=step.here[1])
            dk, dv = self._sums(names, pool[step.number % 2], parts[1:], empty=step.number == 0)
            for block in blocks:
                with self._masks.around(block, self._rows, backward=True):
                    attend_backward(b, block, operands, dout, Gradients(dq, dk, dv), step.label)
            self._send_sums(step, hops, (dk, dv), pool)

        views = (*saved[:5], dout, *dq.views, *chain.from_iterable(pool), *made)
        tour, met = self._tour(kv, "kv", way, first=int(at_hand)), self._met

        def write(step: _Step) -> Bound | None:
            blocks = met.found[met.which[step.source]]
            key = "backward", step.number == 0, step.number < hops, step.number % 2, keys_of(blocks), dq.state
            bound, is_new = self._bound(step, key, views, partial(attend, step, blocks))
            if not is_new:
                dq.skip([block.rows for block in blocks])
            return bound

        self._walk(tour, tour.codes(met, tour.numbers < hops), lambda: dq.state, write)
        for here, there in zip(*pool, strict=True) if published and self._size == 1 else ():
            b.copy(here, there, "send to itself")
        dk, dv = self._sums(names, pool[max(hops, published) % 2], empty=False)
        grads = dq.finished("dq"), dk.finished("dk"), dv.finished("dv")
        if published:
            held = (*ours, saved.out, saved.lse, dout, *made, dq.total, *pool[0], *pool[1])
            b.add(Hold(label="return", held=tuple(dict.fromkeys(map(b.whole, held)))))
        return grads

    def _backward_of_queries(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """P - 1 hops of q, dout, lse and delta, and P hops of dq; dk and dv stay."""
        b = self._b
        delta = b.lse("delta", saved.q.shape[1], saved.q.shape[2], "attention")
        b.add(Delta(label="delta", out=saved.out, dout=dout, delta=delta))
        dk, dv = new_sums(b, self._options, {"dk": saved.k, "dv": saved.v})
        pool = sum_slots(b, self._rings.behind, self._options, {"dq": saved.q}, self._size)
        hops = self._size if self._size > 1 else 0

        def attend(step: _Step, blocks: Sequence[Block]) -> None:
            q, dout_of, lse, delta_of = step.here
            (dq,) = self._sums(("dq",), pool[step.number % 2], empty=step.number == 0)
            for block in blocks:
                operands = saved._replace(q=q, lse=lse)
                attend_backward(b, block, operands, dout_of, Gradients(dq, dk, dv), step.label, delta_of)
            self._send_sums(step, hops, (dq,), pool)

        views = (*saved[:5], *dk.views, *dv.views, *chain.from_iterable(pool))
        tour, met = self._tour((saved.q, dout, saved.lse, delta), "q"), self._met_as_keys

        def write(step: _Step) -> Bound | None:
            blocks = met.found[met.which[step.source]]
            key = "queries", step.number == 0, step.number < hops, step.number % 2, keys_of(blocks), dk.state
            bound, is_new = self._bound(step, key, views, partial(attend, step, blocks))
            if not is_new:
                for total in (dk, dv):
                    total.skip([block.columns for block in blocks])
            return bound

        self._walk(tour, tour.codes(met, tour.numbers < hops), lambda: dk.state, write)
        (dq,) = self._sums(("dq",), pool[hops % 2], empty=False)
        return dq.finished("dq"), dk.finished("dk"), dv.finished("dv")

    def _tour(self, bundle: tuple[View, ...], what: str, way: int = 1, first: int = 0) -> _Tour:
        """Return the steps of a bundle of views, if it travels ``way`` around and the ``first`` next one's are there
        already.
        """
        over = self._rings.on
        pool = travel_slots(self._b, over, bundle, what, self._size)
        begin = to_send(self._b, over, bundle, what) if pool else bundle
        numbers = np.arange(self._size)
        return _Tour(what, way, begin, pool, numbers, (self._position + first - way * numbers) % self._size)

    def _walk(
        self, tour: _Tour, codes: Sequence[int], state: Callable[[], Hashable], write: Callable[[_Step], Bound | None]
    ) -> None:
        """Write all steps. Those of one code differ in labels only, while there is one state: what is filled of sums,
        which grows. So the first of them is written for all.
        """
        known: dict[int, Bound] = {}
        bounds = []
        for number, code in enumerate(codes):
            bound = known.get(code)
            if bound is None:
                before = state()
                bound = write(tour.step(number))
                if bound is None:
                    continue  # nothing is written again
                if state() == before:
                    known[code] = bound
                else:
                    known.clear()
            bounds.append(bound)
        if bounds:
            self._b.again_each(bounds, tour.labels)

    def _bound(
        self, step: _Step, key: Hashable, views: Sequence[View], write: Callable[[], None]
    ) -> tuple[Bound | None, bool]:
        """Return what sends on what is at hand, if it goes on, and writes the rest of a step; see
        ``ProgramBuilder.bound``.
        """
        on, behind = self._ends[step.way]

        def with_hop() -> None:
            if step.there:
                self._hop(self._rings.on, step.here, step.there, step.way, f"send {step.label}")
            write()

        named = key, bool(step.there), on.out, on.into, behind.out, behind.into
        views = (*step.here, *step.there, *views)
        return self._b.bound(named, views, step.label, with_hop, (on.target, on.source))

    def _sums(
        self,
        names: tuple[str, ...],
        totals: Sequence[View],
        parts: Sequence[View | None] = (None, None),
        *,
        empty: bool = True,
    ) -> list[GradientSum]:
        named = zip(names, totals, parts, strict=False)
        return [GradientSum(self._b, name, view, empty=empty, part=part) for name, view, part in named]

    def _send_sums(self, step: _Step, hops: int, sums: Sequence[GradientSum], pool: list[tuple[View, ...]]) -> None:
        """Send the sums at hand on, if they have not come home; the first rank sends zeros for what it has not."""
        for total in sums if step.number == 0 else ():
            total.fill()
        if step.number < hops:
            here, there = pool[step.number % 2], pool[(step.number + 1) % 2]
            self._hop(self._rings.behind, here, there, step.way, f"send d{step.label}")

    @cached_property
    def _met(self) -> Met:
        """What is attended to of the keys of each member."""
        return self._met_by(are_keys=False)

    @cached_property
    def _met_as_keys(self) -> Met:
        """What the queries of each member attend to of the keys of this one."""
        return self._met_by(are_keys=True)

    def _met_by(self, *, are_keys: bool) -> Met:
        own = self._layout[self._position]
        return met(self._mask, own, tuple(self._layout), self._options.sharding, are_keys=are_keys)

    def _hop(self, over: Lane, here: Sequence[View], there: Sequence[View], way: int, label: str) -> None:
        hop(self._b, over, here, there, way, label, overlap=self._options.overlap)


def travel_slots(
    builder: ProgramBuilder, over: Lane, bundle: Sequence[View], what: str, size: int
) -> list[tuple[View, ...]]:
    """Return buffers for what arrives from others in a ring of that size: two, which take turns, or fewer."""
    return [
        builder.like_all([f"{what} slot {i}"] * len(bundle), bundle, "communication", packed=over.packed)
        for i in range(min(size - 1, 2))
    ]


def sum_slots(
    builder: ProgramBuilder, over: Lane, options: SumOptions, likes: Mapping[str, View], size: int
) -> list[tuple[View, ...]]:
    """Return buffers for sums of gradients that travel: what is here, and what is on its way."""
    return [travelling(builder, over, options, likes, f"slot {i}") for i in range(min(size, 2))]


def travelling(
    builder: ProgramBuilder, over: Lane, options: SumOptions, likes: Mapping[str, View], where: str
) -> tuple[View, ...]:
    """Return new buffers for sums of gradients that hop along a lane, by name the tensors whose they are."""
    names, dtype = [f"{name} {where}" for name in likes], gradient_dtype(builder.workload, options)
    return builder.like_all(names, list(likes.values()), "attention", dtype, packed=over.packed)


def ring_bytes(workload: Workload, options: RingOptions, size: int, rings: int = 1) -> int:
    """Return what all members of rings over the whole sequence send, each of which has its share of the heads: forward
    P(P-1) hops of KV; backward as many of what travels, and P*P hops of its gradients, P(P-1) from the KV at hand.
    """
    if size == 1:
        return 0
    model, rows = workload.model, workload.batch * (workload.seq // size)
    wide = DTYPE_BYTES[accumulation_dtype(workload.dtype)]
    element = DTYPE_BYTES[workload.dtype]
    heads, kv_heads = model.num_heads // rings, max(1, model.num_kv_heads // rings)
    q, kv = rows * heads * model.head_dim, 2 * rows * kv_heads * model.head_dim
    if options.rotation == "torch":
        kv = 2 * q
    summed = DTYPE_BYTES[gradient_dtype(workload, options)]
    total = 0
    if workload.forward:
        total += (size - 1) * kv * element
    if workload.backward and options.ring_backward == "queries":
        total += (size - 1) * (2 * q * element + 2 * rows * heads * wide) + size * q * summed
    elif workload.backward:
        hops = size - 1 if options.ring_backward == "kv-at-hand" else size
        total += (size - 1) * kv * element + hops * kv * summed
    return rings * size * total
