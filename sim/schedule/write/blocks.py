"""Which kernels attention of some queries to some keys takes: as few rectangles as the mask allows, each with one band.

Queries and keys lie in memory as ``Tokens``, spans of positions one after the other. Where one band describes what the
mask keeps of all of them, one kernel does it, without the rows and columns that the mask empties: so the zigzag ring's
"all queries to the first half of the keys" and the striped ring's shifted triangle need no rules of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET

from sim.schedule.ir.exchanges import Ints
from sim.schedule.ir.masks import (
    FULL,
    Band,
    BlockSparse,
    DocumentBlock,
    Documents,
    Mask,
    RowBlock,
    Run,
    Span,
    Tokens,
    block_band,
    is_in_one_document,
    keeps_mask,
    meeting,
    simplified,
)
from sim.words.options import Sharding


class Block(NamedTuple):
    """One kernel: some rows of the queries at hand, some columns of the keys at hand, and the mask between them."""

    rows: slice
    columns: slice
    band: Band
    documents: tuple[DocumentBlock, ...] = ()
    """Parts that one variable-length kernel attends to, as of several documents; then ``band`` is FULL."""
    sparse: tuple[RowBlock, ...] = ()
    """Of a block-sparse mask, which one block-sparse kernel attends to; then ``band`` is FULL."""

    @property
    def key(self) -> Hashable:
        """What tells blocks apart; slices have no hash."""
        return self.rows.start, self.rows.stop, self.columns.start, self.columns.stop, *self[2:]

    @property
    def kept(self) -> dict[str, Any]:
        """What is kept of the rows and columns, by fields of ops."""
        return {"band": self.band, "documents": self.documents or UNSET, "sparse": self.sparse or UNSET}


def keys_of(some: Iterable[Block]) -> Hashable:
    """Return what tells lists of blocks apart."""
    return tuple([block.key for block in some])


@lru_cache(maxsize=65536)
def blocks(mask: Mask, queries: Tokens, keys: Tokens) -> tuple[Block, ...]:
    """Return the blocks that hold all pairs the mask keeps, none twice; the larger ones first.

    Raises ScheduleError where spans of different strides meet and the mask cuts between them.
    """
    if isinstance(mask, Documents):
        return _of_documents(mask, _joined(queries), _joined(keys))
    if isinstance(mask, BlockSparse):
        return _of_blocks(mask, _joined(queries), _joined(keys))
    if len({span.step for span in (*queries, *keys)}) > 1:
        return _of_band(mask, tuple([tuple([(some, others) for others in keys]) for some in queries]))
    return _of_band(mask, tuple([tuple([_near(mask, some, others) for others in keys]) for some in queries]))


Pairs = tuple[tuple[tuple[Span, Span], ...], ...]
"""Per span of the queries and per span of the keys both of them."""


def _near(mask: Band, queries: Span, keys: Span) -> tuple[Span, Span]:
    """Return queries and keys of one stride of which a band keeps the same by their numbers, whichever positions they
    have.
    """
    low, high = _apart(mask, queries, keys)
    start = min(max(queries.start - keys.start, low), high)
    num_rows, num_columns = queries.stop - queries.start, keys.stop - keys.start
    return Span(start, start + num_rows, queries.step), Span(0, num_columns, keys.step)


def _apart(mask: Band, queries: Span, keys: Span) -> tuple[int, int]:
    """Return how far queries can be before and behind keys of their stride before a band keeps all of them, or none."""
    num_rows, num_columns = queries.stop - queries.start, keys.stop - keys.start
    low = high = 0
    if mask.right is not None:
        low = min(low, -mask.right - num_rows + queries.step - 1)
        high = max(high, num_columns - keys.step - mask.right)
    if mask.left is not None:
        low = min(low, mask.left - num_rows + queries.step)
        high = max(high, num_columns - keys.step + mask.left + 1)
    return low, high


@lru_cache(maxsize=65536)
def _of_band(mask: Band, pairs: Pairs) -> tuple[Block, ...]:
    """Return the blocks of what a band keeps of spans of queries and keys."""
    if len(pairs) == len(pairs[0]) == 1:
        queries, keys = pairs[0][0]
        band = block_band(mask, queries, keys)
        return () if band is None else (_trimmed(band, queries.size, keys.size),)
    whole = _as_one(mask, pairs)
    if whole is not None:
        return whole
    if len(pairs) > 1:
        parts = [
            _moved(block, rows=start)
            for row, start in zip(pairs, _starts(_rows_of(pairs)), strict=True)
            for block in _of_band(mask, (row,))
        ]
    else:
        parts = [
            _moved(block, columns=start)
            for pair, start in zip(pairs[0], _starts(_columns_of(pairs)), strict=True)
            for block in _of_band(mask, ((pair,),))
        ]
    return tuple(sorted(parts, key=_extent, reverse=True))


def _rows_of(pairs: Pairs) -> Tokens:
    return tuple([queries for (queries, _), *_ in pairs])


def _columns_of(pairs: Pairs) -> Tokens:
    return tuple([keys for _, keys in pairs[0]])


@lru_cache(maxsize=65536)
def kept_blocks(mask: Mask, queries: Tokens, keys: Tokens, sharding: Sharding) -> tuple[Block, ...]:
    """Return the same; of tokens that lie document by document one variable-length kernel."""
    if sharding == "sequence" or not isinstance(mask, Documents):
        return blocks(mask, queries, keys)
    columns = {document: (others, start) for document, others, start in _by_document(mask, keys)}
    within = mask.keeps if isinstance(mask.keeps, Band) else mask
    found = [
        _moved(block, row, columns[document][1])
        for document, some, row in _by_document(mask, queries)
        if document in columns
        for block in blocks(within, some, columns[document][0])
    ]
    return (together(found),) if found else ()


class Met(NamedTuple):
    """What one member of a ring attends to with each of all."""

    which: Sequence[int]
    """Per member the number of its blocks."""
    found: Sequence[tuple[Block, ...]]
    """All that differ."""


def met(mask: Mask, own: Tokens, layout: tuple[Tokens, ...], sharding: Sharding, *, are_keys: bool = False) -> Met:
    """Return the blocks of a member's queries, or keys, with those on the other side of each member."""
    numbers: dict[Hashable, int] = {}
    found: list[tuple[Block, ...]] = []
    of_apart: dict[Hashable, int] = {}
    which = []
    for others, apart in zip(layout, _all_apart(mask, own, layout, are_keys=are_keys), strict=True):
        if apart not in of_apart:
            some = kept_blocks(mask, others, own, sharding) if are_keys else kept_blocks(mask, own, others, sharding)
            number = of_apart[apart] = numbers.setdefault(keys_of(some), len(found))
            if number == len(found):
                found.append(some)
        which.append(of_apart[apart])
    return Met(which, found)


