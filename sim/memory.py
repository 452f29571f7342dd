"""Memory of a schedule: a function of the program only, walked in the order in which the host issues it.

That is the order in which a caching allocator sees it: a buffer is taken when an op that first touches it is issued,
and freed when the last op that uses it has been issued; if that op runs on another stream, at the first later
kernel that is ordered behind it, or op of that stream where no kernel ever is. Inputs and outputs belong to the caller
and stay.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sim.kept import kept
from sim.schedule.derive.dependencies import Dependencies
from sim.schedule.derive.workspace import workspace_bytes
from sim.schedule.ir.declare import touched
from sim.schedule.ir.ops import COMPUTE, Attend, AttendBackward, Kernel
from sim.schedule.ir.program import Program
from sim.schedule.ir.views import Category
from sim.schedule.proof.check import Checked
from sim.trace import Counter, Trace

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Booleans: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


class Lifetime(NamedTuple):
    """When a buffer lives, by the numbers of ops: allocated before ``first``, freed before ``end``."""

    first: int
    end: int
    unseen: frozenset[str] = frozenset()
    """Streams that may still use it then, since no kernel is ever ordered behind them: an allocator has to be told."""


class MemoryWalk(NamedTuple):
    """Bytes of HBM in use on one rank."""

    in_use: list[int]
    """While each op runs, its workspace included."""
    peak_bytes: int
    buffer_peak_bytes: int
    """The peak without any workspace: what the runtime counts of its tensors."""
    by_category: dict[Category, int]
    """At the peak; the workspace of attention kernels counts as attention, that of others as other."""
    host_peak_bytes: int
    """Most that buffers take of the host's memory."""


def lifetimes(program: Program, dependencies: Dependencies) -> list[Lifetime]:
    """Return the lifetime of every buffer. The runtime allocates and frees by the same list."""
    first, end, unseen = _spans(program, dependencies)
    spans = enumerate(zip(first.tolist(), end.tolist(), strict=True))
    return [Lifetime(*span, frozenset(unseen.get(buffer, ()))) for buffer, span in spans]


class _Spans(NamedTuple):
    """Lifetimes as columns: (buffers,), and the streams of those that have any unseen."""

    first: Integers
    end: Integers
    unseen: dict[int, set[str]]


def _spans(program: Program, dependencies: Dependencies) -> _Spans:
    count = len(program.ops)
    of_ops = [touched(type(op))(op) for op in program.ops]
    ops = np.repeat(np.arange(count), np.fromiter(map(len, of_ops), np.int64, count))
    buffers = np.fromiter(chain.from_iterable(of_ops), np.int64, len(ops))
    safe, seen = _safe(program, dependencies)
    first, end = np.full(len(program.buffers), count), np.zeros(len(program.buffers), np.int64)
    np.minimum.at(first, buffers, ops)
    np.maximum.at(end, buffers, safe[ops])
    unseen: dict[int, set[str]] = {}
    for buffer, op in zip(buffers[~seen[ops]].tolist(), ops[~seen[ops]].tolist(), strict=True):
        unseen.setdefault(buffer, set()).add(program.ops[op].stream)
    given = [port.view.buffer for port in program.inputs]
    first[given] = 0
    end[given + [port.view.buffer for port in program.outputs]] = count
    return _Spans(first, end, unseen)


def _safe(program: Program, dependencies: Dependencies) -> tuple[Integers, Booleans]:
    """Return per op before which other its buffers may be given back, and whether that is known to come behind it.

    Behind a kernel any later op does. Behind another op the first kernel that is ordered behind it does; if there is
    none, as on a rank that passes keys on without attending to them, it is the next op of its stream or else the
    program's end.
    """
    count = len(program.ops)
    of_stream: dict[str, list[int]] = {}
    for index, op in enumerate(program.ops):
        of_stream.setdefault(op.stream, []).append(index)
    safe, seen = np.arange(1, count + 1), np.ones(count, bool)
    kernels = np.array([*of_stream.pop(COMPUTE, []), count])
    known = [dependencies.known[index] for index in kernels[:-1]]
    for stream, indices in of_stream.items():
        ended = [at_kernel.get(stream, -1) for at_kernel in known]  # grows, since kernels follow each other
        safe[indices] = kernels[np.searchsorted(ended, indices)]
        seen[indices] = safe[indices] < count
        safe[indices] = np.where(seen[indices], safe[indices], [*indices[1:], count])
    return safe, seen


def walk(program: Program, dependencies: Dependencies) -> MemoryWalk:
    """Return the HBM in use while each op of one rank runs, and its peak by category."""
    first, end, _ = _spans(program, dependencies)
    workspace = [workspace_bytes(op, program) if isinstance(op, Kernel) else 0 for op in program.ops]
    nbytes = [buffer.nbytes for buffer in program.buffers]
    exact = np.int64 if sum(nbytes) + max(workspace, default=0) < 2**63 else object  # else Python's integers
    sizes = np.array(nbytes, exact)
    on_gpu = np.array([buffer.place == "hbm" for buffer in program.buffers], bool)

    def held(which: Booleans) -> Any:
        """Return the bytes of some buffers that are alive at each op."""
        change = np.zeros(len(program.ops) + 1, exact)
        np.add.at(change, first[which], sizes[which])
        np.subtract.at(change, end[which], sizes[which])
        return np.cumsum(change[:-1])

    alive = first < end
    buffers = held(alive & on_gpu)
    in_use = buffers + np.array(workspace, exact)
    by_category: dict[Category, int] = {}
    if program.ops:
        at_peak = int(in_use.argmax())
        attends = isinstance(program.ops[at_peak], Attend | AttendBackward)
        by_category["attention" if attends else "other"] = workspace[at_peak]
        for number in np.flatnonzero(on_gpu & (first <= at_peak) & (at_peak < end)):
            category = program.buffers[number].category
            by_category[category] = by_category.get(category, 0) + nbytes[number]
    peaks = [int(of.max(initial=0)) for of in (in_use, buffers, held(alive & ~on_gpu))]
    return MemoryWalk(in_use.tolist(), peaks[0], peaks[1], by_category, peaks[2])


@kept
def walks(checked: Checked) -> list[MemoryWalk]:
    """Return the walk of every rank; it depends on the schedule only, and so is kept for all that is asked of it."""
    return [walk(p, d) for p, d in zip(checked.schedule.programs, checked.dependencies, strict=True)]


def counters(checked: Checked, trace: Trace) -> list[Counter]:
    """Return the bytes in use over the time of a trace: the walk knows the order, the trace the seconds."""
    of_ranks = walks(checked)
    return [Counter(row.rank, row.begin_s, of_ranks[row.rank].in_use[row.op]) for row in trace.rows]
