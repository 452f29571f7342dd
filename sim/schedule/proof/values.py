"""Values of buffers that are found later: what ops make of others, together where as many lie before them.

    rules of ops ── asked for, with the values that they are given ──> values, by number ── found ──> contents

What a rule makes depends on what it is given alone, and no value ever changes. So when values are found does not matter
but for what is found together: all of one rule that are as far from what is known, as the numbers of many ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.schedule.proof.abstract_memory import AbstractMemory, Held
from sim.schedule.proof.contents import Unclassed
from sim.schedule.proof.many import Apart, Ints
from sim.schedule.proof.outlines import NOTHING, Contents

_TOGETHER = 4096
"""Values that are found together at most: what is computed of them is kept in caches."""


class Rule(NamedTuple):
    """What is made of the contents of some buffers."""

    memory: AbstractMemory
    """In which these lie."""
    play: Callable[[AbstractMemory], None]
    written: list[int]
    """The buffers that it writes to."""
    lost: NDArray[np.bool_]
    """Whether a buffer is written to as a whole before it is used: what it held does not matter."""


class _Asked(NamedTuple):
    """Values that a rule is asked for."""

    far: Ints
    """Through how many rules the farthest of what it is given has come."""
    given: Ints
    """(times, buffers): values."""
    made: Ints
    """(times, buffers that it writes to): values."""


class Values:
    """Values by number: that of nothing, known ones, and those that rules are asked for."""

    def __init__(self) -> None:
        self._contents = Contents()
        self._count = 1
        self._far = np.zeros(64, np.int64)
        self._outline, self._row = (np.zeros(1, np.int64) for _ in range(2))
        self._known: list[tuple[int, Held]] = []
        self._asked: dict[int, tuple[Rule, list[_Asked]]] = {}
        self._full: list[Ints] = []

    def known(self, held: Held) -> int:
        """Return the value of contents."""
        (value,) = self._new(1)
        self._known.append((int(value), held))
        return int(value)

    def asked(self, rule: Rule, given: Ints) -> Ints:
        """Return the values of all that a rule writes, of what it is given each time."""
        given = np.where(rule.lost, NOTHING, given)
        far = self._far[given].max(axis=1, initial=0) + 1
        made = self._new(len(given) * len(rule.written)).reshape(len(given), -1)
        self._far[made] = far[:, None]
        self._asked.setdefault(id(rule), (rule, []))[1].append(_Asked(far, given, made))
        return made

    def require_full(self, values: Ints) -> None:
        """Let ``find`` raise Unclassed where one of these is not known to fill its buffer."""
        self._full.append(values)

    def find(self) -> None:
        """Find all values; raises Unclassed, or what a rule refuses."""
        self._outline, self._row = (np.zeros(self._count, np.int64) for _ in range(2))
        for value, held in self._known:
            self._put(np.array([value]), held)
        for rule, given, made in self._in_order():
            for begin in range(0, len(given), _TOGETHER):
                some = slice(begin, begin + _TOGETHER)
                self._run_alike(rule, given[some], made[some])
        full = np.concatenate([np.zeros(0, np.int64), *self._full])
        if not self._contents.is_full(self._outline[full]):
            raise Unclassed

    def held(self, value: int) -> Held:
        """Return the contents that a value was found to be."""
        return self._contents.taken(int(self._outline[value]), self._row[value : value + 1])

    def _new(self, count: int) -> Ints:
        begin, self._count = self._count, self._count + count
        while self._count > len(self._far):
            self._far = np.concatenate([self._far, np.zeros_like(self._far)])
        return np.arange(begin, self._count)

    def _in_order(self) -> Iterator[tuple[Rule, Ints, Ints]]:
        """Yield what rules are given and make, the nearest first."""
        found: list[tuple[int, int, Rule, Ints, Ints]] = []
        for number, (rule, asked) in enumerate(self._asked.values()):
            far, given, made = (np.concatenate(column) for column in zip(*asked, strict=True))
            order = np.argsort(far, kind="stable")
            alike = np.split(order, np.flatnonzero(np.diff(far[order])) + 1)
            found += [(int(far[some[0]]), number, rule, given[some], made[some]) for some in alike]
        found.sort(key=lambda one: one[:2])
        return ((rule, given, made) for _, _, rule, given, made in found)

    def _run_alike(self, rule: Rule, given: Ints, made: Ints) -> None:
        """Play a rule once for each outline of what it is given."""
        outlines, left = self._outline[given], np.arange(len(given))
        while len(left):
            same = (outlines[left] == outlines[left[0]]).all(axis=1)
            some = left[same]
            self._run_on(rule, outlines[left[0]].tolist(), given[some], made[some])
            left = left[~same]

    def _run_on(self, rule: Rule, outlines: list[int], given: Ints, made: Ints) -> None:
        """Play a rule on contents of these outlines; in parts where numbers say otherwise."""
        parts, memory = [np.arange(len(given))], rule.memory
        while parts:
            some = parts.pop()
            for number, (outline, rows) in enumerate(zip(outlines, self._row[given[some]].T, strict=True)):
                memory.hold(number, self._contents.taken(outline, rows))
            try:
                rule.play(memory)
            except Apart as apart:
                parts += [some[apart.where], some[~apart.where]]
                continue
            held = memory.held()
            for number, values in zip(rule.written, made[some].T, strict=True):
                self._put(values, held[number])

    def _put(self, values: Ints, held: Held) -> None:
        self._outline[values], self._row[values] = self._contents.put(held, len(values))
