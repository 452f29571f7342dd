"""A checked schedule as arrays that know no machine: lowered once, played on as many machines as are wanted.

Ops of all ranks are numbered through, rank by rank in the order of their programs. What ops cost is asked for by what
is distinct among them: kernel uses, copies, messages, collectives, kinds of issue.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kept import kept
from sim.schedule.derive.kernels import KernelUse
from sim.schedule.derive.matching import Group, Key, Transfer
from sim.schedule.ir import ops
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.views import Split, part_of
from sim.schedule.proof.check import Checked

KERNEL, HOST_SYNC, EXCHANGE, COLLECTIVE, HOST_COPY = range(5)
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
Stretch: TypeAlias = NDArray[np.float64] | None
"""Per op by how much it takes longer, if it is a kernel; None: none does."""


class Times(NamedTuple):
    """Per op of all ranks, in seconds; -1 for what never happened."""

    posted: NDArray[np.float64]
    begun: NDArray[np.float64]
    ended: NDArray[np.float64]


class MessageKey(NamedTuple):
    """What a transfer's cost depends on."""

    source: int
    target: int
    nbytes: int
    group: int
    """How many ranks its communicator has."""


class CollectiveKey(NamedTuple):
    """What a collective's cost depends on, beside an op of its kind."""

    kind: type[ops.Collective]
    ranks: tuple[int, ...]
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
        schedule = checked.schedule
        programs = schedule.programs
        counts = [len(program.ops) for program in programs]
        if sum(counts) + len(checked.matching.transfers) > np.iinfo(INT).max:
            raise InputError(f"schedule {schedule.header.name!r} has {sum(counts)} ops, more than an engine can number")
        self.first: list[int] = [0, *np.cumsum(counts).tolist()]
        """The number of each rank's first op, and that of all ops."""
        self.uses, self.copies, self.issues = Distinct(), Distinct(), Distinct()
        self._lower_programs(checked)
        self._lower_matching(checked)

    @property
    def num_ops(self) -> int:
        """Ops of all ranks."""
        return self.first[-1]

    def _lower_programs(self, checked: Checked) -> None:
        """Set what follows from each rank's program alone."""
        parts = [_RankColumns(program, checked, self) for program in checked.schedule.programs]
        self.ops = np.zeros(self.num_ops, OP)
        streams = np.cumsum([0, *(len(part.streams) for part in parts)])
        for name in ("kind", "issue"):
            self.ops[name] = np.concatenate([getattr(part, name) for part in parts])
        self.ops["stream"] = np.concatenate([np.array(p.stream, INT) + s for p, s in zip(parts, streams, strict=False)])
        behind = [np.array(part.behind, INT) for part in parts]
        self.ops["behind"] = np.concatenate(
            [np.where(own >= 0, own + start, -1) for own, start in zip(behind, self.first, strict=False)]
        )
        self.ops["waits"], self.ops["waits_end"], self.waits = _ranges(
            [
                [start + other for other in waits]
                for start, found in zip(self.first, checked.dependencies, strict=False)
                for waits in found.waits
            ]
        )
        self.op_use = np.concatenate([np.array(part.use, INT) for part in parts])
        """Number of the kernel use of each op, -1 for others."""
        self.op_copy = np.concatenate([np.array(part.copy, INT) for part in parts])
        """Number of the copy between a GPU and its host, -1 for others."""
        self.op_rank = np.repeat(np.arange(len(parts), dtype=INT), np.diff(self.first))
        self.stream_ops = np.argsort(self.ops["stream"], kind="stable").astype(INT)
        ends = np.cumsum(np.bincount(self.ops["stream"], minlength=int(streams[-1])))
        self.streams = np.zeros(int(streams[-1]), STREAM)
        self.streams["ops_end"] = ends
        self.streams["ops"][1:] = ends[:-1]
        self.streams["rank"] = np.repeat(np.arange(len(parts)), np.diff(streams))
        self.streams["own"] = [name in {ops.COMPUTE, ops.HOST} for part in parts for name in part.streams]
        self.programs = np.zeros(len(parts), PROGRAM)
        self.programs["ops"], self.programs["ops_end"] = self.first[:-1], self.first[1:]
        self.programs["compute_stream"] = [
            start + part.streams[ops.COMPUTE] if ops.COMPUTE in part.streams else -1
            for start, part in zip(streams.tolist(), parts, strict=False)
        ]

    def _lower_matching(self, checked: Checked) -> None:
        """Set what belongs together on different ranks."""
        schedule, matching = checked.schedule, checked.matching
        messages, calls = Distinct(), Distinct()
        self.transfers = np.zeros(len(matching.transfers), TRANSFER)
        self.transfers["source"] = self._numbers(transfer.source for transfer in matching.transfers)
        self.transfers["target"] = self._numbers(transfer.target for transfer in matching.transfers)
        sizes: dict[tuple[str, int], int] = {}
        self.transfer_message = np.array(
            [messages.number(m, m) for m in (_message(schedule, t, sizes) for t in matching.transfers)], INT
        )
        of_ops: list[Sequence[int]] = [()] * self.num_ops
        for (rank, index), found in matching.transfers_of.items():
            of_ops[self.first[rank] + index] = found
        self.ops["transfers"], self.ops["transfers_end"], self.transfers_of = _ranges(of_ops)
        self.ops["group"] = -1
        members = [[self.first[rank] + index for rank, index in group.members] for group in matching.groups]
        self.groups = np.zeros(len(members), GROUP)
        self.groups["members"], self.groups["members_end"], self.members = _ranges(members)
        self.ops["group"][self.members] = np.repeat(np.arange(len(members)), [len(found) for found in members])
        self.group_call = np.array([calls.number(*_call(schedule, group)) for group in matching.groups], INT)
        self.messages: list[MessageKey] = messages.found
        self.calls: list[tuple[CollectiveKey, ops.Collective]] = calls.found

    def _numbers(self, keys: Iterable[Key]) -> Array:
        return np.array([self.first[rank] + index for rank, index in keys], INT)


