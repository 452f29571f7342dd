"""A comparison as one HTML page: a table, a parity plot, a timeline and the parts of the step.

The page stands alone: it loads nothing, and its figures lie in it as one JSON object, ``Contents``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from experiments.evidence.executed.comparison import Comparison, KindRow, Measured, comparison_lines
from experiments.evidence.provenance import evidence_lines
from experiments.pages.drawn.pictures import Drawn, Picture, is_narrow, picture
from experiments.pages.drawn.plots import CIRCLE, SQUARE, TRIANGLE, Point, parity_plot, plottable, times_in_words
from experiments.pages.drawn.render import render
from experiments.pages.drawn.timeline import DIGITS, family_colours
from sim.accounts.breakdown import PARTS, PartName, breakdown
from sim.accounts.trace import Row, Trace
from sim.base.units import percent
from sim.schedule.ir.ops import KINDS

_BAND = 0.10
"""Share of the measured time that the parity plot shades."""


class Span(NamedTuple):
    """When an op happened, in seconds since the step began."""

    posted_s: float
    begin_s: float
    end_s: float


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table: all ops of one kind, or the step."""

    name: str
    family: str
    part: str
    count: int
    times: Measured
    of_step: float
    """Simulated less measured, over the measured step: how much this row's error matters."""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of one rank: the same ops, simulated and executed."""

    rank: int
    stream: str
    ops: list[int]
    """Number in the rank's program; the lists below have the same order."""
    labels: list[int]
    """Index into the labels of the page."""
    kinds: list[int]
    """Index into the kinds of the page."""
    simulated: list[Span]
    executed: list[Span]


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the step of one rank went, in seconds."""

    rank: int
    simulated: dict[PartName, float]
    executed: dict[PartName, float]


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page draws."""

    schedule_hash: str
    end_s: float
    """End of the longer of both steps."""
    step: Kind
    kinds: list[Kind]
    labels: list[str]
    lanes: list[Lane]
    breakdown: list[Parts]


def page(title: str, found: Comparison, simulated: Trace, executed: Trace, *, rests_on: Sequence[str] = ()) -> str:
    """Return the page of a comparison, with the simulated and one executed trace of its schedule, and the lines of what
    the prediction ``rests_on``.
    """
    inside = contents(found, simulated, executed)
    rows = [*inside.kinds, inside.step]
    return render(
        "page.html.j2",
        title=title,
        answer=found.answer,
        lines=comparison_lines(found),
        rests_on=rests_on,
        evidence=evidence_lines(found.report.evidence),
        parity=_parity(rows),
        unplotted=[row.name for row in rows if not plottable(row.times)],
        parts=PARTS,
        inside=inside,
        data=msgspec.to_builtins(inside),
        family_hues=family_colours(),
    )


def _parity(rows: Sequence[Kind]) -> Picture:
    """Return the plot of all op kinds and the step; the page colours it like the timeline."""
    points = [
        Point(
            times=row.times,
            shape=SQUARE if row.family == "step" else TRIANGLE if row.part == "backward" else CIRCLE,
            look="inked",
            row=number,
            tip=_tip(row),
            name=row.name,
        )
        for number, row in enumerate(rows)
    ]
    about = "Simulated against measured time of every op kind and the step"

    def lay_out(width: float) -> Drawn:
        return Drawn(parity_plot(points, [_BAND], width, 320 if is_narrow(width) else 430, about))

    return picture(lay_out, 500)


def _tip(row: Kind) -> str:
    error = f"error {percent(row.times.error)}, of the step {100 * row.of_step:+.2f} %"
    return f"{row.name}\n{times_in_words(row.times)}\n{error}"


def contents(found: Comparison, simulated: Trace, executed: Trace) -> Contents:
    """Return what the page shows, as data."""
    assert found.schedule_hash == simulated.schedule_hash == executed.schedule_hash, "traces of different schedules"
    labels = sorted({row.label for row in simulated.rows})
    return Contents(
        schedule_hash=found.schedule_hash,
        end_s=max(simulated.step_time_s, executed.step_time_s),
        step=_kind("step", "step", "", 0, found.step, found.step),
        kinds=[_kind_of(row, found.step) for row in found.kinds],
        labels=labels,
        lanes=_lanes(simulated, executed, labels, [(row.kind, row.part) for row in found.kinds]),
        breakdown=[
            Parts(rank=rank, simulated=breakdown(simulated, rank), executed=breakdown(executed, rank))
            for rank in range(simulated.num_ranks)
        ],
    )


def _kind_of(row: KindRow, step: Measured) -> Kind:
    family = KINDS[row.kind].meta.family
    return _kind(f"{row.kind} {row.part}", family, row.part, row.count, row.times, step)


def _kind(name: str, family: str, part: str, count: int, times: Measured, step: Measured) -> Kind:
    missed_s = times.simulated_s - times.median_s
    of_step = missed_s / step.median_s if step.median_s else 0.0
    return Kind(name=name, family=family, part=part, count=count, times=times, of_step=of_step)


def _lanes(simulated: Trace, executed: Trace, labels: list[str], kinds: list[tuple[str, str]]) -> list[Lane]:
    """Return the streams by rank, compute first; the traces are joined on rank and op."""
    label_of = {label: number for number, label in enumerate(labels)}
    kind_of = {kind: number for number, kind in enumerate(kinds)}
    partner = {(row.rank, row.op): row for row in executed.rows}
    rows_of: dict[tuple[int, bool, str], list[Row]] = {}
    for row in simulated.rows:
        rows_of.setdefault((row.rank, row.stream != "compute", row.stream), []).append(row)
    return [
        Lane(
            rank=rank,
            stream=stream,
            ops=[row.op for row in rows],
            labels=[label_of[row.label] for row in rows],
            kinds=[kind_of[row.kind, row.part] for row in rows],
            simulated=[_span(row) for row in rows],
            executed=[_span(partner[row.rank, row.op]) for row in rows],
        )
        for (rank, _, stream), rows in sorted(rows_of.items())
    ]


def _span(row: Row) -> Span:
    return Span(round(row.posted_s, DIGITS), round(row.begin_s, DIGITS), round(row.end_s, DIGITS))
