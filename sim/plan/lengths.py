"""Lengths to try where the longest is asked for, and the last of them that is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator

PER_OCTAVE = 128
"""Lengths from one power of two to the next where the longest is looked for: they are 0.8 % apart at most."""
ROUND = 16
"""Every so many lengths is a round one, which divides better than those between."""


def last_enough(count: int, known: int, reaches: Callable[[int], bool]) -> int:
    """Return the last number below ``count`` that is enough, by steps that double and then by bisection. ``known`` is
    one that is enough. After a number that is not, none is.
    """
    step, short = 1, count
    while known + step < short and step < count:
        if reaches(known + step):
            known, step = known + step, 2 * step
        else:
            short = known + step
    while short - known > 1:
        middle = (known + short) // 2
        known, short = (middle, short) if reaches(middle) else (known, middle)
    return known


def lengths_of_units(unit: int, until: int) -> Iterator[int]:
    """Yield lengths in rising order up to ``until``: the same number between each power of two of the unit and the
    next.
    """
    while True:
        for step in range(PER_OCTAVE):
            if (tokens := unit * (PER_OCTAVE + step)) > until:
                return
            yield tokens
        unit *= 2
