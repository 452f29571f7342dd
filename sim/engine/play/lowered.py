"""A checked schedule as arrays that know no machine: lowered once, played on as many machines as are wanted.

Ops of all ranks are numbered through, rank by rank in the order of their programs. What ops cost is asked for by what
is distinct among them: kernel uses, copies, messages, collectives, kinds of issue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.base.errors import InputError
from sim.base.kept import kept
from sim.engine.play.facts import COLLECTIVE, EXCHANGE, HOST_COPY, INT, Array, Distinct, facts_of
from sim.engine.play.met import Met
from sim.schedule.derive.replicas import among
from sim.schedule.ir import ops
from sim.schedule.ir.columns import together
from sim.schedule.ir.fragments import Fragment
from sim.schedule.ir.program import Program
from sim.schedule.proof.check import Checked

_OP_COLUMNS = (
    "stream", "kind", "issue", "behind", "group", "waits", "waits_end", "transfers", "transfers_end",
)  # fmt: skip
OP = np.dtype([(name, INT) for name in _OP_COLUMNS])
"""``behind`` is the last kernel before an op of communication, which waits for it on CUDA; -1 where there is none."""
STREAM = np.dtype([(name, INT) for name in ("ops", "ops_end", "rank", "own")])
PROGRAM = np.dtype([("ops", INT), ("ops_end", INT), ("compute_stream", INT)])


class Times(NamedTuple):
    """Per op of all ranks, in seconds; -1 for what never happened."""

    posted: NDArray[np.float64]
    begun: NDArray[np.float64]
    ended: NDArray[np.float64]
    granted: NDArray[np.float64]
    """When it had the compute units that it holds: as posted, or after others have let go of them."""


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
        self._lower_programs(programs, partial(among, checked.schedule))
        self._lower_dependencies(checked)
        met = Met(checked.schedule, self.first, self.op_rank, self.ops)
        self.transfers, self.transfers_of, self.transfer_message = met.transfers, met.transfers_of, met.transfer_message
        self.messages = met.messages
        self.op_exchange, self.exchanges = met.op_exchange, met.exchanges
        self.groups, self.members, self.group_call, self.calls = met.groups, met.members, met.group_call, met.calls

    @property
    def num_ops(self) -> int:
        """Ops of all ranks."""
        return self.first[-1]

    def _lower_programs(self, programs: Sequence[Program], meets: Callable[[ops.Op], int]) -> None:
        """Set what follows from each rank's program alone, rank by rank, since arrays of all are large. ``meets`` says
        how many ranks an op is among.
        """
        self.op_use, self.op_copy, self.stream_ops = (np.empty(self.num_ops, INT) for _ in range(3))
        names: list[list[str]] = []
        before = [0]
        known: dict[tuple[Fragment, ...], int] = {}  # by what stands for the fragments of a rank, the first such one
        for rank, (program, (begin, end)) in enumerate(zip(programs, pairwise(self.first), strict=True)):
            fragments = [call.fragment for call in program.calls]
            alike = known.setdefault(tuple([one.shared for one in fragments]), rank)
            if alike < rank and not any(facts_of(one.shared).copies for one in dict.fromkeys(fragments)):
                names.append(names[alike])
                self._lower_alike(alike, begin, before[-1] - before[alike])
                before.append(before[-1] + len(names[-1]))
                continue
            names.append(list(dict.fromkeys(name for one in fragments for name in facts_of(one.shared).streams)))
            numbered = {one: self._numbered(program.rank, one, names[-1], meets) for one in dict.fromkeys(fragments)}
            found, own = [numbered[one] for one in fragments], self.ops[begin:end]
            own["kind"] = together([facts_of(one.shared).kind for one in fragments])
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

    def _lower_alike(self, alike: int, begin: int, streams: int) -> None:
        """Set the same of a rank that does what an earlier one does, and has no copies, which are numbered by rank; its
        ops begin there, and its streams are so many later.
        """
        first, last = self.first[alike : alike + 2]
        here, there = slice(first, last), slice(begin, begin + last - first)
        for name in ("kind", "issue"):
            self.ops[name][there] = self.ops[name][here]
        self.ops["stream"][there] = self.ops["stream"][here] + streams
        self.op_use[there], self.op_copy[there] = self.op_use[here], self.op_copy[here]
        self.stream_ops[there] = self.stream_ops[here] + (begin - first)

    def _numbered(self, rank: int, fragment: Fragment, streams: list[str], meets: Callable[[ops.Op], int]) -> _Numbered:
        """Return what is distinct in a fragment by the numbers that it has here; ``streams`` are those of the rank."""
        facts, alone = facts_of(fragment.shared), Program.of_fragment(fragment, rank)
        issues = [self.issues.number(key, (op, use, meets(op))) for key, (op, use) in facts.issues]
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


class _Numbered(NamedTuple):
    """Numbers per op of a fragment, or -1."""

    stream: Array
    """Among those of the rank."""
    issue: Array
    use: Array
    """Of the kernel use, -1 for others."""
    copy: Array
    """Of the copy between a GPU and its host, or of the kernel of that; -1 for others."""
