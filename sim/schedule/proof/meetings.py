"""Which calls of ranks meet, and in which order: what communicates among itself only, as a small schedule.

    blocks, the ranks of each stage ── their k-th calls ── with those of other blocks that they communicate with

The k-th calls of a block meet. Calls of different blocks meet where one sends what the other one receives, or both are
in one collective. Meetings come in an order in which each rank's calls follow each other, but for those that do nothing
but send: they end when what they send is received, and calls that do not need that go on meanwhile. Which calls meet is
found by what the first rank of each block does; whether that holds of the others the matching of each meeting says.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import NamedTuple

from sim.base.kept import kept
from sim.schedule.ir.fragments import Call, Fragment
from sim.schedule.ir.ops import Collective, Exchange, HostSync
from sim.schedule.ir.program import Program, Schedule


class Meeting(NamedTuple):
    """Calls that communicate with each other, and with no others."""

    ranks: tuple[int, ...]
    """As they rise."""
    calls: tuple[Call, ...]
    """Of each of them one."""


Place = tuple[int, int]
"""A block, and the number of a call of each of its ranks."""
_Channel = tuple[Hashable, ...]


def meetings(schedule: Schedule) -> list[Meeting] | None:
    """Return all meetings of a schedule's calls in an order in which they can be played; None where there is none."""
    programs = schedule.programs
    blocks = schedule.header.mesh.groups("dp", "ring", "ulysses", "tp")
    counts = [{len(programs[rank].calls) for rank in block} for block in blocks]
    if any(len(found) > 1 for found in counts) or counts == [{1}] * len(blocks):
        return None
    order = _Order(programs, blocks, _met(schedule, blocks)).found
    return None if order is None else [_meeting(programs, blocks, places) for places in order]


def _meeting(programs: Sequence[Program], blocks: Sequence[Sequence[int]], places: Sequence[Place]) -> Meeting:
    calls = {rank: programs[rank].calls[number] for block, number in places for rank in blocks[block]}
    ranks = tuple(sorted(calls))
    return Meeting(ranks, tuple([calls[rank] for rank in ranks]))


def _met(schedule: Schedule, blocks: Sequence[Sequence[int]]) -> dict[Place, list[Place]]:
    """Return which calls of other blocks a call of a block meets, one way and the other."""
    met: dict[Place, list[Place]] = defaultdict(list)
    first: dict[tuple[_Channel, int], Place] = {}
    for block, (rank, *_) in enumerate(blocks) if len(blocks) > 1 else ():
        own, passed = frozenset(blocks[block]), Counter[_Channel]()
        leaving: dict[Fragment, list[_Channel]] = {}
        for number, call in enumerate(schedule.program(rank).calls):
            if call.fragment not in leaving:
                leaving[call.fragment] = _leaving(schedule, rank, call.fragment, own)
            for channel in leaving[call.fragment]:
                passed[channel] += 1
                here = block, number
                there = first.setdefault((channel, passed[channel]), here)
                if there != here:
                    met[there].append(here)
                    met[here].append(there)
    return met


def _leaving(schedule: Schedule, rank: int, fragment: Fragment, own: frozenset[int]) -> list[_Channel]:
    """Return on which channels a rank's fragment communicates with others than its own: for each message its
    communicator, source and target, for each collective its communicator and group.
    """
    found: list[_Channel] = []
    for at in fragment.shared.communication:
        op = fragment.ops[at]
        if isinstance(op, Exchange):
            found += [(op.communicator, rank, peer) for peer in {peer for peer, _ in op.sends} - own]
            found += [(op.communicator, peer, rank) for peer in {peer for peer, _ in op.recvs} - own]
        elif isinstance(op, Collective):
            group = schedule.communicator(op.communicator).group_of(rank)
            found += [] if own.issuperset(group) else [(op.communicator, group)]
    return found


class _Waits(NamedTuple):
    """What a fragment waits for of what its rank sends."""

    sends: bool
    """Whether it does nothing but send, over one communicator, what it is given."""
    streams: frozenset[str]
    """Those that have to be idle: of its communicators, and those for which the host waits."""


@kept
def _waits(fragment: Fragment) -> _Waits:
    streams = set(fragment.communicators)
    for op in fragment.ops:
        streams.update(op.streams if isinstance(op, HostSync) else ())
    alone = len(streams) == 1 and not (fragment.own or fragment.outputs)
    sends = alone and all(isinstance(op, Exchange) and not op.recvs for op in fragment.ops)
    return _Waits(sends, frozenset(streams))


class _Order:
    """Finds the order of meetings."""

    def __init__(
        self, programs: Sequence[Program], blocks: Sequence[Sequence[int]], met: dict[Place, list[Place]]
    ) -> None:
        self._calls = [[programs[rank].calls for rank in block] for block in blocks]
        self._met = met
        self._next = [0] * len(blocks)
        self._sent: list[dict[str, deque[int]]] = [defaultdict(deque) for _ in blocks]
        """By block and communicator calls that send what is not received yet."""

    @cached_property
    def found(self) -> list[list[Place]] | None:
        """The places of all meetings; None where none of what is left can be next."""
        order: list[list[Place]] = []
        ready = deque(range(len(self._calls)))
        while ready:
            block = ready.popleft()
            while self._next[block] < len(self._calls[block][0]):
                here = block, self._next[block]
                if here in self._met and self._only_sends(here):
                    self._sent[block][self._communicator(here)].append(here[1])
                    self._next[block] += 1
                    ready.extend(other for other, _ in self._met[here])
                    continue
                places = self._together(here)
                if not all(map(self._can_be_next, places)):
                    break  # the last one to get here goes on
                order.append(places)
                for other, number in places:
                    if number < self._next[other]:
                        self._sent[other][self._communicator((other, number))].popleft()
                    else:
                        self._next[other] += 1
                    ready.extend(range(len(self._calls)) if len(places) > 1 else ())
        return order if self._next == [len(block[0]) for block in self._calls] else None

    def _only_sends(self, place: Place) -> bool:
        """Return whether the calls of all ranks of a block do nothing but send, over the same communicator."""
        fragments = [calls[place[1]].fragment.shared for calls in self._calls[place[0]]]
        return all(_waits(one).sends for one in fragments) and len({one.communicators for one in fragments}) == 1

    def _communicator(self, place: Place) -> str:
        (name,) = self._calls[place[0]][0][place[1]].fragment.communicators
        return name

    def _can_be_next(self, place: Place) -> bool:
        """Return whether a call has all that its ranks sent before and that it waits for, and is next; of those that
        have sent already whether they are the next to end on their communicator.
        """
        block, number = place
        if number < self._next[block]:
            return self._sent[block][self._communicator(place)][0] == number
        if number > self._next[block]:
            return False
        under_way = {name: sent for name, sent in self._sent[block].items() if sent}
        for calls in self._calls[block] if under_way else ():
            call = calls[number]
            written = {call.given[at] for at in call.fragment.written}
            for name, sent in under_way.items():
                if name in _waits(call.fragment.shared).streams:
                    return False
                if any(not written.isdisjoint(calls[at].given) for at in sent):
                    return False
        return True

    def _together(self, place: Place) -> list[Place]:
        """Return all places that meet one, each other, or one that meets it."""
        found = {place: None}
        reached = [place]
        while reached:
            for other in self._met.get(reached.pop(), ()):
                if other not in found:
                    found[other] = None
                    reached.append(other)
        return sorted(found)
