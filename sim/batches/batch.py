"""A packed batch: documents one after the other in one sequence, and what each of them lets attention keep.

No token attends to another document. A mask is a tuple of rectangles that do not overlap, with a band each; bands
compare positions of the whole sequence, as ``sim.schedule.ir.masks`` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from sim.errors import InputError
from sim.schedule.ir.masks import CAUSAL, Band, Span

MOST_TOKENS = 1 << 31
"""Of all documents of a batch: then the pairs of tokens can be counted in 64 bits, whatever the mask."""


class Rectangle(NamedTuple):
    """Queries x keys of which attention keeps the pairs in a band."""

    queries: Span
    keys: Span
    band: Band


Pattern = Callable[[Span], tuple[Rectangle, ...]]
"""What one document keeps of itself."""


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


def batch(documents: tuple[int, ...] | list[int], pattern: Pattern | None = None) -> Batch:
    """Return documents of these lengths packed in this order, each under ``pattern`` (by default causal).

    Raises InputError as ``require_lengths`` does.

    >>> batch([3, 2]).rectangles[1]
    Rectangle(queries=Span(start=3, stop=5, step=1), keys=Span(start=3, stop=5, step=1), band=Band(left=None, right=0))
    """
    require_lengths(documents)
    lengths = tuple(map(int, documents))
    empty = Batch(lengths, ())
    keeps = pattern or causal
    return empty._replace(rectangles=tuple(one for span in empty.spans for one in keeps(span)))


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


def causal(document: Span) -> tuple[Rectangle, ...]:
    """Keep no later token."""
    return banded(CAUSAL)(document)


def banded(band: Band) -> Pattern:
    """Return what keeps one band of every document: full attention, causal attention or a window."""
    return lambda document: (Rectangle(document, document, band),)


def attention_sink(sink: int, window: int) -> Pattern:
    """Return the lambda mask: the first ``sink`` tokens and the last ``window`` ones, itself among them
    (StreamingLLM, arXiv:2309.17453 §3; "lambda" in DCP, arXiv:2510.10620 §7.1).
    """
    _require(sink=sink, window=window)

    def keeps(document: Span) -> tuple[Rectangle, ...]:
        edge = min(document.start + sink, document.stop)
        first = Rectangle(document, Span(document.start, edge), CAUSAL)
        if edge == document.stop:
            return (first,)
        later = Span(edge, document.stop)
        return first, Rectangle(later, later, Band(left=window - 1, right=0))

    return keeps


def causal_blockwise(size: int, local: int, sink: int = 1) -> Pattern:
    """Return the causal block-wise mask of long in-context learning: a block of ``size`` tokens keeps itself, the
    ``local`` - 1 blocks before it and the first ``sink`` ones; the last block, the question, keeps all (DCP,
    arXiv:2510.10620 §7.1).
    """
    _require(size=size, local=local, sink=sink)

    def keeps(document: Span) -> tuple[Rectangle, ...]:
        found = []
        edge = min(document.start + sink * size, document.stop)
        for start in range(document.start, document.stop, size):
            rows = Span(start, min(start + size, document.stop))
            last = rows.stop == document.stop
            near = document.start if last else max(document.start, start - (local - 1) * size)
            if near > edge:
                found.append(Rectangle(rows, Span(document.start, edge), CAUSAL))
                found.append(Rectangle(rows, Span(near, rows.stop), CAUSAL))
            else:
                found.append(Rectangle(rows, Span(document.start, rows.stop), CAUSAL))
        return tuple(found)

    return keeps


def shared_question(answers: int, answer_share: float) -> Pattern:
    """Return the mask of one question with several answers, each ``answer_share`` of the document: an answer keeps
    the question and itself, as in preference training (DCP, arXiv:2510.10620 §7.1).
    """
    _require(answers=answers)
    if not 0 < answer_share * answers < 1:
        raise InputError(
            f"`answer_share` {answer_share} of {answers} answers leaves no question: expected above 0 and below "
            f"{1 / answers:.3g}"
        )

    def keeps(document: Span) -> tuple[Rectangle, ...]:
        size = int(document.size * answer_share)
        if not size:
            return causal(document)
        edge = document.stop - answers * size
        question = Span(document.start, edge)
        found = [Rectangle(question, question, CAUSAL)]
        for start in range(edge, document.stop, size):
            rows = Span(start, start + size)
            found += [Rectangle(rows, question, CAUSAL), Rectangle(rows, rows, CAUSAL)]
        return tuple(found)

    return keeps


def _require(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise InputError(f"`{name}` {value}: expected a whole number of 1 or more")
