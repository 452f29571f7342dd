"""Worker processes that predict cases in parallel."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from sim.base.errors import InputError
from sim.base.workers import end_with_parent

Of = TypeVar("Of")
R = TypeVar("R")


def workers(count: int | None = None) -> ProcessPoolExecutor:
    """Return so many processes, by default one for each core; they end when this one does, however that ends."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), end_with_parent)


def called(function: Callable[[Of], R], items: Sequence[Of], name: Callable[[Of], str]) -> Iterator[R]:
    """Yield what a function returns of each item, in their order, by ``workers``.

    Where a process is killed, one alone goes on with what is left, so that it is known which item ends it; raises
    InputError with its ``name``.
    """
    if not items:
        return
    done = 0
    for processes in (None, 1):
        with workers(processes) as pool:
            try:
                for found in pool.map(function, items[done:]):
                    done += 1
                    yield found
            except BrokenProcessPool:
                continue
        return
    raise InputError(
        f"{name(items[done])}: the process that predicts it was killed twice, as for lack of memory; take it out, or "
        f"make it smaller"
    )
