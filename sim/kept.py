"""What is computed of an object once: kept for the same object, which nothing changes, not for an equal one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

Given = TypeVar("Given")
Made = TypeVar("Made")

_MOST = 16
"""Objects that ``kept_of_recent`` keeps alive, by function."""


def kept(compute: Callable[[Given], Made]) -> Callable[[Given], Made]:
    """Return a function that computes once per object, and forgets what it computed when the object goes.

    The result must not refer to the object, which would never go then.
    """
    results: WeakKeyDictionary[Given, Made] = WeakKeyDictionary()

    @wraps(compute)
    def found(given: Given) -> Made:
        if given not in results:
            results[given] = compute(given)
        return results[given]

    return found


def kept_of_recent(compute: Callable[[Given], Made]) -> Callable[[Given], Made]:
    """Return a function that computes once per object, as long as it is one of the last few: for objects that can
    neither be hashed nor be referred to weakly.
    """
    results: OrderedDict[int, tuple[Given, Made]] = OrderedDict()

    @wraps(compute)
    def found(given: Given) -> Made:
        entry = results.get(id(given))
        if entry is None:
            entry = results[id(given)] = (given, compute(given))
            while len(results) > _MOST:
                results.popitem(last=False)
        return entry[1]

    return found
