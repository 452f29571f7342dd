"""What is kept beside an object is computed once, and goes with it."""

from __future__ import annotations

import gc
import weakref

from sim.base.kept import kept


class Owner:
    pass


def test_once_per_object_also_where_there_is_nothing() -> None:
    asked: list[Owner] = []

    @kept
    def nothing(of: Owner) -> None:
        asked.append(of)

    first, second = Owner(), Owner()
    for owner in (first, second, first, second):
        assert nothing(owner) is None
    assert asked == [first, second]


def test_it_goes_with_its_object() -> None:
    @kept
    def made(of: Owner) -> Owner:
        return Owner()

    owner = Owner()
    left = weakref.ref(made(owner))
    assert left() is made(owner)
    del owner
    gc.collect()
    assert left() is None
