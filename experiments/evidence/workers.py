"""Processes that predict cases beside each other."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from sim.errors import InputError

Of = TypeVar("Of")
R = TypeVar("R")


def called(function: Callable[[Of], R], items: Sequence[Of], name: Callable[[Of], str]) -> Iterator[R]:
    """Yield what a function returns of each item, in their order, by as many processes as there are cores; they end
    when this one does, however that ends.

    Where a process is killed, one alone goes on with what is left, so that it is known which item ends it; raises
    InputError with its ``name``.
    """
    if not items:
        return
    done = 0
    for processes in (None, 1):
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_end_with_parent) as pool:
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


def _end_with_parent() -> None:
    """Let this worker end when its parent does, which a signal may end before it can say so."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
