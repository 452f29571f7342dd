"""What a plan makes ranks fetch, attend and return, division by division: the rows of others that its tasks need.

A rank holds its own rows, and those that it has fetched, each once: the first division that needs a row fetches it.
Rows that no kept pair needs stay where they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import gcd
from typing import NamedTuple

import numpy as np

from sim.errors import InputError, ScheduleError
from sim.schedule.ir.layout import cut, num_tokens
from sim.schedule.ir.masks import Mask, Span, Tokens
from sim.schedule.ir.plan import Plan, Task
from sim.schedule.write.blocks import Block, blocks


class Rows(NamedTuple):
    """Tokens that follow each other in the memory of their owner: those number ``begin`` to ``end`` (exclusive)."""

    owner: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        """How many."""
        return self.end - self.begin


class Attended(NamedTuple):
    """One kernel: rows of queries and keys that are held, each in a buffer, and the block of these buffers."""

    queries: Rows
    keys: Rows
    block: Block


class Division(NamedTuple):
    """What a rank does in one division."""

    attended: tuple[Attended, ...]
    queries: tuple[Rows, ...]
    """Which it needs for the first time, of other ranks."""
    keys: tuple[Rows, ...]
    last_queries: tuple[Rows, ...]
    """Which of those that it has fetched, now or before, it needs for the last time: their results go home."""
    last_keys: tuple[Rows, ...]


Movement = tuple[tuple[Division, ...], ...]
"""Per rank its divisions; all ranks have as many."""


def movement(plan: Plan, mask: Mask, seq: int) -> Movement:
    """Return what a plan for so many tokens makes every rank do; raises InputError where a token lives on no rank or on
    two, where a task has tokens that are not there, and where strides of tasks and of the layout do not fit;
    ScheduleError where a token attends to nothing. That it attends to all that it has to, and once, ``check`` proves.
    """
    places = _Places(plan, seq)
    numbers = sorted({task.division for tasks in plan.tasks for task in tasks})
    found = tuple(_of_rank(rank, tasks, numbers, plan.layout, places, mask) for rank, tasks in enumerate(plan.tasks))
    attended = [np.zeros(num_tokens(tokens), dtype=bool) for tokens in plan.layout]
    for one in (one for divisions in found for division in divisions for one in division.attended):
        (rank, begin, _), rows = one.queries, one.block.rows
        attended[rank][begin + rows.start : begin + rows.stop] = True
    for rank, of_rank in enumerate(attended):
        for row in np.flatnonzero(~of_rank)[:1].tolist():
            token = cut(plan.layout[rank], row, row + 1)[0].start
            raise ScheduleError(f"no task of the plan attends token {token}, of rank {rank}, to any key that it sees")
    return found


class _Places:
    """Where tokens live."""

    def __init__(self, plan: Plan, seq: int) -> None:
        if len(plan.layout) != len(plan.tasks):
            raise InputError(
                f"the plan has the tokens of {len(plan.layout)} ranks and the tasks of {len(plan.tasks)}: give both as "
                f"many, `layout` with () for a rank that has no tokens"
            )
        self._seq = seq
        times = np.zeros(seq, dtype=np.int64)
        self._spans: list[tuple[Span, Rows]] = []
        for rank, tokens in enumerate(plan.layout):
            begin = 0
            for span in tokens:
                self._require_inside(span, "`layout`")
                times[slice(*span)] += 1
                self._spans.append((span, Rows(rank, begin, begin + span.size)))
                begin += span.size
        for token in np.flatnonzero(times != 1)[:1].tolist():
            lives = "on no rank" if times[token] == 0 else f"{times[token]} times"
            raise InputError(f"token {token} of {seq} lives {lives}: `layout` of the plan has each token once")
        self._spans.sort()
        self._starts = np.array([span.start for span, _ in self._spans])
        reach = [span.stop for span, _ in self._spans]
        self._stops = np.maximum.accumulate(reach)
        self._found: dict[Span, list[Rows]] = {}

    def of(self, span: Span) -> list[Rows]:
        """Return which rows of which ranks a span is."""
        if span not in self._found:
            self._require_inside(span, "a task")
            first = int(np.searchsorted(self._stops, span.start, side="right"))
            last = int(np.searchsorted(self._starts, span.stop, side="left"))
            parts = [_common(span, *self._spans[at]) for at in range(first, last)]
            self._found[span] = [rows for rows in parts if rows is not None]
        return self._found[span]

    def _require_inside(self, span: Span, what: str) -> None:
        whole = span.step >= 1 and (span.stop - span.start) % span.step == 0
        if not (whole and 0 <= span.start < span.stop and span.stop - span.step < self._seq):
            raise InputError(
                f"{what} of the plan has tokens {span.start} to {span.stop} by {span.step}: allowed are tokens of "
                f"0..{self._seq - 1}, one or more, that end a multiple of the step after they start; or set `seq`"
            )


def _common(span: Span, there: Span, rows: Rows) -> Rows | None:
    """Return which rows of a span of the layout are in another span."""
    if there.step % span.step:
        if (there.start - span.start) % gcd(there.step, span.step):
            return None
        raise InputError(
            f"a task of the plan takes every {span.step}th token of {there}, which are no neighbours in memory: give "
            f"it a step that divides {there.step}"
        )
    if (there.start - span.start) % span.step:
        return None
    begin = max(0, -(-(span.start - there.start) // there.step))
    end = min(there.size, -(-(span.stop - span.step + 1 - there.start) // there.step))
    return Rows(rows.owner, rows.begin + begin, rows.begin + end) if begin < end else None


def _of_rank(
    rank: int, tasks: tuple[Task, ...], numbers: list[int], layout: tuple[Tokens, ...], places: _Places, mask: Mask
) -> tuple[Division, ...]:
    """Return the divisions of one rank."""
    by_division: dict[int, list[Task]] = defaultdict(list)
    for task in tasks:
        by_division[task.division].append(task)
    queries, keys = (_Held(Rows(rank, 0, num_tokens(layout[rank]))) for _ in range(2))
    found = []
    for number in numbers:
        pairs = [pair for task in by_division[number] for pair in _needed(task, layout, places, mask)]
        fetched = queries.fetch([one for one, _ in pairs]), keys.fetch([one for _, one in pairs])
        parts = ((q, k) for some, others in pairs for q in queries.parts(some) for k in keys.parts(others))
        found.append((tuple(_kernels(_joined(_joined(parts)), layout, mask)), fetched))
    last_queries = _last_uses(rank, [[one.queries for one in attended] for attended, _ in found])
    last_keys = _last_uses(rank, [[one.keys for one in attended] for attended, _ in found])
    return tuple(
        Division(attended, *fetched, *lasts)
        for (attended, fetched), *lasts in zip(found, last_queries, last_keys, strict=True)
    )


def _needed(task: Task, layout: tuple[Tokens, ...], places: _Places, mask: Mask) -> Iterator[tuple[Rows, Rows]]:
    """Yield queries and keys of a task that the mask keeps, each of one owner."""
    for queries in places.of(task.queries):
        for keys in places.of(task.keys):
            for block in blocks(mask, _tokens(queries, layout), _tokens(keys, layout)):
                yield _part(queries, block.rows), _part(keys, block.columns)


def _tokens(rows: Rows, layout: tuple[Tokens, ...]) -> Tokens:
    return cut(layout[rows.owner], rows.begin, rows.end)


def _part(rows: Rows, of: slice) -> Rows:
    return Rows(rows.owner, rows.begin + of.start, rows.begin + of.stop)


class _Held:
    """Which rows a rank holds: its own in one buffer, others in one for all that follow each other when fetched."""

    def __init__(self, own: Rows) -> None:
        self._own = own
        self._of: dict[int, list[Rows]] = defaultdict(list)
        self._of[own.owner].append(own)

    def fetch(self, needed: Iterable[Rows]) -> tuple[Rows, ...]:
        """Return what is needed and not yet held, by owners; from now on it is."""
        by_owner: dict[int, set[Rows]] = defaultdict(set)
        for rows in needed:
            by_owner[rows.owner].add(rows)
        fetched: list[Rows] = []
        for owner, wanted in sorted(by_owner.items()):
            held = self._of[owner]
            missing = [part for rows in _union(sorted(wanted)) for part in _without(rows, held)]
            self._of[owner] = sorted(held + missing)
            fetched += missing
        return tuple(fetched)

    def parts(self, rows: Rows) -> Iterator[Side]:
        """Yield the rows piece by piece, each with all that is in its buffer."""
        held = self._of[rows.owner]
        for at in range(bisect_right(held, rows.begin, key=_end), len(held)):
            if held[at].begin >= rows.end:
                return
            begin, end = max(rows.begin, held[at].begin), min(rows.end, held[at].end)
            yield Side(held[at], Rows(rows.owner, begin, end))


class Side(NamedTuple):
    """Rows, and all that is in their buffer."""

    held: Rows
    rows: Rows


def _end(rows: Rows) -> int:
    return rows.end


def _union(wanted: list[Rows]) -> list[Rows]:
    """Return sorted rows of one owner, each once: those that follow each other as one."""
    found: list[Rows] = []
    for rows in wanted:
        if found and rows.begin <= found[-1].end:
            found[-1] = found[-1]._replace(end=max(found[-1].end, rows.end))
        else:
            found.append(rows)
    return found


def _without(rows: Rows, held: list[Rows]) -> Iterator[Rows]:
    """Yield what is not among others, which are sorted, and of which no two overlap."""
    begin = rows.begin
    for at in range(bisect_right(held, begin, key=_end), len(held)):
        if held[at].begin >= rows.end:
            break
        if begin < held[at].begin:
            yield Rows(rows.owner, begin, held[at].begin)
        begin = held[at].end
    if begin < rows.end:
        yield Rows(rows.owner, begin, rows.end)


def _joined(pairs: Iterable[tuple[Side, Side]]) -> list[tuple[Side, Side]]:
    """Return pairs with their sides exchanged, and as one where second sides that follow each other in a buffer meet
    the same first one. Those that overlap stay apart, so that ``check`` finds what is attended twice.
    """
    groups: dict[tuple[Side, Rows], list[Rows]] = defaultdict(list)
    for first, second in pairs:
        groups[first, second.held].append(second.rows)
    found = []
    for (first, held), seconds in groups.items():
        runs: list[Rows] = []
        for rows in sorted(seconds):
            if runs and runs[-1].end == rows.begin:
                runs[-1] = runs[-1]._replace(end=rows.end)
            else:
                runs.append(rows)
        found += [(Side(held, run), first) for run in runs]
    return found


def _kernels(pairs: Iterable[tuple[Side, Side]], layout: tuple[Tokens, ...], mask: Mask) -> Iterator[Attended]:
    """Yield the kernels of pairs of queries and keys."""
    for queries, keys in pairs:
        for block in blocks(mask, _tokens(queries.rows, layout), _tokens(keys.rows, layout)):
            inside = block._replace(rows=_in_buffer(queries, block.rows), columns=_in_buffer(keys, block.columns))
            yield Attended(queries.held, keys.held, inside)


def _in_buffer(side: Side, of: slice) -> slice:
    """Return a slice of rows as one of their buffer."""
    begin = side.rows.begin - side.held.begin
    return slice(begin + of.start, begin + of.stop)


def _last_uses(rank: int, used: list[list[Rows]]) -> list[tuple[Rows, ...]]:
    """Return per division which rows of others are used there for the last time."""
    last = {rows: at for at, some in enumerate(used) for rows in some if rows.owner != rank}
    return [tuple(sorted(rows for rows, where in last.items() if where == at)) for at in range(len(used))]
