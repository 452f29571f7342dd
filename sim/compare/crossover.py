"""Where one configuration overtakes another along an axis: by bisection between values at equal ratios."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from sim.base.errors import InputError, LongstepError
from sim.compare.axes import changed, field_of, limits
from sim.plan.told import Step, asked_step, grounds_of
from sim.setup.answers.rows import of_crossings
from sim.setup.answers.table import Table
from sim.setup.names import schedule_name
from sim.setup.setup import Setup

_POINTS = 9
"""Values between which crossings are looked for: two of them between neighbours are not seen."""
_MULTIPLE = 1024
"""Lengths are rounded to it, so that they divide over ranks."""

Figure = Callable[[Step], float | None]


class _Point(NamedTuple):
    """One value of the axis."""

    text: str
    value: float


class _Crossing(NamedTuple):
    """Where it changes which is faster: a, b, or none where neither can be played and fits."""

    value: float
    below: str
    above: str


class Crossings(Table):
    """Where the faster of two changes, a row each."""

    points: Table
    """What was played on the way: values of the key in rising order, with the seconds of both, None of what cannot be
    played or does not fit."""


def crossover(a: Setup, b: Setup, along: str, between: str, *, within: float = 0.01, extend: bool = False) -> Crossings:
    """Return where the faster of two setups changes along one key, a row for each crossing, in rising order.

    ``along`` is what ``explore`` can vary, with numbers; ``between`` its range, ``64K..4M``. A row says which is faster
    below the value and above it, and in which range it is if all costs are at the one or the other end of their 90 %
    intervals, for both alike, since both rest on one profile; None where they do not cross there. Values are
    known to ``within``; lengths are multiples of 1024. The last row has no value, and says which is faster at the end.
    What cannot be played, or does not fit, is slower than what can; where neither does, ``below`` or ``above`` is
    empty. With ``extend`` training steps are told by few layers and micro-batches (``sim.plan.extended``). Raises
    InputError for what is no range of numbers, and where neither can be played anywhere in it.

    >>> layer = Setup(model="llama3-8b", cluster="hgx-h100", scope="layer", gpus=2)
    >>> found = crossover(layer.replace(schedule="ring"), layer.replace(schedule="zigzag"), "seq", "64K..128K")
    >>> [(row["value"], row["below"]) for row in found]
    [(None, 'b')]
    """
    key = field_of(along)
    low, high = limits(key, between)
    if not 0.0001 <= within < 1:
        raise InputError(f"`within` {within}: expected a share from 0.0001 to below 1, such as 0.01")
    axis = _Along((a, b), key, (low, high), within, extend=extend)
    axis.require_any()
    steps = axis.crossings(lambda found: found.step_time_s)
    ends = [axis.crossings(lambda found: found.interval and found.interval.low_s)]
    ends.append(axis.crossings(lambda found: found.interval and found.interval.high_s))
    rows = []
    for one in steps:
        near = [_nearest(one, found) for found in ends]
        known = [one.value, *(value for value in near if value is not None)]
        bounds = (None, None) if None in near else (min(known), max(known))
        rows.append(dict(zip(("value", "low", "high"), (one.value, *bounds), strict=True)))
        rows[-1] |= {"below": one.below, "above": one.above}
    last = steps[-1].above if steps else axis.faster(axis.point(high), lambda found: found.step_time_s)
    rows.append({"value": None, "low": None, "high": None, "below": last, "above": last})
    found = Crossings(rows)
    found.points = Table(axis.played)
    answer = of_crossings(key, (low, high), axis.names, rows, found.points.rows)
    return found.answering(answer, grounds_of(axis.winner(steps[0].value if steps else high)))


class _Along:
    """Two setups along one key."""

    def __init__(
        self, both: tuple[Setup, Setup], key: str, ends: tuple[float, float], within: float, *, extend: bool
    ) -> None:
        (self._low, self._high), self._within = ends, within
        self._both, self._key, self._extend = both, key, extend
        self._known: dict[str, tuple[Step | None, Step | None]] = {}

    def point(self, value: float) -> _Point:
        """Return the nearest value that the key can have."""
        if self._key == "seq":
            value = max(_MULTIPLE, round(value / _MULTIPLE) * _MULTIPLE)
        elif "." not in self._key:
            value = round(value)
        return _Point(f"{value:.12g}" if "." in self._key else str(int(value)), value)

    def faster(self, point: _Point, figure: Figure) -> str:
        """Return which of both is faster at a point, by one of their times: a where they are alike, none where neither
        can be played and fits.
        """
        if point.text not in self._known:
            a, b = (_predicted(setup, self._key, point.text, extend=self._extend) for setup in self._both)
            self._known[point.text] = a, b
        one, other = self._known[point.text]
        if one is None or other is None:
            return "a" if one else "b" if other else ""
        mine, others = figure(one), figure(other)
        return "b" if mine is not None and others is not None and mine > others else "a"

    @property
    def names(self) -> dict[str, str]:
        """Return what both are called: by their stacks or schedules, where these differ."""
        named = [str(one.stack or schedule_name(one.played)) for one in self._both]
        return dict(zip("ab", named if named[0] != named[1] else ("the first", "the second"), strict=True))

    def winner(self, value: float) -> Step:
        """Return the faster one at a value, or at the nearest one at which one of them can be played and fits."""
        known = sorted(self._known.items(), key=lambda one: abs(math.log(float(one[0]) / value)))
        both = next(both for _, both in known if any(both))
        return min((one for one in both if one), key=lambda one: one.step_time_s)

    @property
    def played(self) -> list[dict[str, float | None]]:
        """Return the seconds of both wherever they were asked for."""
        return [
            {"value": float(text), "a_s": a.step_time_s if a else None, "b_s": b.step_time_s if b else None}
            for text, (a, b) in sorted(self._known.items(), key=lambda known: float(known[0]))
        ]

    def crossings(self, figure: Figure) -> list[_Crossing]:
        """Return where the faster one changes."""
        found = []
        for begin, end in pairwise(self._points):
            while (below := self.faster(begin, figure)) != self.faster(end, figure):
                begin = self._bisected(begin, end, below, figure)  # noqa: PLW2901 - what is left of the range
                found.append(_Crossing(begin.value, below, self.faster(begin, figure)))
        return found

    def require_any(self) -> None:
        """Raise InputError where neither can be played and fits anywhere."""
        if not any(self.faster(point, lambda found: found.step_time_s) for point in self._points):
            ends = f"{self._points[0].text}..{self._points[-1].text}"
            raise InputError(f"`along` {self._key}={ends}: neither can be played and fits; choose another range")

    @property
    def _points(self) -> list[_Point]:
        """Values at equal ratios."""
        ratio = (self._high / self._low) ** (1 / (_POINTS - 1))
        return [self.point(self._low * ratio**number) for number in range(_POINTS)]

    def _bisected(self, begin: _Point, end: _Point, below: str, figure: Figure) -> _Point:
        """Return the first point at which the other one is faster, as exactly as it is to be known."""
        while end.value / begin.value > 1 + self._within:
            middle = self.point(math.sqrt(begin.value * end.value))
            if middle.text in {begin.text, end.text}:
                break
            if self.faster(middle, figure) == below:
                begin = middle
            else:
                end = middle
        return end


def _predicted(setup: Setup, key: str, text: str, *, extend: bool) -> Step | None:
    """Return a step, None where it cannot be played or does not fit."""
    try:
        found = asked_step(changed(setup, {key: text}), extend=extend)
    except LongstepError:
        return None
    return None if found.fits is False else found


def _nearest(one: _Crossing, found: list[_Crossing]) -> float | None:
    """Return the crossing of the same direction that is nearest to one, None if there is none."""
    alike = [other.value for other in found if (other.below, other.above) == (one.below, one.above)]
    return min(alike, key=lambda value: abs(math.log(value / one.value)), default=None)
