"""The longest context whose training step fits: by few lengths, and lines through what they leave of each memory."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence

from sim.plan.search.room import Room, room
from sim.setup.setup import Setup

PER_OCTAVE = 16
"""Lengths that are tried from one power of two to the next."""
_MOST_GUESSES = 4
"""Lengths that are guessed before what is left has to be halved."""
LEAST = 1024
"""Tokens of a sequence that each rank has at least where the longest context is looked for."""

Left = Sequence[int]
"""Bytes that are left of each memory; below 0 those that are missing."""


def longest(setup: Setup, most: int, known: Mapping[int, Room] = {}, near: int = 0) -> int:
    """Return the longest context whose training step fits, in tokens up to ``most``; 0 if none does. Candidates are 16
    lengths between each power of two and the next. Memory is assumed to grow with the length.

    What is ``known`` of the memory at some lengths is not asked again, and ``near`` is where the longest may be.
    """
    lengths = lengths_tried(setup, most)
    before = {tokens: _left(found) for tokens, found in known.items()}
    fitting = num_fitting(lengths, lambda tokens: _left(padded_room(setup.replace(seq=tokens))), before, near)
    return lengths[fitting - 1] if fitting else 0


def lengths_tried(setup: Setup, most: int) -> list[int]:
    """Return the candidates for the longest context, up to ``most``."""
    mesh = setup.resolved().mesh
    least = LEAST * mesh.sharing
    octaves = [least << power for power in range(max(1, (most // least).bit_length()))]
    lengths = [octave + step * octave // PER_OCTAVE for octave in octaves for step in range(PER_OCTAVE)]
    return [tokens for tokens in lengths if tokens <= most]


def padded_room(setup: Setup) -> Room:
    """Return the memory of a training step; a length that does not divide is padded."""
    return room(setup.replace(pad=True).resolved())


def _left(found: Room) -> Left:
    """Return what is left of each memory."""
    return [limit.free_bytes for limit in found.limits]


def num_fitting(
    lengths: Sequence[int], left: Callable[[int], Left], known: Mapping[int, Left] = {}, near: int = 0
) -> int:
    """Return how many of some rising lengths leave nothing less than zero free, where longer ones leave less. ``known``
    is what some lengths leave, ``near`` one to begin with. What long contexts take of each memory is nearly a line, so
    most are found by where the first of the lines through two known ones is zero.
    """
    known = dict(known)
    halved, guesses = len(lengths) + 1, 0
    fits, fails = _between(lengths, known)
    while fails - fits > 1:
        if fails - fits <= (halved + 1) // 2:
            halved, guesses = fails - fits, 0
        guess = _likely(lengths, known, fits, fails, near) if guesses < _MOST_GUESSES else (fits + fails) // 2
        tokens, guesses = lengths[min(max(guess, fits + 1), fails - 1)], guesses + 1
        known[tokens], near = left(tokens), 0
        fits, fails = _between(lengths, known)
    return fails


def _fits(left: Left) -> bool:
    return min(left) >= 0


def _between(lengths: Sequence[int], known: Mapping[int, Left]) -> tuple[int, int]:
    """Return the number of the last length that is known to fit, -1 if none is, and of the first that is not to."""
    fits = max((tokens for tokens, left in known.items() if _fits(left)), default=-math.inf)
    fails = min((tokens for tokens, left in known.items() if not _fits(left)), default=math.inf)
    return bisect.bisect_right(lengths, fits) - 1, bisect.bisect_left(lengths, fails)


def _likely(lengths: Sequence[int], known: Mapping[int, Left], fits: int, fails: int, near: int) -> int:
    """Return which length is likely the last that fits, between one that does and one that does not."""
    if near:
        return bisect.bisect_right(lengths, near) - 1
    below, above = ([tokens for tokens in sorted(known) if _fits(known[tokens]) is fit] for fit in (True, False))
    pair = above[:2] if len(above) > 1 else [*below[-1:], *above] if above else below[-2:]  # memory grows ever faster
    if len(pair) < 2:
        return (fits + fails) // 2 if not pair else fits + PER_OCTAVE if below else fails - PER_OCTAVE
    found = bisect.bisect_right(lengths, _zero(known, *pair)) - 1
    return found if above else min(found, fits + 2 * PER_OCTAVE)


def _zero(known: Mapping[int, Left], first: int, last: int) -> float:
    """Return at which length the first memory is full, by lines through what two lengths leave of each."""
    pairs = zip(known[first], known[last], strict=False)  # what is first kept on the host later has no line yet
    return min((first - one * (last - first) / (other - one) for one, other in pairs if one != other), default=math.inf)
