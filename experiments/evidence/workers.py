"""Processes that predict cases beside each other."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor


def workers() -> ProcessPoolExecutor:
    """Return as many processes as there are cores; they end when this one does, however that ends."""
    return ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent)


def _end_with_parent() -> None:
    """Let this worker end when its parent does, which a signal may end before it can say so."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
