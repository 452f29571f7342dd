"""Portions of a sweep: rows that one process predicts in turn, since their schedule is one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

from sim.accounts.breakdown import PARTS, PartName
from sim.accounts.memory import TERMS
from sim.base.errors import LongstepError
from sim.compare.axes import changed
from sim.engine.intervals.interval import Interval
from sim.engine.results.report import Report, report
from sim.engine.results.room import Room
from sim.plan.extended import Extended
from sim.plan.told import Step, asked_step
from sim.setup.answers.answer import degrees, degrees_on
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup

_LARGEST = 64
"""Rows of a portion: what is lost where a process dies, and is played again."""

Row = dict[str, Any]

FIGURES = (
    "degrees", "padding", "step_time_s", "low_s", "high_s", "tokens_per_s_per_gpu", "mfu", "ranks", "peak_hbm_bytes",
    "peak_host_bytes", "fits", "free_bytes", "bound_by",
)  # fmt: skip
COLUMNS = (*FIGURES, *(f"{part}_s" for part in PARTS), *(f"{term.replace(' ', '_')}_bytes" for term in TERMS), "error")
"""Of every row behind what is varied: degrees as ``U 4 R 2``; tokens of padding; seconds of the critical rank by part,
bytes of the GPU's peak by term; ``free_bytes`` is what is left beside that peak and what no buffer can have
(``topology.reserved``)."""
PLAYED = "played"
"""A column more of rows that were told by few layers and micro-batches: by how many of them."""


class Portion(NamedTuple):
    """Some rows of a sweep that one process plays."""

    numbers: tuple[int, ...]
    setup: Setup
    rows: tuple[Mapping[str, str], ...]
    """Of each what is varied."""
    intervals: bool
    """Whether the 90 % interval is asked for, which takes two plays more."""
    bounds: bool
    """Whether it is asked what bounds a step, which takes longer than to play it."""
    extend: bool
    """Whether steps are told by few of their layers and micro-batches."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Of its rows, behind what is varied."""
        return (*COLUMNS, PLAYED) if self.extend else COLUMNS


def portions(setup: Setup, rows: Mapping[int, Mapping[str, str]], workers: int, **asked: bool) -> list[Portion]:
    """Return numbered rows in portions of neighbours that share a schedule, small enough for workers to end together;
    ``asked`` are the last fields of Portion.
    """
    size, found = max(1, min(_LARGEST, len(rows) // (4 * workers))), []
    for _, numbered in groupby(rows.items(), lambda one: _parted(one[1])[0]):
        alike = list(numbered)
        for start in range(0, len(alike), size):
            numbers, some = zip(*alike[start : start + size], strict=True)
            found.append(Portion(numbers, setup, some, **asked))
    return found


def _parted(row: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return what is varied of a row outside its cluster, and inside it."""
    cluster = {key: value for key, value in row.items() if key.startswith("cluster.")}
    return {key: value for key, value in row.items() if key not in cluster}, cluster


def play(portion: Portion) -> list[Row]:
    """Return the rows of a portion; what cannot be played is a row that says why."""
    return [_row(portion, row) for row in portion.rows]


def _row(portion: Portion, row: Mapping[str, str]) -> Row:
    found: Row = {**{key: str(value) for key, value in row.items()}, **dict.fromkeys(portion.columns), "error": ""}
    try:
        return found | _figures(_step(portion, row), portion)
    except LongstepError as refused:
        return found | {"error": str(refused)}
    except MemoryError:
        return found | {"error": "this machine has too little memory for it"}


class _Last(NamedTuple):
    """The step before, whose schedule serves another machine too."""

    setup: Setup
    beside: dict[str, str]
    extend: bool
    step: Step


_last: list[_Last] = []
"""Of this process."""


def _step(portion: Portion, row: Mapping[str, str]) -> Step:
    beside, cluster = _parted(row)
    if cluster and _last and _last[0][:-1] == (portion.setup, beside, portion.extend):
        return _last[0].step.replace(set=cluster)
    _last.clear()
    found = asked_step(changed(portion.setup, row), extend=portion.extend)
    _last.append(_Last(portion.setup, beside, portion.extend, found))
    return found


def _figures(step: Step, portion: Portion) -> Row:
    """Return the columns of a step."""
    within = step.interval if portion.intervals else None
    if isinstance(step, Extended):
        return _told(step, within, portion)
    return columns(step, report(step.simulation, with_bound=portion.bounds), within)


def columns(prediction: Prediction, found: Report, within: Interval | None) -> Row:
    """Return the columns of a row (``COLUMNS``) but for its error, by the figures and the interval of a prediction."""
    return {
        "degrees": degrees(prediction),
        "padding": prediction.checked.schedule.header.workload.padding,
        **_within(found.step_time_s, within),
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
        "mfu": found.mfu,
        "ranks": prediction.checked.schedule.num_ranks,
        "peak_hbm_bytes": found.peak_hbm_bytes,
        "peak_host_bytes": found.peak_host_bytes,
        "fits": found.verdict,
        "free_bytes": None if found.room is None else found.room.free_bytes,
        "bound_by": found.bound_by or None,
        **_parts(found.breakdown, found.room),
    }


def _told(step: Extended, within: Interval | None, portion: Portion) -> Row:
    """Return the columns of a step that was told by few. What one rank has of its host's memory is not known."""
    found = step.setup.resolved()
    return {
        "degrees": degrees_on(found.schedule, found.mesh),
        "padding": found.workload.padding,
        **_within(step.step_time_s, within),
        "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "mfu": step.mfu,
        "ranks": found.mesh.size,
        "peak_hbm_bytes": sum(step.room.terms.values()),
        "fits": step.room.verdict,
        "free_bytes": step.room.free_bytes,
        "bound_by": step.bound_by if portion.bounds else None,
        PLAYED: step.played,
        **_parts(step.breakdown, step.room),
    }


def _within(step_s: float, within: Interval | None) -> Row:
    low_s, high_s = within or (None, None)
    return {"step_time_s": step_s, "low_s": low_s, "high_s": high_s}


def _parts(seconds: Mapping[PartName, float], room: Room | None) -> Row:
    """Return what the time and the memory of a step consist of."""
    return {
        **{f"{part}_s": taken_s for part, taken_s in seconds.items()},
        **{f"{term.replace(' ', '_')}_bytes": nbytes for term, nbytes in (room.terms if room else {}).items()},
    }
