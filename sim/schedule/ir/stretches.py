"""Ops that are written many times on other buffers, with other peers, and under other labels: said once, and where.

    Stretch ── on some buffers, with some peers ──> Bound ── under a label, with own buffers ──> its ops

A rank of a ring hops P times and attends P times, and P ranks do: P^2 stretches of a few kinds. What follows from their
kinds is found as arrays (``stretch_columns``); an op is made when somebody looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sim.schedule.ir.declare import rebound
from sim.schedule.ir.exchanges import Ints
from sim.schedule.ir.forms import Form, form_of, like_of, views_of
from sim.schedule.ir.ops import Exchange, Message, Op
from sim.schedule.ir.views import Buffer


class Stretch:
    """Ops that follow each other, on buffers that are numbered from 0: those that it is given, then its own."""

    def __init__(
        self, ops: Sequence[Op], starts: Sequence[str | None], num_given: int = 0, buffers: Sequence[Buffer] = ()
    ) -> None:
        self.ops = tuple(ops)
        """Their peers are numbered from 0, too."""
        self.starts = tuple(starts)
        """What labels begin with that end as that of a place does; None of others."""
        self.num_given = num_given
        """How many buffers it is given."""
        self.buffers = tuple(buffers)
        """Its own."""
        self.views = np.array([view.buffer for op in self.ops for view in views_of(op)], np.int64)
        """The buffers of all views, one op after the other."""
        self.are_given = (self.views >= 0) & (self.views < num_given)
        """Of each view whether its buffer is given."""
        self.used_own = np.unique(self.views[~self.are_given]) - num_given
        """The buffers of all others, counted from the first of its own."""
        self.exchanges = [at for at, op in enumerate(self.ops) if isinstance(op, Exchange)]
        self._used = list(dict.fromkeys(self.views.tolist()))
        self._forms: dict[tuple[Hashable, ...], list[Form]] = {}

    @staticmethod
    def of(
        ops: Sequence[Op], label: str, given: Sequence[int], first: int, buffers: Sequence[Buffer], peers: Sequence[int]
    ) -> Stretch:
        """Return the stretch of ops that were written under a label, on buffers and with peers that were given, and on
        own buffers from ``first`` on.
        """
        number = {old: at for at, old in enumerate((*given, *range(first, first + len(buffers))))}
        own = [with_peers(rebound(op, number), peers.index) for op in ops]
        return Stretch(own, [_start(op.label, label) for op in ops], len(given), buffers)

    def forms(self, place: Again, buffers: Sequence[Buffer], inputs: Mapping[int, str]) -> list[Form]:
        """Return the forms of its ops at a place of a program with these buffers, of which some are ``inputs``: see
        ``forms.formed``.
        """
        like = like_of(place.numbers(self._used), buffers, inputs)
        key = tuple(like.values())
        if key not in self._forms:
            self._forms[key] = [form_of(op, like, buffers) for op in place.ops]
        return self._forms[key]


class Bound(NamedTuple):
    """A stretch on some buffers, with some peers."""

    stretch: Stretch
    given: tuple[int, ...]
    """Each another one, and none of its own."""
    peers: tuple[int, ...] = ()

    @property
    def exchanged(self) -> list[list[int]]:
        """Of each of its Exchanges the peers of all messages."""
        some = [self.stretch.ops[at] for at in self.stretch.exchanges]
        return [[self.peers[peer] for peer in peers_of(op)] if self.peers else peers_of(op) for op in some]


class Again(NamedTuple):
    """Where a stretch is written."""

    bound: Bound
    label: str
    first: int
    """The number of the first of its own buffers."""

    def numbers(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers that buffers of the stretch have here."""
        given = self.bound.given
        later = self.first - len(given)
        return [given[number] if 0 <= number < len(given) else number + later for number in numbers]

    @property
    def is_as_written(self) -> bool:
        """Whether its ops are those of the stretch."""
        return not (self.bound.given or self.bound.peers or self.first)

    @property
    def all_numbers(self) -> tuple[int, ...]:
        """The numbers of what the stretch is given, then of its own buffers."""
        return (*self.bound.given, *range(self.first, self.first + len(self.bound.stretch.buffers)))

    @property
    def ops(self) -> tuple[Op, ...]:
        """Its ops."""
        (stretch, _, peers), label = self.bound, self.label
        if self.is_as_written:
            return stretch.ops
        numbers = self.all_numbers
        found = [
            rebound(op, numbers, label=op.label if start is None else start + label)
            for op, start in zip(stretch.ops, stretch.starts, strict=True)
        ]
        return tuple([with_peers(op, peers.__getitem__) for op in found])


