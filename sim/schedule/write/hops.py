"""Hops around a ring, and the forms in which real code sends them.

    grouped          one call for all sends and receives of a hop: batch_isend_irecv, as ring-flash-attention has it
    packed           the same, with tensors that are alike in one buffer: k and v are one message
    separate         every send and receive by itself: isend and irecv, each a kernel of its own
    packed-separate  both: k and v are one message, sent by itself, as TransformerEngine has it

A message that is sent by itself goes over a communicator of its two ranks, as torch makes one for each pair. So sends
and receives are on streams of their own, and messages of one direction queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from sim.schedule.ir.ops import Exchange, HostSync, Message
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.views import View
from sim.schedule.write.builder import ProgramBuilder

MessageForm = Literal["grouped", "packed", "separate", "packed-separate"]


class Ends(NamedTuple):
    """Between whom a rank stands in a ring, in the way of a hop, and the communicators to them."""

    target: int
    source: int
    out: str
    into: str


@dataclass(frozen=True, eq=False)
class Lane:
    """What tensors hop along, around rings."""

    ring: Communicator
    """Its groups are the rings."""
    edges: tuple[Communicator, ...] = ()
    """Where messages are sent by themselves: pairs of neighbours, in each of these no rank twice."""
    packed: bool = False
    """Whether tensors that are alike hop in one buffer."""

    @property
    def declared(self) -> tuple[Communicator, ...]:
        """The communicators that its hops use."""
        return self.edges or (self.ring,)

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ring of a rank."""
        return self.ring.group_of(rank)

    @cached_property
    def ends(self) -> Callable[[int, int], Ends]:
        """Between whom a rank stands, by its number and by how many members on a hop goes: one, or one back."""
        return cache(self._ends)

    def _ends(self, rank: int, way: int) -> Ends:
        ring = self.ring.group_of(rank)
        size, position = len(ring), ring.index(rank)
        target, source = ring[(position + way) % size], ring[(position - way) % size]
        if not self.edges:
            return Ends(target, source, self.ring.name, self.ring.name)
        ahead, behind = (self.edges[_edge(place % size, size)].name for place in (position, position - 1))
        return Ends(target, source, *((ahead, behind) if way == 1 else (behind, ahead)))

    def position(self, rank: int) -> int:
        """Return the place of a rank in its ring."""
        return self.ring.position(rank)


def lane(ring: Communicator, form: MessageForm) -> Lane:
    """Return the lane around rings of one size, for one form of messages."""
    is_packed = form in {"packed", "packed-separate"}
    if form in {"grouped", "packed"}:
        return Lane(ring, packed=is_packed)
    size = len(ring.groups[0])
    pairs: list[list[tuple[int, ...]]] = [[], [], []]
    for group in ring.groups:
        for place in range(size if size > 1 else 0):
            pairs[_edge(place, size)].append((group[place], group[(place + 1) % size]))
    edges = [Communicator(name=f"{ring.name} {i}", groups=tuple(found)) for i, found in enumerate(pairs) if found]
    return Lane(ring, tuple(edges), is_packed)


def _edge(place: int, size: int) -> int:
    """Return which of the edges a member of a ring and the next one are a pair of: neighbours take turns, and the last
    pair of an odd ring is one over.
    """
    return 2 if size % 2 and place == size - 1 else place % 2


def to_send(builder: ProgramBuilder, over: Lane, bundle: tuple[View, ...], what: str) -> tuple[View, ...]:
    """Return a bundle as it hops along a lane: copies in one buffer where the lane packs, unless it lies so."""
    if not over.packed or len(_packs(builder, bundle)) < len(bundle):
        return bundle
    there = builder.like_all([what] * len(bundle), bundle, "communication", packed=True)
    for view, into in zip(bundle, there, strict=True):
        builder.copy(view, into, f"pack {what}")
    return there


def hop(
    builder: ProgramBuilder,
    over: Lane,
    here: Sequence[View],
    there: Sequence[View],
    way: int,
    label: str,
    *,
    overlap: bool,
) -> None:
    """Append one hop of a ring, ``way`` members on; without overlap the host waits for it."""
    ends = over.ends(builder.rank, way)

    def write() -> None:
        sent, taken = (_packs(builder, views) if over.packed else list(views) for views in (here, there))
        sends, recvs = [Message(ends.target, view) for view in sent], [Message(ends.source, view) for view in taken]
        if over.edges:
            for send, recv in zip(sends, recvs, strict=True):
                builder.add(Exchange(label=label, communicator=ends.out, sends=(send,), recvs=()))
                builder.add(Exchange(label=f"receive for {label}", communicator=ends.into, sends=(), recvs=(recv,)))
        else:
            builder.add(Exchange(label=label, communicator=ends.out, sends=tuple(sends), recvs=tuple(recvs)))
        if not overlap:
            streams = tuple(dict.fromkeys((ends.out, ends.into)))
            builder.add(HostSync(label=f"wait for {label}", streams=streams))

    key = ("hop", ends.out, ends.into, over.packed, overlap)
    builder.again(key, (*here, *there), label, write, (ends.target, ends.source))


def _packs(builder: ProgramBuilder, views: Sequence[View]) -> list[View]:
    """Return the messages that views are: one for those that fill a buffer, one after the other."""
    found: dict[int, list[View]] = {}
    for view in views:
        found.setdefault(view.buffer, []).append(view)
    return [message for of_buffer in found.values() for message in _filled(builder.whole(of_buffer[0]), of_buffer)]


def _filled(whole: View, views: list[View]) -> list[View]:
    """Return the whole of a buffer where views fill it along its first dimension; else the views."""
    first, last = views[0].slices[0], views[-1].slices[0]
    follow = all(a.slices[0][1] == b.slices[0][0] for a, b in pairwise(views))
    inner = {view.slices[1:] for view in views} == {whole.slices[1:]}
    return [whole] if follow and inner and (first[0], last[1]) == whole.slices[0] else views
