"""Memory of a schedule: a function of the program only, walked in the order in which the host issues it.

That is the order in which a caching allocator sees it: a buffer is taken when an op that first touches it is issued,
and freed when the last op that uses it has been issued; if that op runs on another stream, at the first later
kernel that is ordered behind it, or op of that stream where no kernel ever is. Inputs and outputs belong to the caller
and stay.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate, pairwise
from typing import NamedTuple

from sim.options import Place
from sim.schedule.derive.dependencies import Dependencies
from sim.schedule.derive.workspace import workspace_bytes
from sim.schedule.ir.ops import COMPUTE, Attend, AttendBackward, Kernel
from sim.schedule.ir.program import Program
from sim.schedule.ir.views import Buffer, Category
from sim.schedule.proof.check import Checked
from sim.trace import Counter, Trace


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
    count = len(program.ops)
    first = [count] * len(program.buffers)
    end = [0] * len(program.buffers)
    unseen: list[set[str]] = [set() for _ in program.buffers]
    behind = _first_behind(program, dependencies)
    for index, op in enumerate(program.ops):
        safe, seen = (index + 1, True) if op.stream == COMPUTE else behind[index]
        for view in (*op.reads, *op.writes):
            first[view.buffer] = min(first[view.buffer], index)
            end[view.buffer] = max(end[view.buffer], safe)
            if not seen:
                unseen[view.buffer].add(op.stream)
    for port in program.inputs:
        first[port.view.buffer], end[port.view.buffer] = 0, count
    for port in program.outputs:
        end[port.view.buffer] = count
    return [Lifetime(begin, over, frozenset(of)) for begin, over, of in zip(first, end, unseen, strict=True)]


def _first_behind(program: Program, dependencies: Dependencies) -> list[tuple[int, bool]]:
    """Return per op the first kernel that is ordered behind it, and True; if there is none, as on a rank that passes
    keys on without attending to them, the next op of its stream or else the program's end, and False.
    """
    found = [(len(program.ops), False)] * len(program.ops)
    unseen: dict[str, deque[int]] = {}
    for index, op in enumerate(program.ops):
        if op.stream != COMPUTE:
            unseen.setdefault(op.stream, deque()).append(index)
            continue
        for stream, ended in dependencies.known[index].items():
            of_stream = unseen.get(stream, ())
            while of_stream and of_stream[0] <= ended:
                found[of_stream.popleft()] = index, True
    for of_stream in unseen.values():
        for index, following in pairwise(of_stream):
            found[index] = following, False
    return found


def walk(program: Program, dependencies: Dependencies) -> MemoryWalk:
    """Return the HBM in use while each op of one rank runs, and its peak by category."""
    alive: dict[Place, list[tuple[Buffer, Lifetime]]] = {"hbm": [], "host": [], "pageable": []}
    for buffer, span in zip(program.buffers, lifetimes(program, dependencies), strict=True):
        if span.first < span.end:
            alive[buffer.place].append((buffer, span))
    workspace = [workspace_bytes(op, program) if isinstance(op, Kernel) else 0 for op in program.ops]
    buffers, pinned, pageable = (_held(of_place, len(program.ops)) for of_place in alive.values())
    in_use = [held + own for held, own in zip(buffers, workspace, strict=True)]
    peak = max(in_use, default=0)
    at_peak = in_use.index(peak) if in_use else 0
    by_category: dict[Category, int] = {}
    if in_use:
        attends = isinstance(program.ops[at_peak], Attend | AttendBackward)
        by_category["attention" if attends else "other"] = workspace[at_peak]
    for buffer, span in alive["hbm"]:
        if span.first <= at_peak < span.end:
            by_category[buffer.category] = by_category.get(buffer.category, 0) + buffer.nbytes
    return MemoryWalk(
        in_use, peak, max(buffers, default=0), by_category, max(map(sum, zip(pinned, pageable, strict=True)), default=0)
    )


def _held(alive: list[tuple[Buffer, Lifetime]], count: int) -> list[int]:
    """Return the bytes of buffers that are alive at each of so many ops."""
    change = [0] * (count + 1)
    for buffer, span in alive:
        change[span.first] += buffer.nbytes
        change[span.end] -= buffer.nbytes
    return list(accumulate(change[:-1]))


def counters(checked: Checked, trace: Trace) -> list[Counter]:
    """Return the bytes in use over the time of a trace: the walk knows the order, the trace the seconds."""
    walks = [walk(p, d) for p, d in zip(checked.schedule.programs, checked.dependencies, strict=True)]
    return [Counter(row.rank, row.begin_s, walks[row.rank].in_use[row.op]) for row in trace.rows]
