"""Where a rank's step went, per instant by priority; the parts sum to the step. For simulated and measured traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from sim.schedule.ir.ops import KINDS, Activity
from sim.trace import Row, Trace

PartName = Activity | Literal["idle"]
PARTS: tuple[PartName, ...] = (*get_args(Activity), "idle")
"""In order of priority: kernels; else copies; else transfers under way; else waiting for a peer; else nothing."""


def breakdown(trace: Trace, rank: int) -> dict[PartName, float]:
    """Return the seconds of each part for one rank; they sum to the step time of the trace."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for duration_s, going in _moments(trace, rank):
        seconds[next((part for part in PARTS if part in going), "idle")] += duration_s
    return seconds


def overlapped_s(trace: Trace, rank: int) -> float:
    """Return the seconds in which one rank both computes and communicates."""
    return sum(duration_s for duration_s, going in _moments(trace, rank) if {"compute", "communication"} <= going)


def _moments(trace: Trace, rank: int) -> Iterator[tuple[float, set[PartName]]]:
    """Yield how long what is going on, from the beginning of a trace to its end."""
    edges: list[tuple[float, int, int]] = []
    for row in trace.of_rank(rank):
        for begin, end, part in _intervals(row):
            if end > begin:
                edges.append((begin, PARTS.index(part), 1))
                edges.append((end, PARTS.index(part), -1))
    edges.sort()
    active = [0] * len(PARTS)
    at = 0.0
    for time, number, change in edges:
        if time > at:
            yield time - at, {part for part, count in zip(PARTS, active, strict=True) if count}
        at = time
        active[number] += change
    yield trace.step_time_s - at, set()


def waiting_s(parts: dict[PartName, float]) -> float:
    """Return the seconds in which a rank could not go on."""
    return parts["synchronisation"] + parts["idle"]


def critical_rank(trace: Trace) -> int:
    """Return the critical rank: the one that waits least, and that others wait for (the lowest of equals)."""
    return min(range(trace.num_ranks), key=lambda rank: (waiting_s(breakdown(trace, rank)), rank))


def _intervals(row: Row) -> list[tuple[float, float, PartName]]:
    """Return when a row was at work, and when it waited for peers."""
    part = KINDS[row.kind].meta.activity
    if part == "synchronisation":
        return [(row.posted_s, row.end_s, part)]
    return [(row.begin_s, row.end_s, part), (row.posted_s, row.begin_s, "synchronisation")]
