"""A checked schedule as arrays that know no machine: lowered once, played on as many machines as are wanted.

Ops of all ranks are numbered through, rank by rank in the order of their programs. What ops cost is asked for by what
is distinct among them: kernel uses, copies, messages, collectives, kinds of issue.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from sim.base.errors import InputError
from sim.base.kept import kept
from sim.schedule.derive.kernels import KernelUse, use_of
from sim.schedule.derive.matching import Key
from sim.schedule.derive.replicas import whole_group
from sim.schedule.ir import ops
from sim.schedule.ir.columns import together
from sim.schedule.ir.forms import Form
from sim.schedule.ir.fragments import Fragment
from sim.schedule.ir.program import Program, Schedule, alone
from sim.schedule.ir.views import Split, part_of
from sim.schedule.proof.check import Checked

KERNEL, HOST_SYNC, EXCHANGE, COLLECTIVE, HOST_COPY, HOST_KERNEL = range(6)
"""Kinds of ops, as in player.c."""

INT = np.int32
_OP_COLUMNS = (
    "stream", "kind", "issue", "behind", "group", "waits", "waits_end", "transfers", "transfers_end",
)  # fmt: skip
OP = np.dtype([(name, INT) for name in _OP_COLUMNS])
"""``behind`` is the last kernel before an op of communication, which waits for it on CUDA; -1 where there is none."""
STREAM = np.dtype([(name, INT) for name in ("ops", "ops_end", "rank", "own")])
TRANSFER = np.dtype([("source", INT), ("target", INT)])
GROUP = np.dtype([("members", INT), ("members_end", INT)])
PROGRAM = np.dtype([("ops", INT), ("ops_end", INT), ("compute_stream", INT)])

Array: TypeAlias = NDArray[Any]


class Times(NamedTuple):
    """Per op of all ranks, in seconds; -1 for what never happened."""

    posted: NDArray[np.float64]
    begun: NDArray[np.float64]
    ended: NDArray[np.float64]
    granted: NDArray[np.float64]
    """When it had the compute units that it holds: as posted, or after others have let go of them."""


class MessageKey(NamedTuple):
    """What a transfer's cost depends on."""

    source: int
    target: int
    nbytes: int
    group: tuple[int, ...]
    """Ranks of its communicator."""


class ExchangeKey(NamedTuple):
    """What the compute units that an Exchange holds depend on."""

    group: tuple[int, ...]
    """Ranks of its communicator."""
    peers: int
    nbytes: int
    """See ``largest_message``."""


class CollectiveKey(NamedTuple):
    """What a collective's cost depends on, beside an op of its kind."""

    kind: type[ops.Collective]
    ranks: tuple[int, ...]
    """Of its whole group, of which the schedule may have only the first replicas."""
    nbytes: int
    """Of one part, see ``part_bytes``."""