def _all_apart(mask: Mask, own: Tokens, layout: tuple[Tokens, ...], *, are_keys: bool) -> Iterable[Hashable]:
    """Return per member of a ring what decides on the blocks of its tokens with those of one of them."""
    sides = _sides(layout)
    if sides is None or not isinstance(mask, Band) or len({span.step for span in own} | {sides.step}) > 1:
        return layout
    others = [Span(0, size, sides.step) for size in sides.sizes]
    ends = [[_apart(mask, other, one) if are_keys else _apart(mask, one, other) for one in own] for other in others]
    low, high = np.moveaxis(np.array(ends, np.int64), -1, 0)
    far = np.array([span.start for span in own]) - sides.starts[:, :, None]
    return map(tuple, np.clip(-far if are_keys else far, low, high).reshape(len(layout), -1).tolist())


class _Sides(NamedTuple):
    """The tokens of members that all have as many spans, of as many tokens and of one stride."""

    starts: Ints
    """(members, spans)"""
    sizes: tuple[int, ...]
    """Of each span from its first position to behind its last one."""
    step: int


@lru_cache(maxsize=64)
def _sides(layout: tuple[Tokens, ...]) -> _Sides | None:
    """Return what members of a ring have in common; None where there is nothing."""
    forms = {tuple([(span.stop - span.start, span.step) for span in tokens]) for tokens in layout}
    steps = {step for form in forms for _, step in form}
    if len(forms) > 1 or len(steps) != 1:
        return None
    starts = np.array([[span.start for span in tokens] for tokens in layout], np.int64)
    return _Sides(starts, tuple([size for size, _ in forms.pop()]), steps.pop())


