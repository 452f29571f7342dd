"""Several steps side by side: a row for each combination of listed options, in a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

import longstep
from experiments.evidence.peaks import BESIDE, PEAK, beside_in
from experiments.verbs.cli import with_flags
from experiments.verbs.shared.selection import COUNTS, Selection
from experiments.verbs.shared.terminal import fits
from sim.base.errors import InputError
from sim.base.units import FEW, length, number, size
from sim.engine.results.report import Report
from sim.setup.answers.answer import degrees, interval, sentence, step_time
from sim.setup.answers.places import best, is_choice, place_of, shown, token_s, won
from sim.setup.names import schedule_name, scope_title, tokens


class Asked(NamedTuple):
    """A row: what it has of each list, and what came out."""

    varied: Mapping[str, str]
    schedule: str
    """As it was named, or is meant."""
    found: longstep.Prediction | None
    why: str = ""
    """It cannot be played."""


def set_up(selection: Selection) -> longstep.Setup | InputError:
    """Return the setup of a row, or why there is none: a file, or a planner of documents, may refuse it."""
    try:
        return selection.setup()
    except InputError as error:
        return error


def played(varied: Mapping[str, str], name: str, setup: longstep.Setup | InputError) -> Asked:
    """Return the prediction of a row, or why there is none; ``name`` is that of a schedule without a setup."""
    if isinstance(setup, InputError):
        return Asked(varied, name, None, str(setup))
    name = schedule_name(setup.played)
    try:
        return Asked(varied, name, setup.predicted())
    except InputError as error:
        return Asked(varied, name, None, str(error))


def require_any(rows: Sequence[Asked]) -> None:
    """Raise InputError where no row can be played, with the reason of the first."""
    if not any(row.found for row in rows):
        reasons = list(dict.fromkeys(row.why for row in rows))
        raise InputError(reasons[0] if len(reasons) == 1 else f"none of {len(rows)} can be played: {reasons[0]}")


def json_rows(rows: Sequence[Asked]) -> list[dict[str, Any]]:
    """Return the main figures of all rows. A row that cannot be played has its values of the lists, and why."""
    figures = iter(longstep.table(row.found for row in rows if row.found).rows)
    told: list[dict[str, Any]] = []
    for row in rows:
        typed = {key: _typed(key, value) for key, value in row.varied.items()}
        own = {**next(figures), "answer": row.found.answer} if row.found else {"schedule": row.schedule}
        told.append({**typed, **own, "error": row.why})
    keys = dict.fromkeys(key for row in told for key in row)
    return [{key: row.get(key) for key in keys} for row in told]


def answer(rows: Sequence[Asked], figures: Sequence[Mapping[str, Any]]) -> str:
    """Return who is fastest: of one step by several schedules, or at each place."""
    keys, found = _keys(rows), [row.found for row in rows if row.found]
    headers = [one.checked.schedule.header for one in found]
    alike = len({(one.mesh.size, one.mesh.dp, one.workload.batch) for one in headers}) == 1
    if set(keys) <= {"schedule"} and alike:
        return sentence(found)
    work = found[0].checked.schedule.header.workload
    return best(figures, keys, rows[0].schedule, scope=work.scope, layers=work.layers)


def decisive(rows: Sequence[Asked], figures: Sequence[Mapping[str, Any]]) -> longstep.Prediction:
    """Return the prediction whose basis is printed: the longest of those that win."""
    winners = [rows[one.row].found for one in won(figures, _keys(rows), rows[0].schedule)]
    able = [one for one in winners if one] or [row.found for row in rows if row.found]
    return max(able, key=lambda one: one.step_time_s)


def rows_table(rows: Sequence[Asked]) -> Table:
    """Return the main figures of all rows, at each place the fastest first, and why others cannot be played."""
    keys = [key for key in _keys(rows) if key != "schedule"]
    first = next(row.found for row in rows if row.found)
    work, spec = first.checked.schedule.header.workload, first.cluster.spec
    ranks = {row.found.checked.schedule.num_ranks for row in rows if row.found}
    about = [
        f"{scope_title(work.scope, work.layers)} of {work.model.name}" if "model" not in keys else "",
        f"S {length(work.real_seq)}" if "seq" not in keys else "",
        f"{ranks.pop()} x {spec.gpu.name}" if len(ranks) == 1 and "cluster" not in keys else "",
    ]
    heads = (*keys, "schedule", "step", "90 % interval", "tokens/s/GPU", "MFU", PEAK, "fits", "bound by")
    caption = BESIDE if {"cluster", "software"} & {*keys} else beside_in(first.room, spec)
    title = ", ".join(filter(None, about))
    table = Table(*heads, title=title, title_justify="left", caption=caption, caption_justify="left")
    for row in _ordered(rows):
        varied = [shown(key, row.varied[key]) if key == "seq" else row.varied[key] for key in keys]
        if row.found is None:
            table.add_row(*varied, row.schedule, *[""] * (len(heads) - len(keys) - 2), with_flags(row.why))
        else:
            table.add_row(
                *varied, f"{row.schedule} {degrees(row.found)}".strip(), *_figures(row.found, row.found.figures)
            )
    return table


def _figures(one: longstep.Prediction, found: Report) -> tuple[str, ...]:
    return (
        step_time(one),
        interval(one),
        number(found.tokens_per_s_per_gpu, FEW),
        "" if found.mfu is None else f"{100 * found.mfu:.3g} %",
        size(found.peak_hbm_bytes),
        fits(found),
        found.bound_by,
    )


def _ordered(rows: Sequence[Asked]) -> list[Asked]:
    """Return rows by place, in the order of places: the fastest first, and last what cannot be played."""
    keys = _keys(rows)
    places = list(dict.fromkeys(place_of(row.varied, keys) for row in rows))

    def order(row: Asked) -> tuple[int, bool, float]:
        rate = row.found.figures.tokens_per_s_per_gpu if row.found else 1.0
        return places.index(place_of(row.varied, keys)), row.found is None, token_s({"tokens_per_s_per_gpu": rate})

    return sorted(rows, key=order)


def _keys(rows: Sequence[Asked]) -> list[str]:
    """Return what is varied: places first, then choices."""
    return sorted(rows[0].varied, key=is_choice)


def _typed(key: str, value: str) -> Any:
    """Return what is varied as the library takes it."""
    if key == "seq":
        return tokens(key, value)
    return int(value) if key in COUNTS else value
