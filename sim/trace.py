"""What a player did: one row per op, in seconds since the step began. Both players write the same rows."""

from __future__ import annotations

import os
import re
from functools import cached_property
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from sim.files import Kind
from sim.schedule.ir.ops import Part

Player = Literal["simulated", "executed"]
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


class Trace(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All rows of one step, by rank and op."""

    player: Player
    schedule_hash: str
    num_ranks: int
    rows: list[Row]

    @property
    def step_time_s(self) -> float:
        """Time from the common start to the end of the last op of any rank."""
        return max((row.end_s for row in self.rows), default=0.0)

    def of_rank(self, rank: int) -> list[Row]:
        """Return the rows of one rank in the order of its program."""
        return self._by_rank[rank]

    @cached_property
    def _by_rank(self) -> list[list[Row]]:
        found: list[list[Row]] = [[] for _ in range(self.num_ranks)]
        for row in self.rows:
            found[row.rank].append(row)
        return found


class Counter(NamedTuple):
    """Bytes in use on one rank from a moment on."""

    rank: int
    at_s: float
    nbytes: int


def to_chrome(traces: list[Trace], counters: dict[Player, list[Counter]] | None = None) -> bytes:
    """Return a Chrome trace (JSON) with every trace side by side: one process per player and rank, one row per stream.

    Perfetto and chrome://tracing open it. ``counters`` adds memory in use, per player.
    """
    events: list[dict[str, Any]] = []
    for number, trace in enumerate(traces):
        streams = sorted({row.stream for row in trace.rows}, key=lambda name: (name != "compute", name))
        for rank in range(trace.num_ranks):
            pid = rank * len(traces) + number
            events.append(_meta("process_name", pid, 0, name=f"rank {rank} {trace.player}"))
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
                    "name": "memory",
                    "pid": counter.rank * len(traces) + number,
                    "ts": counter.at_s * 1e6,
                    "args": {"bytes": counter.nbytes},
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
