"""Where a rank's step went, per instant by priority; the parts sum to the step. For simulated and measured traces."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from sim.accounts.trace import Ops, Times, Trace
from sim.base.kept import kept
from sim.schedule.ir.ops import KINDS, Activity

PartName = Activity | Literal["idle"]
PARTS: tuple[PartName, ...] = (*get_args(Activity), "idle")
"""In order of priority: kernels; else copies; else transfers under way; else waiting for a peer; else nothing."""
_IDLE = PARTS.index("idle")

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
_ONE: dict[PartName, int] = {part: 1 << 15 * number for number, part in enumerate(PARTS) if part != "idle"}
"""One op at a part, in a number that counts them for all parts, 15 bits each: a rank has fewer streams."""
_SOME = {part: one * ((1 << 15) - 1) for part, one in _ONE.items()}
_AT = np.array([*_ONE.values()])
_CHANGES = np.concatenate([[_ONE["synchronisation"]], _AT - _ONE["synchronisation"], -_AT, [0]])
"""What an edge may change that number by: when an op is posted, begins, and ends, at each part; the start of a rank."""
_START = len(_CHANGES) - 1


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


_MOST = 1 << 17
"""Edges of a block of ranks: so many that what is made of them stays in a processor's cache."""


class _Edges(NamedTuple):
    """When what goes on may change, whatever the times: at the start, and where an op is posted, begins or ends.

    All edges of a rank follow each other, those of a stream in its order, so that their times are nearly sorted. Those
    of some ranks are a block.
    """

    first: int
    """The number of the first rank."""
    ops: slice
    """Those of these ranks."""
    bounds: list[int]
    """(ranks + 1,): where the edges of each rank begin, and where the last ones end."""
    columns: NDArray[np.int32]
    """(edges,): which of the times posted, begun and ended of these ops, one behind the other, and 0 behind those."""
    changes: NDArray[np.int8]
    """(edges,): by which of ``_CHANGES`` the number of ops at each part changes."""


@kept
def _edges(ops: Ops) -> list[_Edges]:
    """Return the edges of all ranks in blocks, of one rank at least."""
    names = {name: number for number, name in enumerate(dict.fromkeys(ops.streams))}
    parts = {kind: [*_ONE].index(KINDS[kind].meta.activity) for kind in set(ops.kinds)}
    found, first = [], 0
    while first < len(ops.starts) - 1:
        last = max(first + 1, bisect_right(ops.starts, ops.starts[first] + _MOST // 3) - 1)
        begin, end = ops.starts[first], ops.starts[last]
        streams = np.array([names[name] for name in ops.streams[begin:end]], np.int64)
        at_work = np.array([parts[kind] for kind in ops.kinds[begin:end]], np.int8)
        starts = np.array(ops.starts[first : last + 1]) - begin
        found.append(_Edges(first, slice(begin, end), *_of_block(streams, at_work, starts)))
        first = last
    return found


def _of_block(
    streams: Integers, at_work: NDArray[np.int8], starts: Integers
) -> tuple[list[int], NDArray[np.int32], NDArray[np.int8]]:
    """Return bounds, columns and changes of ranks whose ops begin there, and are at these parts when they work."""
    count = len(streams)
    ranks = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    order = np.lexsort((streams, ranks))
    at_work = at_work[order]
    changes = np.stack([np.zeros_like(at_work), 1 + at_work, 1 + len(_ONE) + at_work], axis=1)
    columns = (order[:, np.newaxis] + np.array([0, count, 2 * count])).astype(np.int32)
    some = _CHANGES[changes] != 0  # what only waits does so to its end
    before = np.append(0, np.cumsum(some.sum(axis=1)))[starts]
    return (
        (before + np.arange(len(before))).tolist(),
        np.insert(columns[some], before[:-1], 3 * count),
        np.insert(changes[some], before[:-1], _START),
    )


@kept
def _spent(trace: Trace) -> _Spent:
    """Return the parts of all ranks. Seconds are added one by one in the order of time, and an op that takes none
    divides no span of others: so the sums are, to the bit, those of a walk from edge to edge.
    """
    blocks = [_of_edges(trace, edges) for edges in _edges(trace.ops)]
    none = _Spent(np.zeros((0, len(PARTS))), np.zeros(0))
    return _Spent(*map(np.concatenate, zip(none, *blocks, strict=True)))


def _of_edges(trace: Trace, edges: _Edges) -> _Spent:
    """Return the parts of the ranks of a block."""
    _, ops, bounds, columns, changes = edges
    posted_s, begun_s, ended_s = (column[ops] for column in (trace.posted_s, trace.begun_s, trace.ended_s))
    some = ended_s > posted_s
    times = [np.where(some, column, 0.0) for column in (posted_s, begun_s, ended_s)]
    at = np.concatenate([*times, [0.0]])[columns]
    order = np.concatenate([start + at[start:stop].argsort(kind="stable") for start, stop in pairwise(bounds)])
    at, going = at[order], np.cumsum(_CHANGES[changes[order]])  # a rank leaves nothing going to the next one
    until = np.append(at[1:], 0.0)
    until[np.array(bounds[1:]) - 1] = trace.step_time_s
    part = np.full(len(at), PARTS.index("idle"))
    for name in reversed(_SOME):
        part[going & _SOME[name] != 0] = PARTS.index(name)
    count = len(bounds) - 1
    rank = np.repeat(np.arange(count), np.diff(bounds))
    both = (going & _SOME["compute"] != 0) & (going & _SOME["communication"] != 0)
    parts, overlapped = np.zeros(count * len(PARTS)), np.zeros(count)
    np.add.at(parts, rank * len(PARTS) + part, until - at)
    np.add.at(overlapped, rank[both], (until - at)[both])
    return _Spent(parts.reshape(-1, len(PARTS)), overlapped)