class Distinct:
    """Things by the order in which they were first seen."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.found: list[Any] = []

    def number(self, key: Hashable, thing: object) -> int:
        """Return the number of what has this key; the first one stands for all."""
        number = self._numbers.setdefault(key, len(self.found))
        if number == len(self.found):
            self.found.append(thing)
        return number


class Lowered:
    """The arrays of a checked schedule, and what is distinct in it."""

    def __init__(self, checked: Checked) -> None:
        programs = checked.schedule.programs
        counts = [program.num_ops for program in programs]
        if sum(counts) > np.iinfo(INT).max:
            name = checked.schedule.header.name
            raise InputError(
                f"schedule {name!r} has {sum(counts)} ops, more than an engine can number: use fewer ranks"
            )
        self.first: list[int] = [0, *np.cumsum(counts).tolist()]
        """The number of each rank's first op, and that of all ops."""
        self.uses, self.copies, self.issues = Distinct(), Distinct(), Distinct()
        self.ops = np.zeros(self.num_ops, OP)
        self.op_rank = np.repeat(np.arange(len(programs), dtype=INT), counts)
        self._lower_programs(programs)
        self._lower_dependencies(checked)
        met = _Met(checked.schedule, self)
        self.transfers, self.transfers_of, self.transfer_message = met.transfers, met.transfers_of, met.transfer_message
        self.messages = met.messages
        self.op_exchange, self.exchanges = met.op_exchange, met.exchanges
        self.groups, self.members, self.group_call, self.calls = met.groups, met.members, met.group_call, met.calls

    @property
    def num_ops(self) -> int:
        """Ops of all ranks."""
        return self.first[-1]

    def _lower_programs(self, programs: Sequence[Program]) -> None:
        """Set what follows from each rank's program alone, rank by rank, since arrays of all are large."""
        self.op_use, self.op_copy, self.stream_ops = (np.empty(self.num_ops, INT) for _ in range(3))
        names: list[list[str]] = []
        before = [0]
        for program, (begin, end) in zip(programs, pairwise(self.first), strict=True):
            fragments = [call.fragment for call in program.calls]
            names.append(list(dict.fromkeys(name for one in fragments for name in _facts(one.shared).streams)))
            numbered = {one: self._numbered(program.rank, one, names[-1]) for one in dict.fromkeys(fragments)}
            found, own = [numbered[one] for one in fragments], self.ops[begin:end]
            own["kind"] = together([_facts(one.shared).kind for one in fragments])
            own["issue"] = together([of.issue for of in found])
            self.op_use[begin:end] = together([of.use for of in found])
            self.op_copy[begin:end] = together([of.copy for of in found])
            streams = together([of.stream for of in found])
            own["stream"] = streams + before[-1]
            self.stream_ops[begin:end] = begin + streams.astype(np.uint16).argsort(kind="stable")  # in 16 bits by radix
            before.append(before[-1] + len(names[-1]))
        self.streams = np.zeros(before[-1], STREAM)
        ends = np.cumsum(np.bincount(self.ops["stream"], minlength=before[-1]))
        self.streams["ops_end"], self.streams["ops"][1:] = ends, ends[:-1]
        self.streams["rank"] = np.repeat(np.arange(len(programs)), list(map(len, names)))
        self.streams["own"] = [name in {ops.COMPUTE, ops.HOST} for of_rank in names for name in of_rank]
        self.programs = np.zeros(len(programs), PROGRAM)
        self.programs["ops"], self.programs["ops_end"] = self.first[:-1], self.first[1:]
        self.programs["compute_stream"] = [
            start + of_rank.index(ops.COMPUTE) if ops.COMPUTE in of_rank else -1
            for start, of_rank in zip(before, names, strict=False)
        ]

    def _numbered(self, rank: int, fragment: Fragment, streams: list[str]) -> _Numbered:
        """Return what is distinct in a fragment by the numbers that it has here; ``streams`` are those of the rank."""
        facts, alone = _facts(fragment.shared), Program.of_fragment(fragment, rank)
        issues = [self.issues.number(key, one) for key, one in facts.issues]
        uses = [self.uses.number(use, use) for use in facts.uses]
        copies = [self.copies.number((rank, *key), (alone, op)) for key, op in facts.copies]
        return _Numbered(
            np.array([streams.index(name) for name in facts.streams], INT)[facts.stream],
            np.array(issues, INT)[facts.issue],
            np.array([*uses, -1], INT)[facts.use],
            np.array([*copies, -1], INT)[facts.copy],
        )

    def _lower_dependencies(self, checked: Checked) -> None:
        """Set what ops wait for, on any machine, and beyond that on CUDA."""
        waits = [found.waits_array for found in checked.dependencies]
        counts = together([np.diff(of_rank.ends, prepend=0) for of_rank in waits])
        self.waits = together([of_rank.items + start for of_rank, start in zip(waits, self.first, strict=False)])
        self.ops["waits_end"] = np.cumsum(counts, dtype=INT)
        self.ops["waits"] = self.ops["waits_end"] - counts
        for begin, end, compute in self.programs.tolist():
            own = self.ops[begin:end]
            last = np.maximum.accumulate(np.where(own["stream"] == compute, np.arange(begin, end), -1))
            communicates = np.isin(own["kind"], (EXCHANGE, COLLECTIVE, HOST_COPY))
            own["behind"] = -1
            own["behind"][1:] = np.where(communicates[1:], last[:-1], -1)


