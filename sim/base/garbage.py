"""Python's garbage collector, kept off while a schedule is built, proved, played or reported on, and rare otherwise.

A schedule is very many small objects in no cycle, which the collector would walk again and again. So are modules, which
stay.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_LOCK = threading.Lock()
_users = 0
_was_on = False


def collect_rarely() -> None:
    """Let the process of a command collect when 50,000 objects more are alive, where Python would after 700."""
    gc.set_threshold(50_000, 20, 50)


@contextlib.contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Do something, as a ``with`` block or a decorated function, without the collection of cyclic garbage.

    It may nest and run in several threads: what held before the first of them holds again after the last.
    """
    global _users, _was_on  # noqa: PLW0603 - the collector is one for the whole process
    with _LOCK:
        if not _users:
            _was_on = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if not _users and _was_on:
                gc.enable()
