"""What is computed of an object once: kept beside it, and dropped with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
R = TypeVar("R")


def kept(function: Callable[[T], R]) -> Callable[[T], R]:
    """Return a function of one object that computes its result once per object.

    The object is told from others by identity or its own ``__eq__``, and must not be reached from the result, which
    would keep it alive for ever.
    """
    results: WeakKeyDictionary[T, R] = WeakKeyDictionary()

    @wraps(function)
    def once(of: T) -> R:
        if of not in results:
            results[of] = function(of)
        return results[of]

    return once
