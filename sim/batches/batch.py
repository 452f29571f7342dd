"""A packed batch: documents one after the other in one sequence, and what each of them lets attention keep.

No token attends to another document. A mask is a tuple of rectangles that do not overlap, with a band each; bands
compare positions of the whole sequence, as ``sim.schedule.ir.masks`` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from sim.base.errors import InputError
from sim.schedule.ir.masks import CAUSAL, Band, Rectangle, Span, kept_in
from sim.words.patterns import Pattern

MOST_TOKENS = 1 << 31
"""Of all documents of a batch: then the pairs of tokens can be counted in 64 bits, whatever the mask."""


class Batch(NamedTuple):
    """Documents in the order of the sequence that they are packed into."""

    documents: tuple[int, ...]
    """Tokens of each."""
    rectangles: tuple[Rectangle, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return sum(self.documents)

    @property
    def spans(self) -> list[Span]:
        """Positions of each document."""
        stops = accumulate(self.documents)
        return [Span(stop - size, stop) for size, stop in zip(self.documents, stops, strict=True)]


def batch(documents: tuple[int, ...] | list[int], keeps: Band | Pattern = CAUSAL) -> Batch:
    """Return documents of these lengths packed in this order, each of which keeps a band or a pattern of itself.

    Raises InputError as ``require_lengths`` does.

    >>> batch([3, 2]).rectangles[1]
    Rectangle(queries=Span(start=3, stop=5, step=1), keys=Span(start=3, stop=5, step=1), band=Band(left=None, right=0))
    """
    require_lengths(documents)
    empty = Batch(tuple(map(int, documents)), ())
    return empty._replace(rectangles=tuple(one for span in empty.spans for one in kept_in(span, keeps)))


def require_lengths(lengths: Sequence[object], where: str = "`documents`") -> None:
    """Raise InputError if there is no document, one that is no whole number of tokens or has none, or more than
    ``MOST_TOKENS`` in all; ``where`` names what to change.
    """
    if not len(lengths):
        raise InputError(f"{where} has no document: expected one length or more")
    total = 0
    for index, size in enumerate(lengths):
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise InputError(f"{where}: document {index} has {size!r} tokens: expected whole numbers")
        if size < 1:
            raise InputError(f"{where}: document {index} has {size} tokens: expected 1 or more; leave it out")
        total += int(size)
    if total > MOST_TOKENS:
        raise InputError(f"{where}: the documents have more tokens in all than the {MOST_TOKENS} that plans count")