@kept
def lowered(checked: Checked) -> Lowered:
    """Return the arrays of a schedule; kept as long as it is."""
    return Lowered(checked)


class _Facts(NamedTuple):
    """What a fragment's ops are to an engine, whoever calls it."""

    kind: Array
    streams: list[str]
    """In the order of their first op."""
    stream: Array
    issues: list[tuple[Hashable, tuple[ops.Op, KernelUse | None]]]
    issue: Array
    uses: list[KernelUse]
    use: Array
    copies: list[tuple[tuple[object, ...], ops.HostCopy | ops.HostAdamW]]
    copy: Array
    sides: Array
    """Of messages, a row for all that an Exchange sends to one peer, or takes from it."""
    exchanges: Array
    """A row per Exchange."""
    collectives: Array
    """A row per collective."""
    communicators: list[str]
    kinds: list[ops.Collective]
    """An op of each kind of collective."""


class _Numbered(NamedTuple):
    """Numbers per op of a fragment, or -1."""

    stream: Array
    """Among those of the rank."""
    issue: Array
    use: Array
    """Of the kernel use, -1 for others."""
    copy: Array
    """Of the copy between a GPU and its host, or of the kernel of that; -1 for others."""


_SIDE = np.dtype([("op", INT), ("communicator", INT), ("receives", INT), ("peer", INT), ("nbytes", np.int64)])
_EXCHANGE = np.dtype([("op", INT), ("communicator", INT), ("peers", INT), ("nbytes", np.int64)])
_COLLECTIVE = np.dtype([("op", INT), ("communicator", INT), ("kind", INT), ("nbytes", np.int64)])


class _OfForm(NamedTuple):
    """What ops of a form are to an engine."""

    kind: int
    use: KernelUse | None
    issue: Hashable
    sent: list[int]
    """Bytes of the messages of an Exchange."""
    taken: list[int]
    part: int
    """Of a collective the bytes of its largest part, 0 of others."""


@kept
def _of_form(form: Form) -> _OfForm:
    op, program, use = form.op, alone(form), use_of(form)
    sent, taken = (op.sends, op.recvs) if isinstance(op, ops.Exchange) else ((), ())
    return _OfForm(
        kind_of(op),
        use,
        issue_key(op, use),
        [program.nbytes(view) for _, view in sent],
        [program.nbytes(view) for _, view in taken],
        largest_part(op, program) if isinstance(op, ops.Collective) else 0,
    )