def _by_document(mask: Documents, tokens: Tokens) -> Iterator[tuple[int, Tokens, int]]:
    """Yield each document with the tokens that are of it, and where these begin in memory."""
    start = 0
    for document, spans in groupby(tokens, lambda span: bisect_right(mask.edges, span.start)):
        of_it = tuple(spans)
        yield document, of_it, start
        start += sum(span.size for span in of_it)


def _of_documents(mask: Documents, queries: Tokens, keys: Tokens) -> tuple[Block, ...]:
    """Return blocks as of the band alone where one document has all of these tokens, else one for each pair of spans
    that share a document; of a pattern one in all.
    """
    spans = (*queries, *keys)
    whole = Span(min(span.start for span in spans), max(span.stop - span.step + 1 for span in spans))
    if isinstance(mask.keeps, Band) and is_in_one_document(mask, whole):
        return blocks(mask.keeps, queries, keys)
    found = []
    for some, row in zip(queries, _starts(queries), strict=True):
        for others, column in zip(keys, _starts(keys), strict=True):
            block = _packed(mask, some, others)
            if block is not None:
                found.append(_moved(block, row, column))
    if found and not isinstance(mask.keeps, Band):
        return (together(found),)
    return tuple(sorted(found, key=_extent, reverse=True))


def _of_blocks(mask: BlockSparse, queries: Tokens, keys: Tokens) -> tuple[Block, ...]:
    """Return one block of all pairs that a block-sparse mask keeps, none where it keeps none."""
    found: dict[tuple[int, int], list[Run]] = {}
    for some, row in zip(queries, _starts(queries), strict=True):
        for others, column in zip(keys, _starts(keys), strict=True):
            for part, columns, of_mask in meeting(mask, some, others):
                q, k = some.part(part.start, part.stop), others.part(columns.start, columns.stop)
                band = block_band(of_mask, q, k)
                if band is not None:
                    inner = _trimmed(band, q.size, k.size).columns
                    width = inner.stop - inner.start
                    run = Run(column + columns.start + inner.start, width,
                              simplified(_shifted(band, -inner.start), q.size, width))  # fmt: skip
                    found.setdefault((row + part.start, row + part.stop), []).append(run)
    if not found:
        return ()
    runs = [run for own in found.values() for run in own]
    top, left = min(found)[0], min(run.start for run in runs)
    bottom, right = max(found)[1], max(run.start + run.columns for run in runs)
    if len(runs) == 1:
        return (_moved(_trimmed(runs[0].band, bottom - top, right - left), top, left),)
    parts, at = [], top
    for (start, stop), own in sorted(found.items()):
        if at < start:
            parts.append(RowBlock(start - at, ()))
        parts.append(RowBlock(stop - start, tuple(sorted(run._replace(start=run.start - left) for run in own))))
        at = stop
    return (Block(slice(top, bottom), slice(left, right), FULL, (), tuple(parts)),)


def _packed(mask: Documents, queries: Span, keys: Span) -> Block | None:
    """Return one block of a part for each document, or rectangle of one, that has some of both."""
    met = []
    for rows, columns, of_mask in meeting(mask, queries, keys):
        some, others = queries.part(rows.start, rows.stop), keys.part(columns.start, columns.stop)
        met.append((rows, columns, block_band(of_mask, some, others) if some.size and others.size else None))
    kept = [at for at, (_, _, band) in enumerate(met) if band is not None]
    if not kept:
        return None
    met = met[kept[0] : kept[-1] + 1]
    rows, columns, band = met[0]
    if len(met) == 1:
        assert band is not None
        return _moved(_trimmed(band, rows.stop - rows.start, columns.stop - columns.start), rows.start, columns.start)
    inner = [
        _moved(_trimmed(band, rows.stop - rows.start, columns.stop - columns.start), rows.start, columns.start)
        for rows, columns, band in met
        if band is not None
    ]
    return together(inner)


