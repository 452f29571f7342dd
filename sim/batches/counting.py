"""Pairs that many blocks keep of a mask, exactly: the counts of ``sim.schedule.ir.masks`` on arrays.

Blocks and rectangles meet in spans; numpy counts all meetings at once, in time independent of their lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.schedule.ir.masks import Band, Rectangle, Span, count_pairs

Ints = NDArray[np.int64]
_MEETINGS = 1 << 21
"""At once, so that a count of any size stays within some hundred MB."""


def table(spans: Sequence[Span]) -> Ints:
    """Return (n, 3): start, stop, step of each."""
    return np.array(spans, dtype=np.int64).reshape(-1, 3)


def pairs_kept(queries: Sequence[Span], keys: Sequence[Span], rectangles: Sequence[Rectangle]) -> Ints:
    """Return (n,): how many pairs the mask keeps of each block ``queries[i]`` x ``keys[i]``."""
    return counts(table(queries), table(keys), rectangles)[0]


def counts(queries: Ints, keys: Ints, rectangles: Sequence[Rectangle]) -> tuple[Ints, Ints]:
    """Return (n,) the pairs of every block, and (m,) those of every rectangle that the blocks have together.

    ``queries`` and ``keys``: (n, 3), as ``table`` returns them.
    """
    per_block = np.zeros(len(queries), dtype=np.int64)
    per_rectangle = np.zeros(len(rectangles), dtype=np.int64)
    for met in meetings(queries, keys, rectangles):
        np.add.at(per_block, met.block, met.pairs)
        np.add.at(per_rectangle, met.rectangle, met.pairs)
    return per_block, per_rectangle


class Meetings(NamedTuple):
    """Blocks that may keep pairs of rectangles; arrays (n,) where not said otherwise."""

    block: Ints
    rectangle: Ints
    queries: Ints
    """(n, 3): rows of the block that lie in the rectangle."""
    keys: Ints
    """(n, 3): columns of the block that lie in it."""
    limits: Ints
    """(n, 2): of the rectangle's band."""
    pairs: Ints
    """That the band keeps of these."""

    @property
    def sizes(self) -> tuple[Ints, Ints]:
        """Rows and columns without those of which the band keeps nothing, as kernels are launched on them."""
        left, right = self.limits.T
        (first, _, _), (first_key, _, _) = self.queries.T, self.keys.T
        last, last_key = (span[:, 1] - span[:, 2] for span in (self.queries, self.keys))
        some = _met(self.queries, np.stack([first_key - right, last_key + left + 1], axis=1))
        others = _met(self.keys, np.stack([first - left, last + right + 1], axis=1))
        return _num(some), _num(others)


def meetings(queries: Ints, keys: Ints, rectangles: Sequence[Rectangle]) -> Iterator[Meetings]:
    """Yield where blocks and rectangles meet, block by block, some millions at a time.

    ``queries`` and ``keys``: (n, 3), as ``table`` returns them.
    """
    rows, columns = table([one.queries for one in rectangles]), table([one.keys for one in rectangles])
    order = np.argsort(rows[:, 0], kind="stable")
    starts, latest = rows[order, 0], np.maximum.accumulate(rows[order, 1])
    # Rectangles by their first row: those that a block can meet are neighbours, from the first one that reaches it.
    low = np.searchsorted(latest, queries[:, 0], side="right")
    high = np.maximum(np.searchsorted(starts, queries[:, 1], side="left"), low)
    bands = np.array([_limits(one.band) for one in rectangles], dtype=np.int64).reshape(-1, 2)
    begin = 0
    ends = np.cumsum(high - low)
    while begin < len(queries):
        done = ends[begin - 1] if begin else 0
        end = max(int(np.searchsorted(ends, done + _MEETINGS, side="right")), begin + 1)
        width = (high - low)[begin:end]
        block = np.repeat(np.arange(begin, end), width)
        within = np.arange(len(block)) - np.repeat(np.cumsum(width) - width, width)
        which = order[low[block] + within]
        met = _met(queries[block], rows[which]), _met(keys[block], columns[which])
        yield Meetings(block, which, *met, bands[which], _in_bands(*met, bands[which]))
        begin = end


def pairs_in_band(begin: Ints, end: Ints, first_key: Ints, last_key: Ints, band: Band) -> Ints:
    """Return (n,): how many pairs a band keeps of queries ``begin`` to ``end`` x keys ``first_key`` to ``last_key``
    (exclusive), all arrays (n,).
    """
    ones = np.ones_like(begin)
    left, right = _limits(band)
    limits = np.stack([left * ones, right * ones], axis=1)
    return _in_bands(np.stack([begin, end, ones], axis=1), np.stack([first_key, last_key, ones], axis=1), limits)


_FAR = 1 << 40
"""No limit: farther than any two positions."""


def _limits(band: Band) -> tuple[int, int]:
    return _FAR if band.left is None else band.left, _FAR if band.right is None else band.right


def _met(spans: Ints, intervals: Ints) -> Ints:
    """Return the positions of each span inside the interval beside it (step 1); empty where they do not meet."""
    start, stop, step = spans.T
    first = start + np.maximum(-((start - intervals[:, 0]) // step), 0) * step
    last = np.minimum(stop, start - (-(intervals[:, 1] - start) // step) * step)
    return np.stack([first, np.maximum(last, first), step], axis=1)


def _num(spans: Ints) -> Ints:
    """Return (n,): positions of each."""
    found: Ints = (spans[:, 1] - spans[:, 0]) // spans[:, 2]
    return found


def _in_bands(queries: Ints, keys: Ints, limits: Ints) -> Ints:
    kept = _at_most(limits[:, 1], queries, keys)
    cut = limits[:, 0] < _FAR
    if cut.any():
        kept[cut] -= _at_most(-limits[cut, 0] - 1, queries[cut], keys[cut])
    return kept


def _at_most(offset: Ints, queries: Ints, keys: Ints) -> Ints:
    """Return per block the number of pairs with key <= query + offset, as ``masks.count_pairs`` does one by one.

    Where keys step as queries do, or by one, the keys of successive queries are an arithmetic series between a ramp's
    two ends. Other strides go one by one.
    """
    step, key_step = queries[:, 2], keys[:, 2]
    num_queries, num_keys = _num(queries), _num(keys)
    same = step == key_step
    base = queries[:, 0] + offset - keys[:, 0]
    base = np.where(same, base // step, base)  # in strides, where both have the same
    slope = np.where(same, 1, step)
    first = np.clip(-(base // slope), 0, num_queries)
    filled = np.clip(-((base - (num_keys - 1)) // slope), first, num_queries)
    ramp = filled - first
    found = ramp * (base + 1) + slope * (ramp * (first + filled - 1) // 2) + (num_queries - filled) * num_keys
    found = np.where(num_keys > 0, found, 0)
    for at in np.flatnonzero(~same & (key_step != 1)):
        band = Band(right=int(offset[at]))
        found[at] = count_pairs(band, Span(*map(int, queries[at])), Span(*map(int, keys[at])))
    return found