@kept
def _facts(fragment: Fragment) -> _Facts:
    (forms, which, _), program = fragment.formed, Program.of_fragment(fragment, rank=0)
    streams, issues, uses, copies = Distinct(), Distinct(), Distinct(), Distinct()
    communicators, kinds = Distinct(), Distinct()
    rows: list[tuple[int, ...]] = []
    over: list[int] = []
    of_forms = list(map(_of_form, forms))
    for of_form, at in zip(of_forms, np.unique(which, return_index=True)[1].tolist(), strict=True):
        op, copied = fragment.ops[at], -1
        issued = issues.number(of_form.issue, (of_form.issue, (op, of_form.use)))
        if isinstance(op, ops.HostCopy):
            places = (program.buffers[view.buffer].place for view in (op.source, op.target))
            what = (op.stream, op.source.shape, program.dtype(op.source), *places)
            copied = copies.number(what, (what, op))
        elif isinstance(op, ops.HostAdamW):
            of_host = (type(op), op.weights.shape, program.dtype(op.weights), op.cast and program.dtype(op.cast))
            copied = copies.number(of_host, (of_host, op))
        used = -1 if of_form.use is None else uses.number(of_form.use, of_form.use)
        rows.append((of_form.kind, streams.number(op.stream, op.stream), issued, used, copied))
        communicates = isinstance(op, ops.Communication)
        over.append(communicators.number(op.communicator, op.communicator) if communicates else -1)
    sides: list[tuple[int, ...]] = []
    exchanges: list[tuple[int, ...]] = []
    collectives: list[tuple[int, ...]] = []
    numbers = which.tolist()
    for index in fragment.communication:
        op, number = fragment.ops[index], numbers[index]
        of_form = of_forms[number]
        if isinstance(op, ops.Exchange):
            out, into = _by_peer(op.sends, of_form.sent), _by_peer(op.recvs, of_form.taken)
            sides += [(index, over[number], 0, *sent) for sent in out.items()]
            sides += [(index, over[number], 1, *taken) for taken in into.items()]
            exchanges.append((index, over[number], *largest_message(op, (*of_form.sent, *of_form.taken))))
        elif isinstance(op, ops.Collective):
            collectives.append((index, over[number], kinds.number(type(op), op), of_form.part))
    kind, stream, issue, use, copy = np.array(rows, INT).reshape(-1, 5)[which].T
    return _Facts(
        kind, streams.found, stream, issues.found, issue, uses.found, use, copies.found, copy,
        np.array(sides, _SIDE), np.array(exchanges, _EXCHANGE), np.array(collectives, _COLLECTIVE), communicators.found,
        kinds.found,
    )  # fmt: skip


def _by_peer(messages: Iterable[ops.Message], sizes: Iterable[int]) -> dict[int, int]:
    """Return how many bytes go to each peer, or come from it."""
    nbytes: dict[int, int] = {}
    for (peer, _), size in zip(messages, sizes, strict=True):
        nbytes[peer] = nbytes.get(peer, 0) + size
    return nbytes


