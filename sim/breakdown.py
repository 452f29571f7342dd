"""Where a rank's step went, per instant by priority; the parts sum to the step. For simulated and measured traces."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from sim.kept import kept
from sim.schedule.ir.ops import KINDS, Activity
from sim.trace import Ops, Times, Trace

PartName = Activity | Literal["idle"]
PARTS: tuple[PartName, ...] = (*get_args(Activity), "idle")
"""In order of priority: kernels; else copies; else transfers under way; else waiting for a peer; else nothing."""
_IDLE = PARTS.index("idle")

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
_ONE: dict[PartName, int] = {part: 1 << 15 * number for number, part in enumerate(PARTS) if part != "idle"}
"""One op at a part, in a number that counts them for all parts, 15 bits each: a rank has fewer streams."""
_SOME = {part: one * ((1 << 15) - 1) for part, one in _ONE.items()}


class _Spent(NamedTuple):
    """Seconds of all ranks of a trace."""

    parts: Times
    """(ranks, parts)."""
    overlapped: Times
    """(ranks,): computing and communicating at once."""


def breakdown(trace: Trace, rank: int) -> dict[PartName, float]:
    """Return the seconds of each part for one rank; they sum to the step time of the trace."""
    return dict(zip(PARTS, _spent(trace).parts[rank].tolist(), strict=True))


def kernels_s(trace: Trace) -> Times:
    """Return the seconds in which each rank runs kernels: (ranks,)."""
    return _spent(trace).parts[:, PARTS.index("compute")]


def attention_s(trace: Trace) -> Times:
    """Return the seconds that the attention kernels of each rank take: (ranks,)."""
    is_attention = np.array([KINDS[kind].meta.family == "attention" for kind in trace.ops.kinds], bool)
    busy_s = np.where(is_attention, trace.ended_s - trace.begun_s, 0.0)
    return np.array([busy_s[first:last].sum() for first, last in pairwise(trace.ops.starts)])


def overlapped_s(trace: Trace, rank: int) -> float:
    """Return the seconds in which one rank both computes and communicates."""
    return float(_spent(trace).overlapped[rank])


def waiting_s(parts: dict[PartName, float]) -> float:
    """Return the seconds in which a rank could not go on."""
    return parts["synchronisation"] + parts["idle"]


def critical_rank(trace: Trace) -> int:
    """Return the critical rank: the one that waits least, and that others wait for (the lowest of equals)."""
    return min(range(trace.num_ranks), key=lambda rank: (waiting_s(breakdown(trace, rank)), rank))


class _Edges(NamedTuple):
    """When what goes on may change, whatever the times: at the start, and where an op is posted, begins or ends.

    All edges of a rank follow each other, those of a stream in its order, so that their times are nearly sorted.
    """

    bounds: list[int]
    """(ranks + 1,): where the edges of each rank begin, and where the last ones end."""
    columns: Integers
    """(edges,): which of the times posted, begun and ended of all ops, one behind the other, and 0 behind those."""
    changes: Integers
    """(edges,): by what the number of ops at each part changes."""


@kept
def _edges(ops: Ops) -> _Edges:
    count, numbers = len(ops.kinds), {name: number for number, name in enumerate(dict.fromkeys(ops.streams))}
    ranks = np.repeat(np.arange(len(ops.starts) - 1), np.diff(ops.starts))
    streams = np.array([numbers[name] for name in ops.streams], np.int64)
    order = np.lexsort((streams, ranks))
    one = {kind: _ONE[KINDS[kind].meta.activity] for kind in set(ops.kinds)}
    at_work = np.array([one[kind] for kind in ops.kinds], np.int64)[order]
    waiting = np.full(count, _ONE["synchronisation"])  # when posted; what only waits does so to its end
    changes = np.stack([waiting, at_work - waiting, -at_work], axis=1)
    columns = order[:, np.newaxis] + np.array([0, count, 2 * count])
    some = changes != 0
    before = np.append(0, np.cumsum(some.sum(axis=1)))[ops.starts]
    return _Edges(
        (before + np.arange(len(before))).tolist(),
        np.insert(columns[some], before[:-1], 3 * count),
        np.insert(changes[some], before[:-1], 0),
    )


@kept
def _spent(trace: Trace) -> _Spent:
    """Return the parts of all ranks. Seconds are added one by one in the order of time, and an op that takes none
    divides no span of others: so the sums are, to the bit, those of a walk from edge to edge.
    """
    bounds, columns, changes = _edges(trace.ops)
    some = trace.ended_s > trace.posted_s
    times = [np.where(some, column, 0.0) for column in (trace.posted_s, trace.begun_s, trace.ended_s)]
    at = np.concatenate([*times, [0.0]])[columns]
    order = np.concatenate([start + at[start:stop].argsort(kind="stable") for start, stop in pairwise(bounds)])
    at, going = at[order], np.cumsum(changes[order])  # a rank leaves nothing going to the next one
    until = np.append(at[1:], 0.0)
    until[np.array(bounds[1:]) - 1] = trace.step_time_s
    part = np.full(len(at), PARTS.index("idle"))
    for name in reversed(_SOME):
        part[going & _SOME[name] != 0] = PARTS.index(name)
    rank = np.repeat(np.arange(trace.num_ranks), np.diff(bounds))
    both = (going & _SOME["compute"] != 0) & (going & _SOME["communication"] != 0)
    parts, overlapped = np.zeros(trace.num_ranks * len(PARTS)), np.zeros(trace.num_ranks)
    np.add.at(parts, rank * len(PARTS) + part, until - at)
    np.add.at(overlapped, rank[both], (until - at)[both])
    return _Spent(parts.reshape(-1, len(PARTS)), overlapped)
