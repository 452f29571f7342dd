"""Numbers of many ranks as one: what is computed with them holds of each, since all branches are those of each.

    a number of every rank ── the code of a rule, as with one number ──> a number of every rank, or Apart

A comparison is one answer for all. Where some ranks answer otherwise than others, it raises ``Apart`` with which do,
and the rule is run again for each of both. So a rule need not know whether it is given one number or many.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sim.schedule.proof.contents import Unclassed

Ints: TypeAlias = NDArray[np.int64]

ROOM = 1 << 62
"""All numbers are smaller: 64 bits hold them and, before it is said that they do not, twice as much."""


class Apart(Exception):  # noqa: N818 - nothing went wrong
    """Ranks differ in what a comparison says."""

    def __init__(self, where: NDArray[np.bool_]) -> None:
        super().__init__()
        self.where = where
        """Which say that it is so."""


class Many:
    """A number of each of some ranks, which differ. Numbers that are all equal are a plain one, see ``many``."""

    __slots__ = ("_hash", "each", "high", "low")

    def __init__(self, each: Ints, low: int, high: int) -> None:
        self.each, self.low, self.high = each, low, high
        """The numbers, and two between which they lie."""
        self._hash = 0

    def __hash__(self) -> int:
        """Numbers are kept in caches by all of them, so two that are equal for some ranks only are told apart."""
        self._hash = self._hash or hash(self.each.tobytes())
        return self._hash

    def __index__(self) -> int:
        raise Unclassed

    def __bool__(self) -> bool:
        return self != 0

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Many):
            if self.low > other.high or self.high < other.low or len(self.each) != len(other.each):
                return False
            return _of_all(self.each == other.each)
        if not isinstance(other, int):
            return NotImplemented
        return self.low <= other <= self.high and _of_all(self.each == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Number) -> bool:
        low, high, each = _bounds(other)
        if self.high < low:
            return True
        return self.low < high and _of_all(self.each < each)

    def __le__(self, other: Number) -> bool:
        low, high, each = _bounds(other)
        if self.high <= low:
            return True
        return self.low <= high and _of_all(self.each <= each)

    def __gt__(self, other: Number) -> bool:
        return not self <= other

    def __ge__(self, other: Number) -> bool:
        return not self < other

    def __add__(self, other: Number) -> Number:
        low, high, each = _bounds(other)
        return _made(self.each, operator.add, each, self.low + low, self.high + high)

    __radd__ = __add__

    def __neg__(self) -> Number:
        return Many(-self.each, -self.high, -self.low)

    def __sub__(self, other: Number) -> Number:
        low, high, each = _bounds(other)
        return _made(self.each, operator.sub, each, self.low - high, self.high - low)

    def __rsub__(self, other: int) -> Number:
        return -self + other

    def __mul__(self, other: Number) -> Number:
        low, high, each = _bounds(other)
        most = max(abs(self.low), abs(self.high)) * max(abs(low), abs(high))
        return _made(self.each, operator.mul, each, -most, most)

    __rmul__ = __mul__

    def __floordiv__(self, other: Number) -> Number:
        if isinstance(other, int) and other == 1:
            return self
        return _made(self.each, operator.floordiv, _divisor(other), min(self.low, 0), max(self.high, 0))

    def __mod__(self, other: Number) -> Number:
        return _made(self.each, operator.mod, _divisor(other), 0, _bounds(other)[1])

    def __abs__(self) -> Number:
        most = max(abs(self.low), abs(self.high))
        return many(np.abs(self.each), -most, most)


Number: TypeAlias = int | Many


def many(each: Ints, low: int, high: int) -> Number:
    """Return numbers of ranks, which lie between two others, as one."""
    first = each[0]
    if first == each[-1] and (each == first).all():
        return int(first)
    return Many(each, low, high)


def _made(a: Ints, by: Callable[[Any, Any], Ints], b: Ints | int, low: int, high: int) -> Number:
    """Return what is made of two numbers and lies between two others; raises Unclassed where these are too large."""
    if not -ROOM < low <= high < ROOM:
        raise Unclassed
    return many(by(a, b), low, high)


def _bounds(number: Number) -> tuple[int, int, Any]:
    return (number.low, number.high, number.each) if isinstance(number, Many) else (number, number, number)


def _divisor(number: Number) -> Any:
    """Return what numbers are divided by; raises Unclassed where it may be none that is positive."""
    low, _, each = _bounds(number)
    if low <= 0:
        raise Unclassed
    return each


def _of_all(said: NDArray[np.bool_]) -> bool:
    count = np.count_nonzero(said)
    if 0 < count < len(said):
        raise Apart(said)
    return bool(count)
