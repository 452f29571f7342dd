"""A sequence in pieces that no span takes apart: counting by them takes as long for a billion tokens as for few."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from sim.schedule.ir.masks import Span

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class Pieces:
    """n stretches between the ends of some spans x the remainders that their strides tell apart; single tokens where
    these would be more. The spans lie in the sequence.
    """

    def __init__(self, spans: Iterable[Span], seq: int) -> None:
        found = {*spans}
        edges = sorted({0, seq, *(span.start for span in found), *(min(span.stop, seq) for span in found)})
        self._edges, self._seq, self._period = edges, seq, math.lcm(*(span.step for span in found))
        self._of_edge = {edge: number for number, edge in enumerate(edges)}
        self._single = self._period * len(edges) > seq
        self.tokens: Integers = np.ones((seq, 1), np.int64) if self._single else np.diff(self._before(), axis=0)
        """(n, remainders): how many each piece has."""

    def of(self, span: Span) -> tuple[slice, slice]:
        """Return where the pieces of a span are in arrays (n, remainders)."""
        if self._single:
            return slice(*span), slice(None)
        low, high = (self._of_edge[min(edge, self._seq)] for edge in (span.start, span.stop))
        return slice(low, high), slice(span.start % span.step, None, span.step)

    def first(self, stretch: int, remainder: int) -> int:
        """Return the first token of a piece."""
        if self._single:
            return stretch
        edge = self._edges[stretch]
        return edge + (remainder - edge) % self._period

    def _before(self) -> Integers:
        """Return (n + 1, remainders): how many tokens of each remainder there are before each edge."""
        found: Integers = -(-(np.array(self._edges, np.int64)[:, None] - np.arange(self._period)) // self._period)
        return found
