"""Which (query, key) pairs attention keeps: spans of token positions, bands, and exact pair counts.

A ``Span`` is an arithmetic progression of positions, so a contiguous slice and every P-th token are one idea. A
``Band`` keeps key j for query i iff ``i - left <= j <= i + right``; None is no limit on that side. The same band
describes a whole sequence (positions) and one block of it (row and column indices of the block).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from sim.errors import ScheduleError
from sim.workload import Workload


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


def mask_of(workload: Workload) -> Band:
    """Return the mask of a whole sequence; a window of W keeps W tokens on each side that the mask keeps, the token
    itself among them (arXiv:2310.06825 §2).
    """
    reach = None if workload.window is None else workload.window - 1
    return Band(left=reach, right=0 if workload.mask == "causal" else reach)


def count_pairs(band: Band, queries: Span, keys: Span) -> int:
    """Return how many (query, key) pairs the band keeps, exactly and in time independent of the lengths.

    >>> count_pairs(CAUSAL, Span(0, 8), Span(0, 8))
    36
    """
    total = queries.size * keys.size if band.right is None else _at_most(band.right, queries, keys)
    return total if band.left is None else total - _at_most(-band.left - 1, queries, keys)


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
