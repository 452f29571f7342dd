"""What is computed of an object once: kept beside it, and dropped with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import ReferenceType, ref

T = TypeVar("T")
R = TypeVar("R")


def kept(function: Callable[[T], R]) -> Callable[[T], R]:
    """Return a function of one object that computes its result once per object.

    It is for objects that nothing changes, by identity: whether they are equal to another, or can be hashed, does not
    matter. The object must not be reached from the result, which would keep it alive for ever.
    """
    results: dict[int, tuple[ReferenceType[T], R]] = {}

    @wraps(function)
    def once(of: T) -> R:
        number = id(of)
        if number not in results:
            result = function(of)
            results[number] = (ref(of, lambda _: results.pop(number, None)), result)
        return results[number][1]

    return once
