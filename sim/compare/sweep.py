"""Many what-ifs of one schedule: figures of its machine varied, played in as many processes as are wanted."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from sim.accounts.breakdown import PARTS
from sim.base.errors import InputError, ScheduleError
from sim.base.workers import follow_parent
from sim.engine.play.jitter import require_seeds
from sim.engine.play.simulate import Prepared, Simulation
from sim.engine.results.report import report
from sim.setup.answers.table import Table
from sim.setup.answers.what_if import what_if
from sim.setup.names import at_least_one, changed_cluster, text_of
from sim.setup.prediction import Prediction
from sim.setup.unnamed_software import within
from topology.host import num_cores
from topology.specs import ClusterSpec

_ROOT = "cluster."
_CHUNKS = 16
"""Portions that each process takes its share in: few enough to cost nothing, enough for all to end together."""

_FIGURES = ("step_time_s", "low_s", "high_s", "tokens_per_s_per_gpu", "mfu", "bound_by")

Progress = Callable[[int, int, float], object]
"""Told how many what-ifs are done, of how many, and the seconds that the others will take."""


class _WhatIf(NamedTuple):
    """One machine to play on."""

    changes: dict[str, str]
    spec: ClusterSpec


class _Sweep(NamedTuple):
    """All that a process needs, which it has from the one that it was forked from."""

    simulation: Simulation
    what_ifs: list[_WhatIf]
    intervals: bool
    bounds: bool
    seeds: int


_forked: _Sweep | None = None
"""What the processes of a pool share with the one that started them."""


def sweep(
    prediction: Prediction,
    vary: Mapping[str, Sequence[object]],
    *,
    intervals: bool = True,
    bounds: bool = True,
    seeds: int = 1,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Table:
    """Return what becomes of a step under all combinations of some figures of its cluster, a row each.

    Values are as in ``set``: ``{"cluster.nvlink.bytes_per_s": ["/2", "*1", "*2"]}``. The schedule is neither built nor
    proved again. Without ``intervals`` a what-if takes two plays less, without ``bounds`` the one that says what bounds
    it (``bound_by`` is then empty). One seed of noise is played, that of the prediction's own step, unless ``seeds``
    asks for the median of more. ``processes`` is by default the number of cores; rows and their order do not depend on
    it. Where a combination cannot be played its figures are None and ``error`` says why. The parts of a step are those
    of its critical rank. Raises InputError for a value that a cluster cannot have, before anything is played.

    >>> from sim.setup.predict import predict
    >>> p = predict("ulysses", model="llama3-8b", seq="64K", cluster="hgx-h100", layers=2)
    >>> found = sweep(p, {"cluster.nvlink.bytes_per_s": ["/2", "*1", "*2"]}, processes=1)
    >>> [row["step_time_s"] < p.step_time_s for row in found.rows]
    [False, False, True]
    """
    what_ifs = _what_ifs(prediction, vary)
    wanted = min(num_cores() if processes is None else at_least_one("processes", processes), len(what_ifs))
    asked = _Sweep(prediction.simulation, what_ifs, intervals, bounds, require_seeds(seeds))
    found: list[dict[str, Any]] = [{}] * len(what_ifs)
    begin = time.monotonic()
    with _rows(asked, wanted) as rows:
        for done, (number, row) in enumerate(rows, 1):
            found[number] = row
            if progress is not None:
                progress(done, len(what_ifs), (time.monotonic() - begin) / done * (len(what_ifs) - done))
    return Table(found).answering(what_if(found, list(vary)))


def _what_ifs(prediction: Prediction, vary: Mapping[str, Sequence[object]]) -> list[_WhatIf]:
    """Return all combinations; raises InputError for what is no figure of a cluster."""
    if not vary:
        raise InputError("`vary` is empty: give it keys such as cluster.nvlink.bytes_per_s, each with some values")
    for key, values in vary.items():
        if not key.startswith(_ROOT):
            raise InputError(f"`vary` {key}: expected a figure of the cluster, such as cluster.nvlink.bytes_per_s")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise InputError(f"`vary` {key} {values!r}: expected a list of values, such as ['/2', '*1', '*2']")
    spec, found = prediction.cluster.spec, []
    for values in product(*vary.values()):
        changes = dict(zip(vary, map(text_of, values), strict=True))
        pairs = [(key.removeprefix(_ROOT), value) for key, value in changes.items()]
        found.append(_WhatIf(changes, changed_cluster(spec, pairs, "`vary` cluster.")))
    return found


@contextlib.contextmanager
def _rows(asked: _Sweep, processes: int) -> Iterator[Iterator[tuple[int, dict[str, Any]]]]:
    """Yield the rows as they come, with their numbers; in this process where there is no other."""
    global _forked  # noqa: PLW0603 - what is inherited by a fork has to be found from a module
    numbers = range(len(asked.what_ifs))
    if processes == 1 or sys.platform != "linux":
        yield ((number, _row(asked, number)) for number in numbers)
        return
    _row(asked, 0)  # what is kept beside the schedule is then there for all
    _forked = asked
    gc.freeze()
    try:
        with warnings.catch_warnings():
            # Children of a process with threads compute alone, and take no lock that a thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            pool = multiprocessing.get_context("fork").Pool(processes, follow_parent)
        with pool:
            yield pool.imap_unordered(_forked_row, numbers, max(1, len(numbers) // (processes * _CHUNKS)))
    finally:
        gc.unfreeze()
        _forked = None


def _forked_row(number: int) -> tuple[int, dict[str, Any]]:
    assert _forked is not None
    return number, _row(_forked, number)


def _row(asked: _Sweep, number: int) -> dict[str, Any]:
    """Play one what-if."""
    changes, spec = asked.what_ifs[number]
    one = asked.simulation
    figures: dict[str, Any] = dict.fromkeys((*_FIGURES, *PARTS))
    error = ""
    try:
        noise = one.noise if asked.seeds == 1 else one.jitter._replace(seeds=asked.seeds)
        played = Prepared(one.checked).play(one.cluster.like(spec), one.profile, noise, one.engine)
        found = report(played, with_bound=asked.bounds)
        low_s, high_s = (asked.intervals and within(played)) or (None, None)
        figures |= {"step_time_s": found.step_time_s, "low_s": low_s, "high_s": high_s}
        figures |= {"tokens_per_s_per_gpu": found.tokens_per_s_per_gpu, "mfu": found.mfu, "bound_by": found.bound_by}
        figures |= {str(part): taken_s for part, taken_s in found.breakdown.items()}
    except (InputError, ScheduleError) as refused:
        error = str(refused)
    return {**changes, **figures, "error": error}
