"""What a player did: when every op was posted, began and ended. Both players fill the same columns."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, repeat
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from sim.base.files import Kind
from sim.base.kept import kept
from sim.schedule.ir.fragments import Call, Fragment
from sim.schedule.ir.ops import Communication, Part
from sim.schedule.ir.program import Program, Schedule

Player = Literal["simulated", "executed"]
Times: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
_TAIL_BYTES = 4096
"""At the end of a Chrome trace, in which what it says of its schedules lies."""


class Row(NamedTuple):
    """One op of one rank."""

    rank: int
    op: int
    """Number of the op in its rank's program: the key on which two traces are joined."""
    stream: str
    kind: str
    part: Part
    label: str
    posted_s: float
    """When the op was at the head of its stream with all that it waits for ended."""
    begin_s: float
    """When it began to work; a group op begins when its last member has posted."""
    end_s: float
    ran: str = ""
    """Which implementation ran, where the player knows."""
    sent_bytes: int = 0
    """Of communication: bytes of all that it gave to the network, the part for its own rank included."""

    @property
    def busy_s(self) -> float:
        """Time at work, without the wait for peers."""
        return self.end_s - self.begin_s


class _Kinds(NamedTuple):
    """What the ops of a fragment are, whoever calls it."""

    streams: list[str]
    kinds: list[str]
    parts: list[Part]


@kept
def _of_fragment(fragment: Fragment) -> _Kinds:
    ops = fragment.ops
    return _Kinds([op.stream for op in ops], [type(op).__name__ for op in ops], [op.part for op in ops])


@kept
def _sent_by(fragment: Fragment) -> list[int]:
    nbytes = Program.of_fragment(fragment, rank=0).nbytes
    return [sum(map(nbytes, op.reads)) if isinstance(op, Communication) else 0 for op in fragment.ops]


class Ops:
    """What the ops of a schedule are: columns over all ranks in turn, each in the order of its program.

    A column is made when it is first read.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = programs

    @cached_property
    def starts(self) -> list[int]:
        """Where each rank begins, and where the last one ends."""
        return [0, *accumulate(program.num_ops for program in self._programs)]

    @cached_property
    def streams(self) -> list[str]:
        """The stream of each op."""
        return [stream for call in self._calls for stream in _of_fragment(call.fragment.shared).streams]

    @cached_property
    def kinds(self) -> list[str]:
        """The name of each op's kind."""
        return [kind for call in self._calls for kind in _of_fragment(call.fragment.shared).kinds]

    @cached_property
    def parts(self) -> list[Part]:
        """The pass of each op."""
        return [part for call in self._calls for part in _of_fragment(call.fragment.shared).parts]

    @cached_property
    def labels(self) -> list[str]:
        """The name of each op for people."""
        return [label for call in self._calls for label in call.labels]

    @cached_property
    def sent_bytes(self) -> list[int]:
        """Bytes that each op gives to the network."""
        return [nbytes for call in self._calls for nbytes in _sent_by(call.fragment.shared)]

    @property
    def _calls(self) -> Iterator[Call]:
        return (call for program in self._programs for call in program.calls)

    def __getstate__(self) -> dict[str, list[Any]]:
        """Return all columns: a pickle is of them, not of the programs."""
        return {name: getattr(self, name) for name, at in vars(Ops).items() if isinstance(at, cached_property)}


@kept
def ops_of(schedule: Schedule) -> Ops:
    """Return what the ops of a schedule are; the same columns for all of its traces."""
    return Ops(schedule.programs)


class Recorded(NamedTuple):
    """What a trace knows of its schedule where that is not at hand."""

    hash: str
    ops: Ops


