"""Which communication ops of different ranks belong together: the n-th on a communicator meets the n-th of a peer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, assert_never

import numpy as np

from sim.base.errors import ScheduleError
from sim.base.kept import kept
from sim.schedule.derive.replicas import stand_for, whole_size
from sim.schedule.ir import ops
from sim.schedule.ir.exchanges import Ints
from sim.schedule.ir.forms import Form
from sim.schedule.ir.fragments import Fragment
from sim.schedule.ir.program import Schedule, alone
from sim.schedule.ir.views import Split, View
from sim.words.workload import Dtype

Key = tuple[int, int]
"""(rank, index of the op in its program)."""


class Transfer(NamedTuple):
    """All that one Exchange sends to one peer's Exchange."""

    source: Key
    target: Key
    pairs: tuple[tuple[View, View], ...]
    """(view at the source, view at the target), in the order of the messages."""
    nbytes: int


class Group(NamedTuple):
    """One collective: the ops of all members, in the order of the group."""

    members: tuple[Key, ...]


class Matching:
    """All communication of a schedule."""

    def __init__(self, transfers: Sequence[Transfer], groups: list[Group]) -> None:
        self.transfers = transfers
        self.groups = groups

    @cached_property
    def transfers_of(self) -> dict[Key, list[int]]:
        """Per Exchange the transfers that it takes part in: its sends, then its receives, each by the peer's number."""
        found: dict[Key, list[int]] = defaultdict(list)
        for number, transfer in enumerate(self.transfers):
            found[transfer.source].append(number)
        for number, transfer in enumerate(self.transfers):
            found[transfer.target].append(number)
        return dict(found)

    @cached_property
    def group_of(self) -> dict[Key, int]:
        """Per collective of a rank the number of its group."""
        return {key: number for number, group in enumerate(self.groups) for key in group.members}


