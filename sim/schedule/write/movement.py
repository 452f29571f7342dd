"""What a plan makes ranks fetch, attend and return, division by division: the rows of others that its tasks need.

A rank holds its own rows, and those that it has fetched, each once: the first division that needs a row fetches it.
Rows that no kept pair needs stay where they are. What comes and goes with the same divisions lies in one buffer, and a
division takes one kernel for each pair of buffers, whatever the number of blocks: so DCP's kernel takes a list of them
(arXiv:2510.10620).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

import numpy as np

from sim.base.errors import InputError, ScheduleError
from sim.schedule.ir.layout import cut, num_tokens
from sim.schedule.ir.masks import Band, Documents, Mask, Span, Tokens
from sim.schedule.ir.pieces import Pieces
from sim.schedule.ir.plan import Plan, Task
from sim.schedule.write.blocks import Block, blocks, together


class Rows(NamedTuple):
    """Tokens that follow each other in the memory of their owner: those number ``begin`` to ``end`` (exclusive)."""

    owner: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        """How many."""
        return self.end - self.begin


Held = tuple[Rows, ...]
"""Rows that lie in one buffer, one behind the other: a rank's own, or those that come and go together."""


def num_rows(held: Held) -> int:
    """Return how many a buffer has."""
    return sum(rows.size for rows in held)


def starts(held: Held) -> list[int]:
    """Return where each rows of a buffer begin in it, and where the last ones end."""
    return [0, *accumulate(rows.size for rows in held)]


class Attended(NamedTuple):
    """One kernel: a buffer of queries, one of keys, and the block of these."""

    queries: Held
    keys: Held
    block: Block


class Division(NamedTuple):
    """What a rank does in one division."""

    attended: tuple[Attended, ...]
    queries: tuple[Held, ...]
    """Which it needs for the first time, of other ranks."""
    keys: tuple[Held, ...]
    last_queries: tuple[Held, ...]
    """Which of those that it has fetched, now or before, it needs for the last time: their results go home."""
    last_keys: tuple[Held, ...]


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
    attended: list[set[tuple[int, int]]] = [set() for _ in plan.layout]
    for one in (one for divisions in found for division in divisions for one in division.attended):
        for span in _spans(one.block):
            for rows in _rows(one.queries, span):
                attended[rows.owner].add((rows.begin, rows.end))
    for rank, of_rank in enumerate(attended):
        row = 0
        for begin, end in sorted(of_rank):
            row = max(row, end) if begin <= row else row
        if row < num_tokens(plan.layout[rank]):
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
        self._spans: list[tuple[Span, Rows]] = []
        for rank, tokens in enumerate(plan.layout):
            begin = 0
            for span in tokens:
                self._require_inside(span, "`layout`")
                self._spans.append((span, Rows(rank, begin, begin + span.size)))
                begin += span.size
        pieces = Pieces((span for span, _ in self._spans), seq)
        times = np.zeros(pieces.tokens.shape, dtype=np.int64)
        for span, _ in self._spans:
            times[pieces.of(span)] += 1
        wrong = np.nonzero((times != 1) & (pieces.tokens > 0))
        if len(wrong[0]):
            token, number = min((pieces.first(*at), int(times[at])) for at in zip(*wrong, strict=True))
            lives = "on no rank" if number == 0 else f"{number} times"
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
    own = Rows(rank, 0, num_tokens(layout[rank]))
    pairs = [
        [pair for task in by_division[number] for pair in _needed(task, layout, places, mask)] for number in numbers
    ]
    queries, keys = (_Buffers(own, [[pair[side] for pair in of] for of in pairs]) for side in (0, 1))
    found = []
    for at, of in enumerate(pairs):
        parts = ((q, k) for some, others in of for q in queries.parts(some) for k in keys.parts(others))
        kernels = tuple(_kernels(_joined(_joined(parts)), layout, mask))
        found.append(Division(kernels, queries.coming(at), keys.coming(at), queries.going(at), keys.going(at)))
    return tuple(found)


def _needed(task: Task, layout: tuple[Tokens, ...], places: _Places, mask: Mask) -> Iterator[tuple[Rows, Rows]]:
    """Yield queries and keys of a task that the mask keeps, each of one owner; of a pattern each rectangle by itself,
    since it may keep nothing of keys that lie between them.
    """
    apart = isinstance(mask, Documents) and not isinstance(mask.keeps, Band)
    for queries in places.of(task.queries):
        for keys in places.of(task.keys):
            for block in blocks(mask, _tokens(queries, layout), _tokens(keys, layout)):
                some, others = _part(queries, block.rows), _part(keys, block.columns)
                parts = [(part.rows, part.columns) for part in block.documents] if apart else []
                for rows, columns in parts or [(Span(0, some.size), Span(0, others.size))]:
                    yield _part(some, slice(*rows[:2])), _part(others, slice(*columns[:2]))


def _tokens(rows: Rows, layout: tuple[Tokens, ...]) -> Tokens:
    return cut(layout[rows.owner], rows.begin, rows.end)


def _part(rows: Rows, of: slice) -> Rows:
    return Rows(rows.owner, rows.begin + of.start, rows.begin + of.stop)


class Side(NamedTuple):
    """Some of what is in a buffer."""

    held: Held
    begin: int
    end: int