class Trace:
    """When every op of one step was posted, began and ended: columns beside the schedule, in the order of ``Ops``."""

    def __init__(
        self,
        player: Player,
        schedule: Schedule | Recorded,
        posted_s: Times,
        begun_s: Times,
        ended_s: Times,
        ran: Sequence[str] = (),
        numbers: Sequence[int] = (),
    ) -> None:
        self.player: Player = player
        self.posted_s, self.begun_s, self.ended_s = posted_s, begun_s, ended_s
        """(ops,), in seconds since the step began; what they mean, and ``ran``, is said at ``Row``."""
        self.ran = ran
        """Empty where the player does not know."""
        self._schedule = schedule
        self._numbers = numbers

    @cached_property
    def ops(self) -> Ops:
        """What the ops are."""
        return self._schedule.ops if isinstance(self._schedule, Recorded) else ops_of(self._schedule)

    @property
    def schedule_hash(self) -> str:
        """The hash of the schedule, which is computed when it is first asked for."""
        return self._schedule.hash

    @property
    def num_ranks(self) -> int:
        """P, the number of ranks."""
        return len(self.ops.starts) - 1

    @property
    def numbers(self) -> Sequence[int]:
        """What its ranks are called in a schedule of which only some were played."""
        return self._numbers or range(self.num_ranks)

    @property
    def step_time_s(self) -> float:
        """Time from the common start to the end of the last op of any rank."""
        return float(self.ended_s.max(initial=0.0))

    @cached_property
    def rows(self) -> list[Row]:
        """All ops, by rank and number; made when first read."""
        ops, count = self.ops, len(self.ended_s)
        numbers = [(rank, op) for rank, (a, b) in enumerate(pairwise(ops.starts)) for op in range(b - a)]
        columns = (ops.streams, ops.kinds, ops.parts, ops.labels)
        times = (column.tolist() for column in (self.posted_s, self.begun_s, self.ended_s))
        others = (self.ran or repeat("", count), ops.sent_bytes)
        return [Row(*number, *of_op) for number, *of_op in zip(numbers, *columns, *times, *others, strict=True)]

    def of_rank(self, rank: int) -> list[Row]:
        """Return the rows of one rank in the order of its program."""
        return self.rows[slice(*self.ops.starts[rank : rank + 2])]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the schedule, which may be built by what no pickle can hold."""
        of = Recorded(self.schedule_hash, self.ops)
        return Trace, (self.player, of, self.posted_s, self.begun_s, self.ended_s, self.ran, self._numbers)


class Counter(NamedTuple):
    """Bytes in use on one rank from a moment on."""

    rank: int
    at_s: float
    nbytes: dict[str, int]
    """By what they are of; viewers stack these."""
    name: str = "memory"


def to_chrome(traces: list[Trace], counters: dict[Player, list[Counter]] | None = None) -> bytes:
    """Return a Chrome trace (JSON) with every trace side by side: one process per player and rank, one row per stream.

    Perfetto and chrome://tracing open it. ``counters`` adds memory in use, per player.
    """
    events: list[dict[str, Any]] = []
    for number, trace in enumerate(traces):
        streams = sorted({row.stream for row in trace.rows}, key=lambda name: (name != "compute", name))
        for rank in range(trace.num_ranks):
            pid = rank * len(traces) + number
            events.append(_meta("process_name", pid, 0, name=f"rank {trace.numbers[rank]} {trace.player}"))
            events.append(_meta("process_sort_index", pid, 0, sort_index=pid))
            events += [_meta("thread_name", pid, tid, name=stream) for tid, stream in enumerate(streams)]
        for row in trace.rows:
            events.append(
                {
                    "ph": "X",
                    "name": row.label,
                    "cat": row.kind,
                    "pid": row.rank * len(traces) + number,
                    "tid": streams.index(row.stream),
                    "ts": row.begin_s * 1e6,
                    "dur": row.busy_s * 1e6,
                    "args": {"player": trace.player, **row._asdict()},
                }
            )
        for counter in (counters or {}).get(trace.player, []):
            events.append(
                {
                    "ph": "C",
                    "name": counter.name,
                    "pid": counter.rank * len(traces) + number,
                    "ts": counter.at_s * 1e6,
                    "args": counter.nbytes,
                }
            )
    other = [{"player": t.player, "schedule_hash": t.schedule_hash, "num_ranks": t.num_ranks} for t in traces]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"traces": other}})


def _meta(kind: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _is_chrome_trace(file: BinaryIO) -> bool:
    """Return whether a trace ends with what ``to_chrome`` says of its schedules."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
    return re.search(rb'"otherData":\{"traces":\[\{"player":"\w+","schedule_hash":"\w+",', file.read()) is not None


CHROME_TRACE = Kind("a Chrome trace", _is_chrome_trace)
