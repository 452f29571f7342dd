"""Which (query, key) pairs attention keeps: spans of token positions, bands, and exact pair counts.

A ``Span`` is an arithmetic progression of positions, so a contiguous slice and every P-th token are one idea. A
``Band`` keeps key j for query i iff ``i - left <= j <= i + right``; None is no limit on that side. The same band
describes a whole sequence (positions) and one block of it (row and column indices of the block). ``Documents`` of a
packed sequence keep to themselves: their mask is a rectangle each, or those of a pattern, and in a block one
``DocumentBlock`` for each of them. A ``BlockSparse`` mask keeps some blocks of keys for each block of queries: in a
block of both one ``RowBlock`` for each block of queries, with the runs of keys that it keeps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from sim.base.errors import ScheduleError
from sim.words.patterns import Part, Pattern, parts
from sim.words.workload import BlockMask, MaskName, Workload


class Span(NamedTuple):
    """Positions ``start, start + step, …`` below ``stop``; ``stop - start`` is a multiple of ``step``."""

    start: int
    stop: int
    step: int = 1

    @property
    def size(self) -> int:
        """Number of positions."""
        return (self.stop - self.start) // self.step

    def moved(self, by: int) -> Span:
        """Return as many positions, so many later."""
        return Span(self.start + by, self.stop + by, self.step)

    def part(self, begin: int, end: int) -> Span:
        """Return the positions number ``begin`` to ``end`` (exclusive) of this span."""
        return Span(self.start + begin * self.step, self.start + end * self.step, self.step)


ONE = Span(0, 1)
"""The heads of what has none."""

Tokens = tuple[Span, ...]
"""Token positions in the order in which they lie in memory."""


class Band(NamedTuple):
    """Keep (i, j) iff ``i - left <= j <= i + right``; None is no limit."""

    left: int | None = None
    right: int | None = None


FULL = Band()
CAUSAL = Band(right=0)


class Rectangle(NamedTuple):
    """Queries x keys of which attention keeps the pairs in a band."""

    queries: Span
    keys: Span
    band: Band


class Documents(msgspec.Struct, frozen=True, cache_hash=True):
    """Keep what a band or a pattern keeps of pairs within one document of a packed sequence. A struct that keeps its
    hash, since what is remembered of a mask is asked for by it, and there may be many documents.
    """

    keeps: Band | Pattern
    edges: tuple[int, ...]
    """Where each document begins, and where the last one ends."""


class BlockSparse(NamedTuple):
    """Keep what the band keeps of pairs whose blocks are kept."""

    band: Band
    blocks: BlockMask


Mask = Band | Documents | BlockSparse


class DocumentBlock(NamedTuple):
    """One rectangle of a block that one kernel attends to, such as the share of a document: some of its rows and
    columns, and the band between them by indices of their own. No two rectangles of a block have a pair in common.
    """

    rows: Span
    columns: Span
    band: Band


class Run(NamedTuple):
    """Columns that follow each other, and the band between them and some rows, by indices of their own."""

    start: int
    columns: int
    band: Band


class RowBlock(NamedTuple):
    """Some rows of a block after those of the part before, and the runs of columns that they keep, rising."""

    rows: int
    runs: tuple[Run, ...]


def kept_in(document: Span, keeps: Band | Pattern) -> tuple[Rectangle, ...]:
    """Return the rectangles of what a document keeps of itself; no two overlap.

    >>> kept_in(Span(4, 8), CAUSAL)[0].keys
    Span(start=4, stop=8, step=1)
    """
    if isinstance(keeps, Band):
        return (Rectangle(document, document, keeps),)
    at = document.start
    return tuple(
        Rectangle(Span(at + one.begin, at + one.end), Span(at + one.first, at + one.last), Band(one.left, 0))
        for one in parts(keeps, document.size)
    )


def band_of(mask: MaskName, window: int | None) -> Band:
    """Return the band of a mask; a window of W keeps W tokens on each side that the mask keeps, the token itself among
    them (arXiv:2310.06825 §2).
    """
    reach = None if window is None else window - 1
    return Band(left=reach, right=0 if mask == "causal" else reach)


def mask_of(workload: Workload) -> Mask:
    """Return the mask of a whole sequence. Padding belongs to the last document."""
    band = band_of(workload.mask, workload.window)
    if workload.block_mask is not UNSET:
        return BlockSparse(band, workload.block_mask)
    lengths = workload.document_lengths
    if len(lengths) == 1 and workload.pattern is UNSET:
        return band
    return Documents(workload.pattern or band, (0, *accumulate(lengths[:-1]), workload.seq))


def meeting(mask: Documents | BlockSparse, queries: Span, keys: Span) -> Iterator[tuple[slice, slice, Band]]:
    """Yield which of these queries and keys, by their numbers, belong to each document from the first to the last one
    that has both, and the band between their positions; one between may lack either where strides leave it out. Of a
    pattern, yield each rectangle that has both. Of blocks, yield each block of queries with each run of blocks of keys
    that it keeps.
    """
    if isinstance(mask, BlockSparse):
        yield from ((rows, columns, mask.band) for rows, columns in _meeting_blocks(mask.blocks, queries, keys))
        return
    for low, high in _shared(mask.edges, queries, keys):
        if isinstance(mask.keeps, Band):
            rows, columns = (_within(span, low, high) for span in (queries, keys))
            yield rows, columns, mask.keeps
        else:
            yield from _meeting_parts(mask.keeps, low, high - low, queries, keys)


def _shared(edges: tuple[int, ...], queries: Span, keys: Span) -> Iterator[tuple[int, int]]:
    """Yield where documents begin and end, from the first to the last one that has some of both."""
    first, last = _documents_of_both(edges, queries, keys)
    yield from zip(edges[first : last + 1], edges[first + 1 : last + 2], strict=True)


def _documents_of_both(edges: tuple[int, ...], queries: Span, keys: Span) -> tuple[int, int]:
    """Return the numbers of the first and the last document that have some of both; the last is before the first where
    none has.
    """
    last = min(queries.stop - queries.step, keys.stop - keys.step)
    return bisect_right(edges, max(queries.start, keys.start)) - 1, bisect_right(edges, last) - 1


def is_in_one_document(mask: Documents, span: Span) -> bool:
    """Return whether the first and the last of these positions, and so all of them, are of one document."""
    return bisect_right(mask.edges, span.start) == bisect_right(mask.edges, span.stop - span.step)


def _meeting_parts(
    pattern: Pattern, start: int, size: int, queries: Span, keys: Span
) -> Iterator[tuple[slice, slice, Band]]:
    found, reach = _in_order(pattern, size)
    for part in found[bisect_right(reach, queries.start - start) :]:
        if start + part.begin >= queries.stop:
            return
        rows = _within(queries, start + part.begin, start + part.end)
        columns = _within(keys, start + part.first, start + part.last)
        if rows.start < rows.stop and columns.start < columns.stop:
            yield rows, columns, Band(part.left, 0)


@lru_cache(maxsize=4096)
def _in_order(pattern: Pattern, size: int) -> tuple[tuple[Part, ...], list[int]]:
    """Return parts of a document by their first query, and up to which query those until each of them reach."""
    found = parts(pattern, size)
    return found, list(accumulate((part.end for part in found), max))


def _meeting_blocks(blocks: BlockMask, queries: Span, keys: Span) -> Iterator[tuple[slice, slice]]:
    for row in range(queries.start // blocks.size, (queries.stop - queries.step) // blocks.size + 1):
        rows = _within(queries, row * blocks.size, (row + 1) * blocks.size)
        for start, stop in runs_of(blocks)[row] if rows.start < rows.stop else ():
            columns = _within(keys, start, stop)
            if columns.start < columns.stop:
                yield rows, columns


@lru_cache(maxsize=64)
def runs_of(blocks: BlockMask) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return per block of queries the keys that it keeps, as first and last (exclusive) position of each run.

    >>> runs_of(BlockMask(size=4, kept=((0,), (0, 1), (0, 2))))
    (((0, 4),), ((0, 8),), ((0, 4), (8, 12)))
    """
    found = []
    for kept in blocks.kept:
        own = {*kept}
        starts = [block for block in kept if block - 1 not in own]
        stops = [block + 1 for block in kept if block + 1 not in own]
        found.append(tuple((a * blocks.size, b * blocks.size) for a, b in zip(starts, stops, strict=True)))
    return tuple(found)