class Stretched(Sequence[Op]):
    """Ops by where their stretches are written: places, one after the other, as columns."""

    def __init__(self, bounds: Sequence[Bound], which: Ints, firsts: Ints, labels: Sequence[str]) -> None:
        self.bounds = bounds
        """Those that stretches are bound to, in the order of their first places."""
        self.which = which
        """Of each place the number of its own."""
        self.firsts = firsts
        """Of each place the number of the first of its own buffers."""
        self.labels = labels
        self.ends = np.cumsum(np.array([len(one.stretch.ops) for one in bounds], np.int64)[which])
        """Up to which op each place goes."""
        self._made: dict[int, tuple[Op, ...]] = {}

    def place(self, number: int) -> Again:
        """Return a place."""
        return Again(self.bounds[self.which[number]], self.labels[number], int(self.firsts[number]))

    @property
    def places(self) -> Iterator[Again]:
        """All places."""
        of_each = zip(self.which.tolist(), self.labels, self.firsts.tolist(), strict=True)
        return (Again(self.bounds[which], label, first) for which, label, first in of_each)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple([self[index] for index in range(*at.indices(len(self)))])
        index = at + len(self) if at < 0 else at
        if not 0 <= index < len(self):
            raise IndexError(at)
        place = int(self.ends.searchsorted(index, side="right"))
        return self._of(place)[int(index - self.ends[place])]

    def __iter__(self) -> Iterator[Op]:
        for place in range(len(self.which)):
            yield from self._of(place)

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Sequence) or len(self) != len(other):
            return self is other
        return all(one == another for one, another in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[type[tuple[Op, ...]], tuple[tuple[Op, ...]]]:
        """Other processes are given the ops themselves."""
        return tuple, (tuple(self),)

    @cached_property
    def by_bound(self) -> list[tuple[Bound, Ints]]:
        """What stretches are bound to, each with its places."""
        order = np.argsort(self.which, kind="stable")
        ends = np.cumsum(np.bincount(self.which, minlength=len(self.bounds)))
        return list(zip(self.bounds, np.split(order, ends[:-1]), strict=True))

    def _of(self, place: int) -> tuple[Op, ...]:
        if place not in self._made:
            self._made[place] = self.place(place).ops
        return self._made[place]


class Written:
    """Ops in the order in which they are written, by themselves and by stretches."""

    def __init__(self) -> None:
        self._bounds: list[Bound] = []
        self._numbers: dict[int, int] = {}
        """Of what stretches are bound to, by identity."""
        self._which: list[int] = []
        self._firsts: list[int] = []
        self._labels: list[str] = []
        self._count = 0
        self._single: list[Op] = []
        """Behind all places."""

    def __len__(self) -> int:
        return self._count + len(self._single)

    def add(self, op: Op) -> None:
        """Append an op."""
        self._single.append(op)

    def again(self, bounds: Sequence[Bound], firsts: Sequence[int], labels: Sequence[str]) -> None:
        """Append the ops of stretches, whose own buffers begin with these."""
        some = [at for at, bound in enumerate(bounds) if bound.stretch.ops]
        if not some:
            return
        self._end()
        number, known = self._numbers, self._bounds
        for at in some:
            bound = bounds[at]
            which = number.setdefault(id(bound), len(known))
            if which == len(known):
                known.append(bound)
            self._which.append(which)
            self._count += len(bound.stretch.ops)
        self._firsts += [firsts[at] for at in some]
        self._labels += [labels[at] for at in some]

    def _end(self) -> None:
        if self._single:
            single, self._single = self._single, []
            self.again([Bound(Stretch(single, [None] * len(single)), ())], [0], [""])

    @property
    def ops(self) -> Sequence[Op]:
        """What has been written."""
        if not self._which:
            return tuple(self._single)
        self._end()
        which, firsts = np.array(self._which, np.int64), np.array(self._firsts, np.int64)
        return Stretched(self._bounds, which, firsts, self._labels)


def peers_of(op: Op) -> list[int]:
    """Return the ranks that messages of an Exchange go to, then those that they come from; of other ops none."""
    return [peer for peer, _ in (*op.sends, *op.recvs)] if isinstance(op, Exchange) else []


def _start(label: str, end: str) -> str | None:
    """Return what a label begins with if it ends like this."""
    return label.removesuffix(end) if label.endswith(end) else None


def with_peers(op: Op, peer: Callable[[int], int]) -> Op:
    """Return an op with other peers."""
    if not isinstance(op, Exchange):
        return op
    sends, recvs = (tuple([Message(peer(old), view) for old, view in some]) for some in (op.sends, op.recvs))
    return msgspec.structs.replace(op, sends=sends, recvs=recvs)
