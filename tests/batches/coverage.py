"""Whether a plan covers its batch: every token lives somewhere once, every pair of the mask is attended once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from sim.base.errors import ScheduleError
from sim.batches.batch import Batch
from sim.batches.counting import counts, table
from sim.schedule.ir.masks import Span, count_pairs
from sim.schedule.ir.plan import Plan, Task


def require_covered(plan: Plan, batch: Batch) -> None:
    """Raise ScheduleError, which names tokens, if a token lives on no rank or on two, or if a pair is lost or doubled.

    Blocks of two tasks may not overlap, not even where the mask keeps nothing: what is disjoint and has as many pairs
    as the mask is all of it.
    """
    seq = batch.num_tokens
    _require_placed(plan, seq)
    tasks = [task for tasks in plan.tasks for task in tasks]
    for task in tasks:
        for span in (task.queries, task.keys):
            if not (0 <= span.start < span.stop and span.stop - span.step < seq):
                raise ScheduleError(f"{task} lies outside of the {seq} tokens of the batch")
    _require_disjoint(tasks)
    found = counts(table([t.queries for t in tasks]), table([t.keys for t in tasks]), batch.rectangles)[1]
    for rectangle, count in zip(batch.rectangles, found.tolist(), strict=True):
        wanted = count_pairs(rectangle.band, rectangle.queries, rectangle.keys)
        if count != wanted:
            raise ScheduleError(
                f"the plan attends {count} of {wanted} pairs of queries {_named(rectangle.queries)} and keys "
                f"{_named(rectangle.keys)}"
            )


def _require_placed(plan: Plan, seq: int) -> None:
    times = np.zeros(seq, dtype=np.int64)
    for tokens in plan.layout:
        for span in tokens:
            if not (0 <= span.start <= span.stop and span.stop - span.step < seq):
                raise ScheduleError(f"the layout has {span}, outside of the {seq} tokens of the batch")
            times[slice(*span)] += 1
    if (missing := np.flatnonzero(times < 1)).size:
        raise ScheduleError(f"token {missing[0]} lives on no rank")
    if (doubled := np.flatnonzero(times > 1)).size:
        raise ScheduleError(f"token {doubled[0]} lives on several ranks, or twice on one")


def _require_disjoint(tasks: Iterable[Task]) -> None:
    """Raise ScheduleError if the blocks of two tasks overlap.

    Blocks whose queries and keys step alike and from other residues cannot meet; of the others a sweep over the
    queries keeps the open blocks ordered by their keys, so that only neighbours can overlap.
    """
    tasks = list(tasks)
    strides = {(t.queries.step, t.keys.step) for t in tasks}
    if len(strides) > 1:
        _require_disjoint_pairwise(tasks)
        return
    groups = defaultdict(list)
    for task in tasks:
        groups[task.queries.start % task.queries.step, task.keys.start % task.keys.step].append(task)
    for group in groups.values():
        _sweep(group)


def _sweep(tasks: list[Task]) -> None:
    opened = sorted(tasks, key=lambda t: t.queries.start)
    closed = sorted(tasks, key=lambda t: t.queries.stop)
    at = 0
    active: list[tuple[int, Task]] = []
    for task in opened:
        while closed[at].queries.stop <= task.queries.start:
            done = closed[at]
            del active[bisect_left(active, (done.keys.start,))]
            at += 1
        place = bisect_left(active, (task.keys.start,))
        before = active[place - 1][1] if place else None
        after = active[place][1] if place < len(active) else None
        if before and before.keys.stop > task.keys.start:
            raise _doubled(before, task)
        if after and after.keys.start < task.keys.stop:
            raise _doubled(after, task)
        active.insert(place, (task.keys.start, task))


def _require_disjoint_pairwise(tasks: list[Task]) -> None:
    for index, one in enumerate(tasks):
        for other in tasks[:index]:
            if _meet(one.queries, other.queries) and _meet(one.keys, other.keys):
                raise _doubled(other, one)


def _meet(a: Span, b: Span) -> bool:
    """Return whether two spans share a position (Chinese remainder theorem)."""
    low, high = max(a.start, b.start), min(a.stop - a.step, b.stop - b.step)  # last positions
    common = math.gcd(a.step, b.step)
    if (b.start - a.start) % common:
        return False
    period = b.step // common
    steps = (b.start - a.start) // common * pow(a.step // common, -1, period) % period
    both = math.lcm(a.step, b.step)
    first = a.start + steps * a.step
    return first + -(-(low - first) // both) * both <= high


def _doubled(one: Task, other: Task) -> ScheduleError:
    return ScheduleError(
        f"two tasks attend the same pairs: queries {_named(one.queries)} and keys {_named(one.keys)}, and queries "
        f"{_named(other.queries)} and keys {_named(other.keys)}"
    )


def _named(span: Span) -> str:
    return f"{span.start} to {span.stop - span.step}" + (f" by {span.step}" if span.step > 1 else "")