class _Buffers:
    """In which buffer a rank holds rows, of queries or of keys; ``needed`` are those of each division."""

    def __init__(self, own: Rows, needed: Sequence[Sequence[Rows]]) -> None:
        by_owner: dict[int, dict[Rows, tuple[int, int]]] = defaultdict(dict)
        for at, some in enumerate(needed):
            for rows in some:
                if rows.owner != own.owner:
                    first, _ = by_owner[rows.owner].get(rows, (at, at))
                    by_owner[rows.owner][rows] = first, at
        self._of: dict[tuple[int, int], list[Rows]] = defaultdict(list)
        for _, wanted in sorted(by_owner.items()):
            for rows, when in _uses(wanted):
                self._of[when].append(rows)
        self._places: dict[int, list[tuple[Rows, Held, int]]] = defaultdict(list)
        for held in ((own,), *map(tuple, self._of.values())):
            for rows, start in zip(held, starts(held), strict=False):
                self._places[rows.owner].append((rows, held, start))
        for places in self._places.values():
            places.sort()

    def coming(self, at: int) -> tuple[Held, ...]:
        """Return what a division needs first."""
        return tuple(tuple(held) for (first, _), held in sorted(self._of.items()) if first == at)

    def going(self, at: int) -> tuple[Held, ...]:
        """Return what a division needs last."""
        return tuple(tuple(held) for (_, last), held in sorted(self._of.items()) if last == at)

    def parts(self, rows: Rows) -> Iterator[Side]:
        """Yield where rows lie, piece by piece."""
        places = self._places[rows.owner]
        for place, held, start in places[bisect_right(places, rows.begin, key=lambda found: found[0].end) :]:
            if place.begin >= rows.end:
                return
            begin, end = max(rows.begin, place.begin), min(rows.end, place.end)
            yield Side(held, start + begin - place.begin, start + end - place.begin)


def _uses(wanted: dict[Rows, tuple[int, int]]) -> list[tuple[Rows, tuple[int, int]]]:
    """Return rows of one owner in order, each once, with the first and the last division that needs them."""
    edges = sorted({edge for rows in wanted for edge in (rows.begin, rows.end)})
    needed: list[list[tuple[int, int]]] = [[] for _ in edges]
    for rows, when in wanted.items():
        for at in range(bisect_left(edges, rows.begin), bisect_left(edges, rows.end)):
            needed[at].append(when)
    found: list[tuple[Rows, tuple[int, int]]] = []
    owner = next(iter(wanted)).owner
    for (begin, end), times in zip(pairwise(edges), needed, strict=False):
        if not times:
            continue
        when = min(first for first, _ in times), max(last for _, last in times)
        if found and found[-1][0].end == begin and found[-1][1] == when:
            found[-1] = found[-1][0]._replace(end=end), when
        else:
            found.append((Rows(owner, begin, end), when))
    return found


def _tokens_of(side: Side, layout: tuple[Tokens, ...]) -> Tokens:
    return tuple(span for rows in _rows(side.held, slice(side.begin, side.end)) for span in _tokens(rows, layout))


def _rows(held: Held, part: slice) -> Iterator[Rows]:
    """Yield which rows lie in a part of a buffer."""
    for rows, start in zip(held, starts(held), strict=False):
        begin, end = max(part.start, start), min(part.stop, start + rows.size)
        if begin < end:
            yield Rows(rows.owner, rows.begin + begin - start, rows.begin + end - start)


def _joined(pairs: Iterable[tuple[Side, Side]]) -> list[tuple[Side, Side]]:
    """Return pairs with their sides exchanged, and as one where second sides that follow each other in a buffer meet
    the same first one. Those that overlap stay apart, so that ``check`` finds what is attended twice.
    """
    groups: dict[tuple[Side, Held], list[Side]] = defaultdict(list)
    for first, second in pairs:
        groups[first, second.held].append(second)
    found = []
    for (first, _), seconds in groups.items():
        runs: list[Side] = []
        for side in sorted(seconds):
            if runs and runs[-1].end == side.begin:
                runs[-1] = runs[-1]._replace(end=side.end)
            else:
                runs.append(side)
        found += [(run, first) for run in runs]
    return found


def _kernels(pairs: Iterable[tuple[Side, Side]], layout: tuple[Tokens, ...], mask: Mask) -> Iterator[Attended]:
    """Yield a kernel for each pair of buffers of which the mask keeps something: where other tasks cut the rows of one,
    it may keep nothing of some parts.
    """
    found: dict[tuple[Held, Held], list[Block]] = defaultdict(list)
    for queries, keys in pairs:
        found[queries.held, keys.held] += [
            block._replace(rows=_after(queries, block.rows), columns=_after(keys, block.columns))
            for block in blocks(mask, _tokens_of(queries, layout), _tokens_of(keys, layout))
        ]
    for (some, others), parts in found.items():
        if parts:
            yield Attended(some, others, together(parts))


def _after(side: Side, of: slice) -> slice:
    """Return a slice of some of a buffer as one of all of it."""
    return slice(side.begin + of.start, side.begin + of.stop)


def _spans(block: Block) -> list[slice]:
    """Return which rows a block attends."""
    start = block.rows.start
    return [slice(start + part.rows.start, start + part.rows.stop) for part in block.documents] or [block.rows]
