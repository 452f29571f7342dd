"""Results that are kept for the objects that they were computed from, which cannot be hashed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")

_MOST = 16
"""Objects that are kept alive for their results, by function."""


def kept(compute: Callable[[Given], Made]) -> Callable[[Given], Made]:
    """Return a function that computes once per object: the same object, which nothing changes, not an equal one."""
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
