"""Processes that predict cases beside each other."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from sim.setup.workers import end_with_parent


def workers(count: int | None = None) -> ProcessPoolExecutor:
    """Return so many processes, by default one for each core; they end when this one does, however that ends."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), end_with_parent)