class _Met:
    """What belongs together on different ranks: ``match`` on arrays, of a schedule that is proved."""

    def __init__(self, schedule: Schedule, into: Lowered) -> None:
        self._schedule = schedule
        names = sorted(communicator.name for communicator in schedule.header.communicators)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._communicators = [schedule.communicator(name) for name in names]
        self._kinds = Distinct()
        self._groups = [group for communicator in self._communicators for group in communicator.groups]
        rows: dict[np.dtype[Any], list[Array]] = {_SIDE: [], _EXCHANGE: [], _COLLECTIVE: []}
        begins: dict[np.dtype[Any], list[int]] = {dtype: [] for dtype in rows}
        known: dict[Fragment, list[Array]] = {}
        for program, first in zip(schedule.programs, into.first, strict=False):
            for call in program.calls:
                fragment = call.fragment
                if fragment not in known:
                    known[fragment] = self._numbered(_facts(fragment.shared))
                for some in known[fragment]:
                    rows[some.dtype].append(some)
                    begins[some.dtype].append(first)
                first += len(fragment.ops)  # noqa: PLW2901 - of the rank's next call
        sides, exchanges, collectives = (_placed(found, begins[dtype], dtype) for dtype, found in rows.items())
        self._group_of = self._find_group_of(len(into.programs))
        self._set_transfers(sides, into)
        self._set_exchanges(exchanges, into)
        self._set_groups(collectives, into)

    def _numbered(self, facts: _Facts) -> list[Array]:
        """Return those rows of a fragment that there are, by the numbers of communicators of the schedule."""
        return [self._named(facts, rows) for rows in (facts.sides, facts.exchanges, facts.collectives) if len(rows)]

    def _named(self, facts: _Facts, rows: Array) -> Array:
        placed = rows.copy()
        placed["communicator"] = np.array([self._numbers[name] for name in facts.communicators])[rows["communicator"]]
        if rows.dtype == _COLLECTIVE:
            placed["kind"] = np.array([self._kinds.number(type(op), op) for op in facts.kinds])[rows["kind"]]
        return placed

    def _set_transfers(self, sides: Array, into: Lowered) -> None:
        """Let the n-th that a rank sends to another over a communicator meet the n-th that this takes from it."""
        ranks = into.op_rank[sides["op"]]

        def ordered(receives: int) -> tuple[Array, Array]:
            some = sides[sides["receives"] == receives]
            own, peers = ranks[sides["receives"] == receives], some["peer"]
            source, target = (peers, own) if receives else (own, peers)
            order = np.lexsort((some["op"], target, source, some["communicator"]))
            return some[order], np.stack([source, target], axis=1)[order]

        (sent, pairs), (taken, met) = ordered(0), ordered(1)
        assert np.array_equal(pairs, met)
        assert np.array_equal(sent["nbytes"], taken["nbytes"])
        self.transfers = np.zeros(len(sent), TRANSFER)
        self.transfers["source"], self.transfers["target"] = sent["op"], taken["op"]
        of_op = np.concatenate([sent["op"], taken["op"]])
        order = np.argsort(of_op, kind="stable")  # an op's sends, then its receives
        self.transfers_of = (np.arange(len(of_op)) % max(len(sent), 1))[order].astype(INT)
        ends = np.cumsum(np.bincount(of_op, minlength=into.num_ops), dtype=INT)
        into.ops["transfers_end"], into.ops["transfers"][1:] = ends, ends[:-1]
        numbers = self._group_of[sent["communicator"], pairs[:, 0]] if len(sent) else np.zeros(0, np.int64)
        distinct, self.transfer_message = _distinct(pairs[:, 0], pairs[:, 1], sent["nbytes"], numbers)
        self.messages = [
            MessageKey(source, target, nbytes, self._groups[number]) for source, target, nbytes, number in distinct
        ]

    def _find_group_of(self, ranks: int) -> Array:
        """Return the number of each rank's group, by communicator; -1 where it is in none."""
        found = np.full((len(self._communicators), ranks), -1, np.int64)
        numbers = count()
        for row, communicator in zip(found, self._communicators, strict=True):
            for group in communicator.groups:
                row[list(group)] = next(numbers)
        return found

    def _set_exchanges(self, exchanges: Array, into: Lowered) -> None:
        """Set which Exchanges hold the same compute units."""
        found = self._group_of[exchanges["communicator"], into.op_rank[exchanges["op"]]] if len(exchanges) else []
        distinct, which = _distinct(np.array(found, np.int64), exchanges["peers"], exchanges["nbytes"])
        self.op_exchange = np.full(into.num_ops, -1, INT)
        self.op_exchange[exchanges["op"]] = which
        self.exchanges = [ExchangeKey(self._groups[group], *rest) for group, *rest in distinct]

    def _set_groups(self, collectives: Array, into: Lowered) -> None:
        """Let the n-th collectives of all members of a group be one."""
        calls = Distinct()
        members, sizes, group_call = [], [], []
        ranks = into.op_rank[collectives["op"]]
        for number, communicator in enumerate(self._communicators):
            own = collectives["communicator"] == number
            for group in sorted(communicator.groups):
                rows = [collectives[own & (ranks == rank)] for rank in group]
                if not len(rows[0]):
                    continue
                ops_of = np.stack([row["op"] for row in rows], axis=1)
                nbytes = np.stack([row["nbytes"] for row in rows], axis=1).max(axis=1)
                members.append(ops_of.reshape(-1))
                sizes.append(np.full(len(ops_of), len(group)))
                kinds = [self._kinds.found[kind] for kind in rows[0]["kind"].tolist()]
                whole = whole_group(self._schedule, communicator.name, group)
                keys = [CollectiveKey(type(op), whole, size) for op, size in zip(kinds, nbytes.tolist(), strict=True)]
                group_call += [calls.number(key, (key, op)) for key, op in zip(keys, kinds, strict=True)]
        self.members, counts = together(members), together(sizes)
        self.groups = np.zeros(len(counts), GROUP)
        self.groups["members_end"] = np.cumsum(counts)
        self.groups["members"] = self.groups["members_end"] - counts
        into.ops["group"] = -1
        into.ops["group"][self.members] = np.repeat(np.arange(len(counts)), counts)
        self.group_call = np.array(group_call, INT)
        self.calls: list[tuple[CollectiveKey, ops.Collective]] = calls.found


