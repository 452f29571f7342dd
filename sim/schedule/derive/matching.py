"""Which communication ops of different ranks belong together: the n-th on a communicator meets the n-th of a peer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple, assert_never

from sim.base.errors import ScheduleError
from sim.base.kept import kept
from sim.schedule.derive.replicas import num_alike, whole_group
from sim.schedule.ir import ops
from sim.schedule.ir.forms import Form
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


class Matching(NamedTuple):
    """All communication of a schedule."""

    transfers: list[Transfer]
    groups: list[Group]
    transfers_of: dict[Key, list[int]]
    """Per Exchange the transfers that it takes part in: its sends, then its receives, each by the peer's number."""
    group_of: dict[Key, int]


def match(schedule: Schedule) -> Matching:
    """Return what belongs together; raises ScheduleError where a side is missing or does not fit the other."""
    sends: dict[tuple[str, int, int], list[_Side]] = defaultdict(list)
    recvs: dict[tuple[str, int, int], list[_Side]] = defaultdict(list)
    calls: dict[tuple[str, tuple[int, ...]], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for program in schedule.programs:
        rank, groups_of = program.rank, _Groups(schedule, program.rank)
        forms, which, _ = program.formed
        tensors, numbers = list(map(_tensors, forms)), which.tolist()
        for index, op in program.communication:
            if isinstance(op, ops.Exchange):
                group, members = groups_of[op.communicator]
                key, (given, taken) = (rank, index), tensors[numbers[index]]
                sides = _sides_of(key, op.sends, given), _sides_of(key, op.recvs, taken)
                if not (members.issuperset(sides[0]) and members.issuperset(sides[1])):
                    peer = next(peer for peer, _ in (*op.sends, *op.recvs) if peer not in members)
                    named = f"{describe(schedule, key)} names rank {peer}"
                    raise ScheduleError(f"{named}, which is not in its group {group}")
                for peer, side in sides[0].items():
                    sends[op.communicator, rank, peer].append(side)
                for peer, side in sides[1].items():
                    recvs[op.communicator, peer, rank].append(side)
            elif isinstance(op, ops.Collective):
                calls[op.communicator, groups_of[op.communicator][0]][rank].append(index)
    transfers = list(_transfers(schedule, sends, recvs))
    groups = list(_groups(schedule, calls))
    transfers_of: dict[Key, list[int]] = defaultdict(list)
    for number, transfer in enumerate(transfers):
        transfers_of[transfer.source].append(number)
    for number, transfer in enumerate(transfers):
        transfers_of[transfer.target].append(number)
    group_of = {key: number for number, group in enumerate(groups) for key in group.members}
    return Matching(transfers, groups, dict(transfers_of), group_of)


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


class _Side(NamedTuple):
    """What one Exchange sends to one peer, or receives from it, in the order of the messages."""

    key: Key
    views: list[View]
    tensors: list[_Tensor]


def _sides_of(key: Key, messages: tuple[ops.Message, ...], tensors: list[_Tensor]) -> dict[int, _Side]:
    """Return the sides of an Exchange, by peer."""
    found: dict[int, _Side] = {}
    for (peer, view), tensor in zip(messages, tensors, strict=True):
        if peer not in found:
            found[peer] = _Side(key, [], [])
        found[peer].views.append(view)
        found[peer].tensors.append(tensor)
    return found


def _transfers(
    schedule: Schedule, sends: dict[tuple[str, int, int], list[_Side]], recvs: dict[tuple[str, int, int], list[_Side]]
) -> Iterator[Transfer]:
    for channel in sorted(sends.keys() | recvs.keys()):
        name, source, target = channel
        out, into = sends.get(channel, []), recvs.get(channel, [])
        if len(out) != len(into):
            raise ScheduleError(
                f"communicator {name!r}: rank {source} sends {len(out)} times to rank {target}, which receives "
                f"{len(into)} times; every Exchange needs its counterpart"
            )
        for (sender, sent, sizes), (receiver, received, wanted) in zip(out, into, strict=True):
            if sizes != wanted:
                raise ScheduleError(
                    f"{describe(schedule, sender)} sends {_spell(sizes)} but {describe(schedule, receiver)} receives "
                    f"{_spell(wanted)}"
                )
            nbytes = sum([size.nbytes for size in sizes])
            yield Transfer(sender, receiver, tuple(zip(sent, received, strict=True)), nbytes)


def _spell(tensors: list[_Tensor]) -> str:
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
        size = len(whole_group(schedule, name, members))
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
    total = sum(transfer.nbytes for transfer in matching.transfers)
    over_all = 0
    for group in matching.groups:
        ranks = tuple([rank for rank, _ in group.members])
        for place, (rank, index) in enumerate(group.members):
            program = schedule.program(rank)
            op = program.ops[index]
            assert isinstance(op, ops.Collective)
            n = len(whole_group(schedule, op.communicator, ranks))
            if n > len(ranks) and isinstance(op, ops.AllReduce):  # nothing but this and a barrier is over all replicas
                over_all += 2 * (n - 1) * program.nbytes(op.view) if place == 0 else 0
                continue
            if isinstance(op, ops.AllToAll | ops.ReduceScatter):
                total += program.nbytes(op.sends.view) - program.nbytes(op.sends.part(place))
            elif isinstance(op, ops.AllGather):
                total += (n - 1) * program.nbytes(op.send)
            elif isinstance(op, ops.AllReduce):
                total += 2 * (n - 1) * program.nbytes(op.view) if place == 0 else 0
            elif not isinstance(op, ops.Barrier):
                assert_never(op)
    return num_alike(schedule) * total + over_all