@kept
def lowered(checked: Checked) -> Lowered:
    """Return the arrays of a checked schedule; the same on every call."""
    return Lowered(checked)


class _RankColumns:
    """What follows from one rank's program, per op."""

    def __init__(self, program: Program, checked: Checked, into: Lowered) -> None:
        self.kind, self.stream, self.issue, self.behind, self.use, self.copy = ([] for _ in range(6))
        self.streams: dict[str, int] = {}
        last = -1
        for index, (op, use) in enumerate(zip(program.ops, checked.kernels[program.rank], strict=True)):
            kind = kind_of(op)
            self.kind.append(kind)
            self.stream.append(self.streams.setdefault(op.stream, len(self.streams)))
            self.issue.append(into.issues.number(issue_key(op, use), (op, use)))
            self.behind.append(last if kind in {EXCHANGE, COLLECTIVE, HOST_COPY} else -1)
            self.use.append(-1 if use is None else into.uses.number(use, use))
            copy = -1
            if isinstance(op, ops.HostCopy):
                key = (program.rank, op.stream, op.source.shape, program.dtype(op.source), _places(program, op))
                copy = into.copies.number(key, (program, op))
            self.copy.append(copy)
            if op.stream == ops.COMPUTE:
                last = index


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
    if isinstance(op, ops.HostSync):
        return HOST_SYNC
    assert_never(op)


def issue_key(op: ops.Op, use: KernelUse | None) -> Hashable:
    """Return what the cost of issuing an op depends on."""
    return use.kernel if use else (type(op), op.stream if isinstance(op, ops.HostCopy) else "")


def _places(program: Program, op: ops.HostCopy) -> tuple[str, str]:
    return program.buffers[op.source.buffer].place, program.buffers[op.target.buffer].place


def _message(schedule: Schedule, transfer: Transfer, sizes: dict[tuple[str, int], int]) -> MessageKey:
    """Return what a transfer's cost depends on; ``sizes`` keeps those of groups."""
    rank, index = transfer.source
    op = schedule.program(rank).ops[index]
    assert isinstance(op, ops.Exchange)
    key = (op.communicator, rank)
    if key not in sizes:
        sizes[key] = len(schedule.communicator(op.communicator).group_of(rank))
    return MessageKey(rank, transfer.target[0], transfer.nbytes, sizes[key])


def _call(schedule: Schedule, group: Group) -> tuple[CollectiveKey, tuple[CollectiveKey, ops.Collective]]:
    """Return what a collective's cost depends on, and an op of it."""
    rank, index = group.members[0]
    op = schedule.program(rank).ops[index]
    assert isinstance(op, ops.Collective)
    call = CollectiveKey(
        type(op), tuple(member for member, _ in group.members), part_bytes(schedule.programs, group.members)
    )
    return call, (call, op)


def _ranges(lists: Sequence[Sequence[int]]) -> tuple[Array, Array, Array]:
    """Return lists one after the other: where each begins, where it ends, and all of their items."""
    ends = np.cumsum([len(found) for found in lists], dtype=np.int64)
    begins = np.concatenate([[0], ends[:-1]]) if len(lists) else ends
    items = np.fromiter((item for found in lists for item in found), INT, int(ends[-1]) if len(lists) else 0)
    return begins.astype(INT), ends.astype(INT), items


def part_bytes(programs: Sequence[Program], members: tuple[Key, ...]) -> int:
    """Return the bytes of one part of a collective (of AllReduce the whole). Where parts differ it is the largest, at
    whose pace a ring goes; of direct sends that is an upper bound.
    """
    largest = 0
    for rank, index in members:
        op = programs[rank].ops[index]
        assert isinstance(op, ops.Collective)
        alike = not any(isinstance(side, Split) and side.sizes for side in (op.given, op.taken))
        if op.given:
            parts = [part_of(op.given, member) for member in range(1 if alike else len(members))]
            largest = max(largest, *map(programs[rank].nbytes, parts))
    return largest