def together(several: Sequence[Block]) -> Block:
    """Return blocks of the same queries and keys as one."""
    if len(several) == 1:
        return several[0]
    rows, columns = (
        slice(min(side.start for side in sides), max(side.stop for side in sides))
        for sides in ([one.rows for one in several], [one.columns for one in several])
    )
    parts = []
    for one in several:
        row, column = _after(one.rows, rows), _after(one.columns, columns)
        parts += [
            DocumentBlock(part.rows.moved(row.start), part.columns.moved(column.start), part.band)
            for part in one.documents
        ] or [DocumentBlock(row, column, one.band)]
    return Block(rows, columns, FULL, tuple(sorted(parts, key=lambda part: part[:2])))


def _after(part: slice, first: slice) -> Span:
    """Return rows or columns counted from the first ones."""
    return Span(part.start - first.start, part.stop - first.start)


def _joined(tokens: Tokens) -> Tokens:
    """Return the same positions in as few spans."""
    found = [tokens[0]]
    for span in tokens[1:]:
        last = found[-1]
        if last.stop == span.start and last.step == span.step:
            found[-1] = last._replace(stop=span.stop)
        else:
            found.append(span)
    return tuple(found)


def _as_one(mask: Band, pairs: Pairs) -> tuple[Block, ...] | None:
    """Return one block that holds all kept pairs, or none if there are none; None if it takes several."""
    bands = {
        (i, j): band
        for i, row in enumerate(pairs)
        for j, (some, others) in enumerate(row)
        if (band := block_band(mask, some, others)) is not None
    }
    if not bands:
        return ()
    (top, bottom), (left, right) = ((min(side), max(side) + 1) for side in zip(*bands, strict=True))
    queries, keys = _rows_of(pairs), _columns_of(pairs)
    q_starts, k_starts = _starts(queries[top:bottom]), _starts(keys[left:right])
    candidates = {FULL} | {
        _shifted(band, k_starts[j - left] - q_starts[i - top]) for (i, j), band in bands.items() if band != FULL
    }
    for candidate in sorted(candidates, key=str):
        if all(
            keeps_mask(mask, candidate, some, others, row - column)
            for of_row, row in zip(pairs[top:bottom], q_starts, strict=True)
            for (some, others), column in zip(of_row[left:right], k_starts, strict=True)
        ):
            sizes = sum(span.size for span in queries[top:bottom]), sum(span.size for span in keys[left:right])
            block = _trimmed(candidate, *sizes)
            return (_moved(block, rows=_starts(queries)[top], columns=_starts(keys)[left]),)
    return None


def _extent(block: Block) -> tuple[int, int]:
    """Return how many rows and columns a block has."""
    return block.rows.stop - block.rows.start, block.columns.stop - block.columns.start


def _starts(tokens: Tokens) -> list[int]:
    """Return where each span begins in memory."""
    return [0, *accumulate(span.size for span in tokens)][:-1]


def _shifted(band: Band, by: int) -> Band:
    """Return a band as seen from an origin that lies ``by`` columns before it (or rows, if negative)."""
    return Band(None if band.left is None else band.left - by, None if band.right is None else band.right + by)


def _moved(block: Block, rows: int = 0, columns: int = 0) -> Block:
    return Block(
        slice(block.rows.start + rows, block.rows.stop + rows),
        slice(block.columns.start + columns, block.columns.stop + columns),
        *block[2:],
    )


def _trimmed(band: Band, num_queries: int, num_keys: int) -> Block:
    """Return the block without rows and columns of which the band, which keeps some pair, keeps nothing."""
    if band == FULL:
        return Block(slice(0, num_queries), slice(0, num_keys), FULL)
    first = 0 if band.right is None else max(0, -band.right)
    last = num_queries if band.left is None else min(num_queries, num_keys + band.left)
    begin = 0 if band.left is None else max(0, first - band.left)
    end = num_keys if band.right is None else min(num_keys, last + band.right)
    inner = simplified(_shifted(band, first - begin), last - first, end - begin)
    return Block(slice(first, last), slice(begin, end), inner)