def _within(span: Span, start: int, stop: int) -> slice:
    """Return which positions of a span lie from one to another (exclusive), by their numbers."""
    return slice(_before(span, start), _before(span, stop))


def _before(span: Span, position: int) -> int:
    """Return how many positions of a span lie before one."""
    return min(max(-((span.start - position) // span.step), 0), span.size)


def restarted(tokens: Tokens, mask: Mask) -> Tokens:
    """Return the positions of tokens within their documents, which rotary embeddings turn by.

    >>> restarted((Span(2, 6),), Documents(CAUSAL, (0, 4, 8)))
    (Span(start=2, stop=4, step=1), Span(start=0, stop=2, step=1))
    """
    if not isinstance(mask, Documents):
        return tokens
    found = []
    for span in tokens:
        for start, stop in _shared(mask.edges, span, span):
            rows = _within(span, start, stop)
            if rows.start < rows.stop:
                found.append(span.part(rows.start, rows.stop).moved(-start))
    return tuple(found)


def count_pairs(mask: Mask, queries: Span, keys: Span) -> int:
    """Return how many (query, key) pairs the mask keeps, exactly and in time independent of the lengths; it grows with
    the number of documents, or of kept blocks, that have both.

    >>> count_pairs(CAUSAL, Span(0, 8), Span(0, 8))
    36
    >>> count_pairs(Documents(CAUSAL, (0, 4, 8)), Span(0, 8), Span(0, 8))
    20
    """
    if isinstance(mask, Documents) and isinstance(mask.keeps, Band):
        first, last = _documents_of_both(mask.edges, queries, keys)
        if last - first > _MANY:
            return _count_of_documents(mask.keeps, mask.edges[first : last + 2], queries, keys)
    if not isinstance(mask, Band):
        return sum(
            count_pairs(band, queries.part(rows.start, rows.stop), keys.part(columns.start, columns.stop))
            for rows, columns, band in meeting(mask, queries, keys)
            if rows.start < rows.stop and columns.start < columns.stop
        )
    total = queries.size * keys.size if mask.right is None else _at_most(mask.right, queries, keys)
    return total if mask.left is None else total - _at_most(-mask.left - 1, queries, keys)


_MANY = 16
"""Documents from which on arrays are faster than one after the other."""


def _count_of_documents(band: Band, edges: tuple[int, ...], queries: Span, keys: Span) -> int:
    """Return the number of pairs that a band keeps within documents; those with as many queries and keys, as far
    apart, are counted once.
    """
    cuts = np.array(edges)
    q, k = (np.clip(-((span.start - cuts) // span.step), 0, span.size) for span in (queries, keys))
    apart = queries.start - keys.start + q[:-1] * queries.step - k[:-1] * keys.step
    alike = Counter(zip(np.diff(q).tolist(), np.diff(k).tolist(), apart.tolist(), strict=True))
    return sum(
        count
        * count_pairs(band, queries.part(0, some).moved(shift - queries.start), keys.part(0, others).moved(-keys.start))
        for (some, others, shift), count in alike.items()
        if some and others
    )


def _at_most(offset: int, queries: Span, keys: Span) -> int:
    """Return the number of pairs with key <= query + offset."""
    nq, nk = queries.size, keys.size
    base = queries.start + offset - keys.start
    first = min(max(-(base // queries.step), 0), nq)  # from this query on at least one key counts
    filled = min(max(-((base - (nk - 1) * keys.step) // queries.step), first), nq)  # from here on all of them
    partial = _floor_sum(filled - first, keys.step, queries.step, base + first * queries.step) + (filled - first)
    return partial + (nq - filled) * nk


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return sum of floor((a*i + b) / m) for i in 0..n-1 (Euclid-like; Knuth, Concrete Mathematics §3.5)."""
    total = 0
    while n > 0:
        total += (a // m) * n * (n - 1) // 2 + (b // m) * n
        a, b = a % m, b % m
        top = a * n + b
        n, m, a, b = top // m, a, m, top % m
    return total


@lru_cache(maxsize=65536)
def block_band(band: Band, queries: Span, keys: Span) -> Band | None:
    """Return the band in row and column indices of the block ``queries`` x ``keys``; None if it keeps no pair.

    Limits that keep everything are dropped, so a block without masked pairs is ``FULL``. Raises ScheduleError where
    the two spans have different strides and the band cuts through the block.
    """
    kept = count_pairs(band, queries, keys)
    if kept == 0:
        return None
    if kept == queries.size * keys.size:
        return FULL
    if queries.step != keys.step:
        raise ScheduleError(f"no band describes the mask between {queries} and {keys}: give both the same stride")
    shift, step = queries.start - keys.start, queries.step
    right = None if band.right is None else (band.right + shift) // step
    left = None if band.left is None else (band.left - shift) // step
    return simplified(Band(left, right), queries.size, keys.size)


def simplified(band: Band, num_queries: int, num_keys: int) -> Band:
    """Return the band without the limits that keep everything in a block of this shape."""
    left = None if band.left is None or band.left >= num_queries - 1 else band.left
    right = None if band.right is None or band.right >= num_keys - 1 else band.right
    return Band(left, right)


def same_pairs(a: Band, b: Band, num_queries: int, num_keys: int) -> bool:
    """Return whether two bands keep the same pairs of a block."""
    rows, columns = Span(0, num_queries), Span(0, num_keys)
    a, b = simplified(a, num_queries, num_keys), simplified(b, num_queries, num_keys)
    if a == b:
        return True
    both = Band(_least(a.left, b.left), _least(a.right, b.right))
    return count_pairs(a, rows, columns) == count_pairs(b, rows, columns) == count_pairs(both, rows, columns)


@lru_cache(maxsize=65536)
def keeps_parts(
    mask: Mask, parts: tuple[DocumentBlock, ...], queries: Span, keys: Span, first_row: int, first_column: int
) -> bool:
    """Return whether the parts of a block keep of these queries and keys, which lie from a row and a column of it on,
    what the mask keeps: as many pairs, and all of them its own. No two parts may have a pair in common, which would
    count twice (``sharing_a_pair``).
    """
    within = Documents(mask, (0, max(queries.stop, keys.stop))) if isinstance(mask, Band) else mask
    given = both = 0
    in_order, reach = _by_rows(parts)
    for part in in_order[bisect_right(reach, first_row) :]:
        if part.rows.start >= first_row + queries.size:
            break
        row, column = part.rows.start - first_row, part.columns.start - first_column
        some, others = _clip(row, part.rows.size, queries.size), _clip(column, part.columns.size, keys.size)
        if some.start >= some.stop or others.start >= others.stop:
            continue
        mine, theirs = queries.part(some.start, some.stop), keys.part(others.start, others.stop)
        band = moved_band(part.band, some.start - row, others.start - column)
        given += count_pairs(band, Span(0, mine.size), Span(0, theirs.size))
        for rows, columns, of_mask in meeting(within, mine, theirs):
            if rows.start == rows.stop or columns.start == columns.stop:
                continue
            q, k = mine.part(rows.start, rows.stop), theirs.part(columns.start, columns.stop)
            wanted, kept = block_band(of_mask, q, k), moved_band(band, rows.start, columns.start)
            if wanted is not None:
                common = Band(_least(wanted.left, kept.left), _least(wanted.right, kept.right))
                both += count_pairs(common, Span(0, q.size), Span(0, k.size))
    return given == both == count_pairs(mask, queries, keys)


@lru_cache(maxsize=4096)
def sharing_a_pair(parts: tuple[DocumentBlock, ...]) -> tuple[DocumentBlock, DocumentBlock] | None:
    """Return two parts of a block with a pair in common, None if no two have any.

    >>> sharing_a_pair((DocumentBlock(Span(0, 4), Span(0, 4), CAUSAL), DocumentBlock(Span(0, 2), Span(2, 4), FULL)))
    """
    reaching: list[DocumentBlock] = []
    for part in sorted(parts, key=lambda part: part.rows):
        reaching = [one for one in reaching if one.rows.stop > part.rows.start]
        start, stop = part.columns.start, part.columns.stop
        for one in reaching:
            if one.columns.start < stop and start < one.columns.stop and _bands_meet(one, part):
                return one, part
        reaching.append(part)
    return None


def _bands_meet(a: DocumentBlock, b: DocumentBlock) -> bool:
    """Return whether two parts keep the same pair of rows and columns that both have."""
    first, last = max(a.rows.start, b.rows.start), min(a.rows.stop, b.rows.stop) - 1
    low, high = max(a.columns.start, b.columns.start), min(a.columns.stop, b.columns.stop) - 1
    bands = [moved_band(part.band, -part.rows.start, -part.columns.start) for part in (a, b)]
    left, right = _least(bands[0].left, bands[1].left), _least(bands[0].right, bands[1].right)
    least = low - last if left is None else max(low - last, -left)  # of column - row
    most = high - first if right is None else min(high - first, right)
    return least <= most


@lru_cache(maxsize=4096)
def rectangles(parts: tuple[RowBlock, ...]) -> tuple[DocumentBlock, ...]:
    """Return the rectangles that some rows and the runs of columns which they keep consist of.

    >>> [part] = rectangles((RowBlock(4, ()), RowBlock(4, (Run(2, 6, FULL),))))
    >>> part.rows, part.columns
    (Span(start=4, stop=8, step=1), Span(start=2, stop=8, step=1))
    """
    found: list[DocumentBlock] = []
    row = 0
    for part in parts:
        rows = Span(row, row + part.rows)
        found += [DocumentBlock(rows, Span(run.start, run.start + run.columns), run.band) for run in part.runs]
        row += part.rows
    return tuple(found)


def moved_band(band: Band, rows: int, columns: int) -> Band:
    """Return a band by the indices of a block that begins so many rows and columns later."""
    left = None if band.left is None else band.left - rows + columns
    return Band(left, None if band.right is None else band.right + rows - columns)


@lru_cache(maxsize=4096)
def _by_rows(parts: tuple[DocumentBlock, ...]) -> tuple[tuple[DocumentBlock, ...], list[int]]:
    """Return parts by their first row, and up to which row those until each of them reach."""
    in_order = tuple(sorted(parts, key=lambda part: part.rows))
    return in_order, list(accumulate((part.rows.stop for part in in_order), max))


def _clip(start: int, size: int, most: int) -> slice:
    return slice(max(start, 0), min(start + size, most))


@lru_cache(maxsize=65536)
def keeps_mask(mask: Band, band: Band, queries: Span, keys: Span, shift: int) -> bool:
    """Return whether a band by local indices, moved by ``shift`` = first row - first column, keeps what the mask keeps
    of these queries and keys.
    """
    left = None if band.left is None else band.left - shift
    right = None if band.right is None else band.right + shift
    wanted = block_band(mask, queries, keys)
    if wanted is None:
        return count_pairs(Band(left, right), Span(0, queries.size), Span(0, keys.size)) == 0
    return same_pairs(Band(left, right), wanted, queries.size, keys.size)


def _least(a: int | None, b: int | None) -> int | None:
    """Return the tighter of two limits."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)
