"""Ctrl-C while processes are started."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Let no Ctrl-C interrupt what starts processes, nor reach the server before it can ignore it: one that comes
    meanwhile reaches this process when this ends.
    """
    heard: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # The mask is this thread's and its children's. Where the process has other threads, as in a notebook, the signal
    # reaches one of those, and Python would still interrupt this one.
    waits = callable(handler) and threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if waits:
        signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        if waits:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if heard:
            signal.raise_signal(signal.SIGINT)