def _placed(found: Sequence[Array], begins: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return rows of fragments one behind the other, their ops counted from where each fragment begins."""
    placed = together(found, dtype)
    placed["op"] += np.repeat(np.array(begins, INT), [len(some) for some in found])
    return placed


def _distinct(*columns: Array) -> tuple[list[tuple[int, ...]], Array]:
    """Return which rows there are, in their order, and of each row which of them it is. Rows are sorted as one number
    each: numpy compares rows byte by byte.
    """
    values, codes = zip(*(np.unique(column, return_inverse=True) for column in columns), strict=True)
    sizes = [max(len(some), 1) for some in values]
    if math.prod(sizes) > np.iinfo(np.int64).max:
        rows, which = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
        return [tuple(row) for row in rows.tolist()], which.reshape(-1)
    numbers, which = np.unique(np.ravel_multi_index(codes, sizes), return_inverse=True)
    found = (some[of].tolist() for some, of in zip(values, np.unravel_index(numbers, sizes), strict=True))
    return list(zip(*found, strict=True)), which


def kind_of(op: ops.Op) -> int:
    """Return the kind of an op in the arrays."""
    if isinstance(op, ops.Kernel):
        return KERNEL
    if isinstance(op, ops.Exchange):
        return EXCHANGE
    if isinstance(op, ops.Collective):
        return COLLECTIVE
    if isinstance(op, ops.HostCopy):
        return HOST_COPY
    if isinstance(op, ops.HostAdamW):
        return HOST_KERNEL
    if isinstance(op, ops.HostSync):
        return HOST_SYNC
    assert_never(op)


def issue_key(op: ops.Op, use: KernelUse | None) -> Hashable:
    """Return what the cost of issuing an op depends on."""
    if use:
        return use.kernel, use.into_slice, use.loop
    if isinstance(op, ops.Exchange):
        return type(op), op.num_messages
    if isinstance(op, ops.HostSync):
        return type(op), op.calls
    return type(op), op.stream if isinstance(op, ops.HostCopy) else ""


def largest_message(op: ops.Exchange, nbytes: Iterable[int]) -> tuple[int, int]:
    """Return how many peers an Exchange has, in the direction with more, and the bytes of its largest message, of those
    of all.

    What it sends to one and takes from another is on the same channels.
    """
    peers = max(len({peer for peer, _ in messages}) for messages in (op.sends, op.recvs))
    return peers, max(nbytes, default=0)


def part_bytes(programs: Sequence[Program], members: tuple[Key, ...]) -> int:
    """Return the bytes of one part of a collective (of AllReduce the whole). Where parts differ it is the largest, at
    whose pace a ring goes; of direct sends that is an upper bound.
    """
    largest = 0
    for rank, index in members:
        op = programs[rank].ops[index]
        assert isinstance(op, ops.Collective)
        largest = max(largest, largest_part(op, programs[rank]))
    return largest


def largest_part(op: ops.Collective, program: Program) -> int:
    """Return the bytes of the largest part that one member gives."""
    if not op.given:
        return 0
    alike = not any(isinstance(side, Split) and side.sizes for side in (op.given, op.taken))
    count = 1 if alike or not isinstance(op.given, Split) else op.given.parts
    return max(program.nbytes(part_of(op.given, member)) for member in range(count))