def match(schedule: Schedule) -> Matching:
    """Return what belongs together; raises ScheduleError where a side is missing or does not fit the other."""
    sides = _Channels(schedule)
    calls: dict[tuple[str, tuple[int, ...]], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for program in schedule.programs:
        groups_of, begin = _Groups(schedule, program.rank), 0
        for fragment, *_ in program.calls:
            sides.add(program.rank, begin, fragment, groups_of)
            for at in fragment.collectives:
                op = fragment.ops[at]
                assert isinstance(op, ops.Collective)
                calls[op.communicator, groups_of[op.communicator][0]][program.rank].append(begin + at)
            begin += len(fragment.ops)
    return Matching(sides.met(), list(_groups(schedule, calls)))


class _Groups(dict[str, tuple[tuple[int, ...], frozenset[int]]]):
    """By communicator the group of one rank, in its order and as a set, looked for when it is first asked for."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        super().__init__()
        self._schedule, self._rank = schedule, rank

    def __missing__(self, communicator: str) -> tuple[tuple[int, ...], frozenset[int]]:
        group = self._schedule.communicator(communicator).group_of(self._rank)
        self[communicator] = group, frozenset(group)
        return self[communicator]


class _Tensor(NamedTuple):
    """What two sides of a message must agree on."""

    lies: str
    """As of Buffer."""
    shape: tuple[int, ...]
    dtype: Dtype
    nbytes: int
    by_copies: bool


@kept
def _tensors(form: Form) -> tuple[list[_Tensor], list[_Tensor]]:
    """Return what an Exchange sends, and what it receives; nothing of other ops."""
    if not isinstance(form.op, ops.Exchange):
        return [], []
    program, by_copies = alone(form), form.op.by_copies is True

    def tensors(messages: tuple[ops.Message, ...]) -> list[_Tensor]:
        buffers = [(view, program.buffers[view.buffer]) for _, view in messages]
        return [
            _Tensor(buffer.lies, view.shape, buffer.dtype, program.nbytes(view), by_copies) for view, buffer in buffers
        ]

    return tensors(form.op.sends), tensors(form.op.recvs)


class SideKind(NamedTuple):
    """What an Exchange sends to one peer, or receives from it."""

    form: Form
    """Of the Exchange."""
    places: tuple[int, ...]
    """Of its messages the places of their views among those of the form."""
    tensors: tuple[_Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum([tensor.nbytes for tensor in self.tensors])


class Sides(NamedTuple):
    """What Exchanges send to one peer each, or receive from it, as arrays: by communicator, source and target, then in
    the order of a rank's ops.
    """

    channel: Ints
    """As one number: of the communicator by its name, of the source and of the target."""
    rank: Ints
    op: Ints
    """Its number in the rank's program."""
    kind: Ints


class Transfers(Sequence[Transfer]):
    """Transfers as arrays, and each by itself where it is asked for."""

    def __init__(self, schedule: Schedule, sent: Sides, taken: Sides, kinds: list[SideKind]) -> None:
        self.sent, self.taken = sent, taken
        """Of each transfer its sides."""
        self.kinds = kinds
        self._schedule = schedule

    def __len__(self) -> int:
        return len(self.sent.op)

    def __getitem__(self, number: Any) -> Any:
        return self._all[number]

    @cached_property
    def _all(self) -> list[Transfer]:
        ops_of = [program.ops for program in self._schedule.programs]
        found: list[Transfer] = []
        sides = (*self.sent[1:], *self.taken[1:3])
        for rank, number, kind, other, other_number in zip(*(side.tolist() for side in sides), strict=True):
            send, receive = ops_of[rank][number], ops_of[other][other_number]
            assert isinstance(send, ops.Exchange)
            assert isinstance(receive, ops.Exchange)
            out = [view for peer, view in send.sends if peer == other]
            into = [view for peer, view in receive.recvs if peer == rank]
            pairs = tuple(zip(out, into, strict=True))
            found.append(Transfer((rank, number), (other, other_number), pairs, self.kinds[kind].nbytes))
        return found


class _Channels:
    """Collects what Exchanges send and receive, rank by rank."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._count = schedule, schedule.num_ranks
        self._names = {name: at for at, name in enumerate(sorted({one.name for one in schedule.header.communicators}))}
        self._kinds: dict[SideKind, int] = {}
        self._found: list[tuple[Ints, Ints, Ints]] = []
        """Of the fragments of ranks: ranks, numbers of ops, and rows as of ``_rows``."""

    def add(self, rank: int, begin: int, fragment: Fragment, groups_of: _Groups) -> None:
        """Add what a rank's fragment, whose first op has a number there, sends and receives; raises ScheduleError where
        a peer is not in the rank's group.
        """
        exchanges, (forms, which, _) = fragment.exchanges, fragment.formed
        rows = []
        for at in exchanges.first:
            op = fragment.ops[at]
            assert isinstance(op, ops.Exchange)
            group, members = groups_of[op.communicator]
            peers = [peer for peer, _ in (*op.sends, *op.recvs)]
            if not members.issuperset(peers):
                peer = next(peer for peer in peers if peer not in members)
                named = f"{describe(self._schedule, (rank, begin + at))} names rank {peer}"
                raise ScheduleError(f"{named}, which is not in its group {group}")
            rows.append(list(self._rows(rank, op, forms[which[at]])))
        if rows:
            numbers, found = exchanges.each(rows, 3)
            self._found.append((np.full(len(numbers), rank), numbers + begin, found))

    def _rows(self, rank: int, op: ops.Exchange, form: Form) -> Iterator[tuple[int, int, int]]:
        """Yield for each peer that an Exchange sends to, then for each that it receives from, whether it does that, the
        channel and the kind of the side.
        """
        number, before = self._names[op.communicator], 0
        for receives, (messages, tensors) in enumerate(zip((op.sends, op.recvs), _tensors(form), strict=True)):
            places: dict[int, list[int]] = {}
            for place, (peer, _) in enumerate(messages):
                places.setdefault(peer, []).append(place)
            for peer, own in places.items():
                source, target = (peer, rank) if receives else (rank, peer)
                kind = SideKind(
                    form, tuple([before + place for place in own]), tuple([tensors[place] for place in own])
                )
                channel = (number * self._count + source) * self._count + target
                yield receives, channel, self._kinds.setdefault(kind, len(self._kinds))
            before += len(messages)

    def met(self) -> Transfers:
        """Return the transfers; raises ScheduleError where a side is missing or does not fit the other."""
        nothing = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 3), np.int64))
        ranks, numbers, rows = (np.concatenate(some) for some in zip(nothing, *self._found, strict=True))
        receives, channels, kind = rows.T

        def ordered(which: int) -> Sides:
            some = np.flatnonzero(receives == which)
            some = some[np.argsort(channels[some], kind="stable")]
            return Sides(channels[some], ranks[some], numbers[some], kind[some])

        sent, taken, kinds = ordered(0), ordered(1), list(self._kinds)
        known: dict[tuple[_Tensor, ...], int] = {}
        tensors = np.array([known.setdefault(one.tensors, len(known)) for one in kinds], np.int64)
        fit = np.array_equal(sent.channel, taken.channel) and np.array_equal(tensors[sent.kind], tensors[taken.kind])
        if not fit:
            self._refuse(sent, taken, kinds)
        return Transfers(self._schedule, sent, taken, kinds)

    def _refuse(self, sent: Sides, taken: Sides, kinds: list[SideKind]) -> None:
        """Raise ScheduleError for the first side that is missing, or does not fit the other."""
        for channel in np.union1d(sent.channel, taken.channel).tolist():
            out, into = (np.flatnonzero(some.channel == channel).tolist() for some in (sent, taken))
            if len(out) != len(into):
                number, source, target = (
                    channel // self._count**2,
                    channel // self._count % self._count,
                    channel % self._count,
                )
                raise ScheduleError(
                    f"communicator {list(self._names)[number]!r}: rank {source} sends {len(out)} times to rank "
                    f"{target}, which receives {len(into)} times; every Exchange needs its counterpart"
                )
            for one, other in zip(out, into, strict=True):
                given, wanted = kinds[sent.kind[one]].tensors, kinds[taken.kind[other]].tensors
                if given != wanted:
                    sender, receiver = (
                        describe(self._schedule, (int(some.rank[at]), int(some.op[at])))
                        for some, at in ((sent, one), (taken, other))
                    )
                    raise ScheduleError(f"{sender} sends {_spell(given)} but {receiver} receives {_spell(wanted)}")


def _spell(tensors: Iterable[_Tensor]) -> str:
    return ", ".join(
        f"{tensor.dtype} {tensor.lies} {tensor.shape}{' by copies' * tensor.by_copies}" for tensor in tensors
    )


def _groups(schedule: Schedule, calls: dict[tuple[str, tuple[int, ...]], dict[int, list[int]]]) -> Iterator[Group]:
    for (name, members), indices in sorted(calls.items()):
        if list(members) != sorted(members):
            raise ScheduleError(
                f"communicator {name!r} has collectives in the group {members}: give it these ranks as they rise, "
                f"since torch's process groups have them so"
            )
        counts = {rank: len(indices.get(rank, [])) for rank in members}
        if len(set(counts.values())) != 1:
            raise ScheduleError(f"communicator {name!r}: members disagree on the number of collectives: {counts}")
        size = whole_size(schedule, name, members[0])
        known: dict[Form, _Sides] = {}
        for number in range(counts[members[0]]):
            keys = tuple((rank, indices[rank][number]) for rank in members)
            sides = [_sides_once(schedule, key, size, known) for key in keys]
            if not _agree(sides):
                spelled = [f"{describe(schedule, key)}: {one}" for key, one in zip(keys, sides, strict=True)]
                raise ScheduleError(f"members of one collective disagree on its parts: {'; '.join(spelled)}")
            yield Group(keys)


_Part = tuple[str, tuple[int, ...], Dtype]
"""Dimensions in the order of memory, shape and data type."""


class _Sides(NamedTuple):
    """What one member of a collective sends to each, and takes from each: one part where all are alike, none where it
    does neither.
    """

    kind: str
    given: tuple[_Part, ...]
    taken: tuple[_Part, ...]


def _sides_once(schedule: Schedule, key: Key, size: int, known: dict[Form, _Sides]) -> _Sides:
    """Return ``_sides``, which is one for all ops of a form; ``known`` are those of groups of this size."""
    forms, which, _ = schedule.program(key[0]).formed
    form = forms[which[key[1]]]
    if form not in known:
        known[form] = _sides(schedule, key, size)
    return known[form]


def _sides(schedule: Schedule, key: Key, size: int) -> _Sides:
    """Return what one member of a group of some size, with those that the schedule leaves out, sends and takes; raises
    ScheduleError where parts do not fit.
    """
    program = schedule.program(key[0])
    op = program.ops[key[1]]
    assert isinstance(op, ops.Collective)
    found: list[tuple[_Part, ...]] = []
    for side in (op.given, op.taken):
        parts: list[View] = []
        if isinstance(side, Split):
            given = side.parts == size and len(side.sizes) in {0, size} and min(side.sizes, default=0) >= 0
            if not given or side.extent != side.view.shape[side.dim]:
                raise ScheduleError(
                    f"{describe(schedule, key)} cuts {side.view.shape} along dimension {side.dim} into "
                    f"{side.sizes or side.parts} parts, but its group has {size} members: give each a part"
                )
            parts = [side.part(member) for member in range(size if side.sizes else 1)]
        elif side is not None:
            parts = [side]
        found.append(tuple((program.buffers[part.buffer].lies, part.shape, program.dtype(part)) for part in parts))
    return _Sides(op.name, *found)


def _agree(sides: list[_Sides]) -> bool:
    """Return whether all members do the same, and each takes from each what that sends to it."""
    if len({one.kind for one in sides}) > 1:
        return False
    if len(set(sides)) == 1 and sides[0].given == sides[0].taken and len(sides[0].given) <= 1:
        return True  # all parts are alike
    return all(
        not one.given or (other.taken and one.given[j % len(one.given)] == other.taken[i % len(other.taken)])
        for i, one in enumerate(sides)
        for j, other in enumerate(sides)
    )


def describe(schedule: Schedule, key: Key) -> str:
    """Return how errors name an op: rank, number, kind and label."""
    op = schedule.program(key[0]).ops[key[1]]
    return f"rank {key[0]} op {key[1]} ({type(op).__name__} {op.label!r} on {op.stream!r})"


def wire_bytes(schedule: Schedule, matching: Matching) -> int:
    """Return the bytes that the ranks of all replicas put on the wire; what a rank sends to itself is not counted.

    All-gather, reduce-scatter and all-reduce count what every algorithm must at least send per rank: (n-1) parts, and
    twice (n-1)/n of the whole for all-reduce.
    """
    replica, replicas = schedule.header.mesh.replica, stand_for(schedule)
    sent, over_all = _sent_by(matching.transfers), 0
    for group in matching.groups:
        for place, (rank, index) in enumerate(group.members):
            program = schedule.program(rank)
            op = program.ops[index]
            assert isinstance(op, ops.Collective)
            n = whole_size(schedule, op.communicator, rank)
            if n > len(group.members) and isinstance(op, ops.AllReduce):  # of all replicas one
                over_all += 2 * (n - 1) * program.nbytes(op.view) if place == 0 else 0
                continue
            if isinstance(op, ops.AllToAll | ops.ReduceScatter):
                sent[rank] += program.nbytes(op.sends.view) - program.nbytes(op.sends.part(place))
            elif isinstance(op, ops.AllGather):
                sent[rank] += (n - 1) * program.nbytes(op.send)
            elif isinstance(op, ops.AllReduce):
                sent[rank] += 2 * (n - 1) * program.nbytes(op.view) if place == 0 else 0
            elif not isinstance(op, ops.Barrier):
                assert_never(op)
    return over_all + sum(len(replicas[replica(rank)]) * nbytes for rank, nbytes in sent.items())


def _sent_by(transfers: Sequence[Transfer]) -> Counter[int]:
    """Return by rank the bytes of all that it sends."""
    found = Counter[int]()
    if isinstance(transfers, Transfers):
        each = np.array([kind.nbytes for kind in transfers.kinds], np.int64)
        ranks, which = np.unique(transfers.sent.rank, return_inverse=True)
        sums = np.zeros(len(ranks), np.int64)
        np.add.at(sums, which, each[transfers.sent.kind])
        return Counter(dict(zip(ranks.tolist(), sums.tolist(), strict=True)))
    for (rank, _), _, _, nbytes in transfers:
        found[rank] += nbytes
    return found
