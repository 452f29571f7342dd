"""A sweep over anything: setups varied along axes, a row each, in as many processes as are wanted, or on a cluster."""

from __future__ import annotations

import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path

from sim.base.errors import InputError
from sim.base.workers import follow_parent
from sim.compare.axes import axes_of, combinations
from sim.compare.journal import Journal
from sim.compare.portions import COLUMNS, PLAYED, Portion, Row, play, portions
from sim.setup.answers.table import Table
from sim.setup.names import at_least_one
from sim.setup.setup import Setup
from topology.host import num_cores

Played = Iterator[tuple[Portion, list[Row]]]
Progress = Callable[[int, int, float], object]
"""Told how many rows are done, of how many, and the seconds that the others will take."""
_RETRIES = 3
"""How often a portion is played again whose worker was lost."""


def explore(
    setup: Setup,
    vary: Mapping[str, Sequence[object] | str],
    *,
    zipped: Sequence[Sequence[str]] = (),
    intervals: bool = True,
    bounds: bool = True,
    extend: bool = False,
    jobs: int | None = None,
    dask: str | None = None,
    journal: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Table:
    """Return the predictions of all combinations of some values, a row each, in their order.

    ``vary`` has fields of ``Setup`` and keys of ``set``, each with a list of values or a range (``axes_of``); those
    that are ``zipped`` go together. Rows that share a schedule build and prove it once. ``jobs`` processes play them,
    by default as many as there are cores, or the workers of a Dask cluster at the address ``dask``. With ``extend``
    training steps are told by few layers and micro-batches, without proof or noise (``sim.plan.extended``), and a
    column ``played`` says by how many. With a ``journal``
    every finished portion is on the disk at once, and the same call goes on behind what it holds. What cannot be played
    is a row whose ``error`` says why. Raises InputError, before anything is played, for what cannot be varied, a
    journal of another sweep (unless ``force``), or a cluster that does not answer.

    >>> setup = Setup("ulysses", model="llama3-8b", cluster="hgx-h100", layers=1)
    >>> found = explore(setup, {"seq": "32K..128K*2"}, jobs=1)
    >>> [row["seq"] for row in found], found[0]["step_time_s"] < found[1]["step_time_s"] < found[2]["step_time_s"]
    ([32768, 65536, 131072], True)
    """
    rows = dict(enumerate(combinations(axes_of(vary, zipped))))
    workers = min(num_cores() if jobs is None else at_least_one("jobs", jobs), len(rows))
    asked = {"intervals": intervals, "bounds": bounds, "extend": extend}
    sweep = f"{setup!r} {rows!r} {asked!r} {COLUMNS!r}"
    with Journal(Path(journal), sweep, force=force) if journal else nullcontext() as book:
        found: dict[int, Row] = dict(book.rows) if book else {}
        left = {number: row for number, row in rows.items() if number not in found}
        begin, before = time.monotonic(), len(found)
        for portion, played in _played(portions(setup, left, workers, **asked), workers, dask):
            if book:
                book.add(portion.numbers, played)
            found |= zip(portion.numbers, played, strict=True)
            if progress is not None:
                each_s = (time.monotonic() - begin) / (len(found) - before)
                progress(len(found), len(rows), each_s * (len(rows) - len(found)))
    return Table(_typed([found[number] for number in rows]))


def _typed(rows: list[Row]) -> list[Row]:
    """Return rows in which what is varied is a number wherever all of its values are."""
    for key in [key for key in rows[0] if key not in {*COLUMNS, PLAYED}]:
        for kind in (int, float):
            try:
                values = [kind(row[key]) for row in rows]
            except ValueError:
                continue
            rows = [{**row, key: value} for row, value in zip(rows, values, strict=True)]
            break
    return rows


def _played(left: list[Portion], workers: int, dask: str | None) -> Played:
    """Yield portions as they are finished."""
    if dask is not None:
        from sim.compare.dask import on_dask  # noqa: PLC0415 - what is distributed is optional

        yield from on_dask(left, dask)
    elif workers == 1 or len(left) < 2:
        yield from ((portion, play(portion)) for portion in left)
    else:
        yield from _in_processes(left, workers)


def _in_processes(left: list[Portion], workers: int) -> Played:
    """Yield portions that a pool plays. Where a process of it is killed, a new pool plays what is left."""
    for attempt in range(1 + _RETRIES):
        kind = "fork" if sys.platform == "linux" else "spawn"
        with warnings.catch_warnings():
            # Children of a process with threads compute alone, and take no lock that a thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            pool = ProcessPoolExecutor(workers, multiprocessing.get_context(kind), follow_parent)
        try:
            waiting = {pool.submit(play, portion): portion for portion in left}
            for future in as_completed(waiting):
                rows = future.result()
                left = [portion for portion in left if portion is not waiting[future]]
                yield waiting[future], rows
            return
        except BrokenProcessPool:
            if attempt == _RETRIES:
                raise InputError(
                    f"processes were killed {1 + _RETRIES} times, as for lack of memory: choose fewer `jobs`"
                ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
