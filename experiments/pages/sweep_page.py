"""A sweep as one HTML page and as one figure: simulated against measured times, and the error over length.

Intervals are those of the repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from experiments.evidence.executed.diagnosis import DRIFT
from experiments.evidence.executed.record import Judged, Record, judged, provenance, quiet_repeats, summary
from experiments.pages.drawn import plots
from experiments.pages.drawn.figures import figure as alone
from experiments.pages.drawn.legend import BANDS, Kind, Looks
from experiments.pages.drawn.pictures import NARROW, Drawn, Picture, is_narrow, picture
from experiments.pages.drawn.render import render
from sim.base.units import length, percent
from sim.words.workload import parse_length

_WIDTH, _HEIGHT, _LOW = 560, 520, 340
"""Of the parity plot in pixels, on a wide screen; its height on a phone."""
_PANEL, _PANEL_HIGH, _PANEL_LOW = 250, 246, 190
"""Width, at least, and height of each plot of the error; its height on a phone."""
_CROWD, _WIDEST = 11, 800
"""Width that a mark of a plot of the error needs, and that the plot may take."""
_LEFT, _RIGHT = 56, 6
"""Margins of a plot of the error."""
_DODGE = 15
"""Pixels between schedules at one length, where there is room."""


class Panel(NamedTuple):
    """Cells that share a plot of the error over length, in the order in which these stand."""

    scope: str
    layers: int
    gpus: int


class Axes(NamedTuple):
    """What all plots of the error over length share."""

    frame: plots.Frame
    across: plots.Axis
    up: plots.Axis
    slot: float
    """Pixels that each length has for itself."""


def page(record: Record) -> str:
    """Return the page of a sweep."""
    cells = judged(record)
    looks = _looks(cells)
    answer, *more = summary(record)
    wide, narrow = (_panels(cells, looks, width) for width in (_roomy(cells, looks), NARROW))
    return render(
        "parity.html.j2",
        title=f"Simulated against measured: {record.title}",
        answer=f"{answer}.",
        notes=[*more, *provenance(record)],
        drift=DRIFT,
        cells=cells,
        tokens=[parse_length(one.cell.seq, "`seq`") for one in cells],
        parity=picture(partial(_parity, cells, looks), _WIDTH),
        unplotted=[one.cell.name for one in cells if not plots.plottable(one.times)],
        panels=list(map(Picture, wide, narrow)),
    )


def figure(record: Record) -> str:
    """Return both plots of a sweep as one SVG, light or dark as its reader prefers."""
    cells = judged(record)
    looks = _looks(cells)
    return alone(
        f"Simulated against measured step times: {record.title}",
        [_parity(cells, looks, NARROW), *_panels(cells, looks, NARROW)],
        _subtitles(record, cells),
    )


def _looks(cells: Sequence[Judged]) -> Looks:
    return Looks([Kind(one.cell.method, one.cell.gpus, one.cell.scope) for one in cells])


def _subtitles(record: Record, cells: Sequence[Judged]) -> tuple[str, str]:
    """Return what a figure says of its machine, and of what it shows."""
    machine = f"{record.profile.machine.gpu}; calibrated {record.profile.created[:10]}"
    repeats = "/".join(sorted({str(len(one.errors)) for one in cells}))
    return (
        f"{machine}; {quiet_repeats(cells)} repeats on a quiet machine",
        f"Bars: least to greatest of {repeats} repeats. Below: error of the step over its length; shaded: target",
    )


def _parity(cells: Sequence[Judged], looks: Looks, width: float) -> Drawn:
    points = [
        plots.Point(
            times=one.times,
            shape=looks.shape(one.cell.gpus),
            look=looks.look(one.cell.method, one.cell.scope),
            row=number,
            tip=_tip(one),
        )
        for number, one in enumerate(cells)
    ]
    about = "Simulated against measured step time of every cell, on logarithmic axes"
    plot = plots.parity_plot(points, BANDS, width, _LOW if is_narrow(width) else _HEIGHT, about)
    return Drawn(plot, looks.key(width))


def _tip(one: Judged) -> str:
    quiet = f"of the quiet ones in {one.met_when_quiet}" if one.met_when_quiet.of else "none was quiet"
    return (
        f"{one.cell.name}\n{plots.times_in_words(one.times)}\n"
        f"error {percent(one.times.error)} [{percent(one.low)} to {percent(one.high)}]\n"
        f"target {100 * one.cell.target:g} %: met in {one.met} repeats, {quiet}"
    )


def _roomy(cells: Sequence[Judged], looks: Looks) -> int:
    """Return the width of a plot of the error that has room for all schedules at all lengths."""
    lengths = {parse_length(one.cell.seq, "`seq`") for one in cells}
    needed = _LEFT + _RIGHT + _CROWD * len(lengths) * len(looks.schedules)
    return max(_PANEL, min(needed, _WIDEST))


def _panels(cells: Sequence[Judged], looks: Looks, width: float) -> list[Drawn]:
    """Return the error over length, a plot for every scope and number of ranks; all have the same axes."""
    members: dict[Panel, list[tuple[int, Judged]]] = {}
    for number, one in enumerate(cells):
        members.setdefault(Panel(one.cell.scope, one.cell.layers, one.cell.gpus), []).append((number, one))
    frame = plots.Frame(_LEFT, 26, width - _RIGHT, _panel_height(width) - 26)
    lengths = sorted({parse_length(one.cell.seq, "`seq`") for one in cells})
    across, slot = _lengths(lengths, frame)
    axes = Axes(frame, across, _errors(cells, frame), slot)
    return [Drawn(_panel(members[panel], looks, axes, width)) for panel in sorted(members)]


def _panel_height(width: float) -> int:
    return _PANEL_LOW if is_narrow(width) else _PANEL_HIGH


def _lengths(lengths: Sequence[int], frame: plots.Frame) -> tuple[plots.Axis, float]:
    """Return the axis of all lengths, and the pixels that each has for itself."""
    apart = min((other / one for one, other in pairwise(lengths)), default=2.0) ** 0.5
    axis = plots.Axis(low=lengths[0] / apart, high=lengths[-1] * apart, begin=frame.left, end=frame.right)
    return axis, 2 * (axis.at(lengths[0]) - frame.left)


def _errors(cells: Sequence[Judged], frame: plots.Frame) -> plots.Axis:
    """Return the axis of all errors and targets."""
    low = min(min(one.low, -one.cell.target) for one in cells)
    high = max(max(one.high, one.cell.target) for one in cells)
    pad = 0.06 * (high - low)
    return plots.Axis(low=low - pad, high=high + pad, begin=frame.bottom, end=frame.top, logarithmic=False)


def _panel(members: Sequence[tuple[int, Judged]], looks: Looks, axes: Axes, width: float) -> plots.Plot:
    """Return the error over length of one panel: schedules stand side by side at each length."""
    frame, across, up, slot = axes
    schedules = [name for name in looks.schedules if any(one.cell.method == name for _, one in members)]
    dodge = min(_DODGE, 0.8 * slot / len(schedules))
    targets: dict[int, float] = {}
    marks: dict[str, list[plots.Mark]] = {name: [] for name in schedules}
    for number, one in sorted(members, key=lambda member: parse_length(member[1].cell.seq, "`seq`")):
        tokens, name = parse_length(one.cell.seq, "`seq`"), one.cell.method
        targets[tokens] = max(targets.get(tokens, 0.0), one.cell.target)
        x = round(across.at(tokens) + dodge * (schedules.index(name) - (len(schedules) - 1) / 2), 2)
        marks[name].append(_error_mark(number, one, x, up, looks))
    title = f"{members[0][1].cell.what}, P = {members[0][1].cell.gpus}"
    return plots.Plot(
        about=f"Error of the step over length: {title}",
        title=title,
        width=width,
        height=_panel_height(width),
        frame=frame,
        x_ticks=plots.apart([plots.Tick(across.at(tokens), length(tokens)) for tokens in sorted(targets)], width),
        y_ticks=plots.share_ticks(up),
        areas=[plots.Area("band-1", _target(across.at(tokens), slot, share, up)) for tokens, share in targets.items()],
        trends=[
            plots.Trend("equal", [(frame.left, up.at(0.0)), (frame.right, up.at(0.0))]),
            *(plots.Trend(looks.look(name), [(mark.x, mark.y) for mark in found]) for name, found in marks.items()),
        ],
        marks=[mark for found in marks.values() for mark in found],
    )


def _target(middle: float, slot: float, share: float, up: plots.Axis) -> list[tuple[float, float]]:
    """Return the area of errors that are met at one length."""
    left, right = round(middle - slot / 2, 2), round(middle + slot / 2, 2)
    return [(left, up.at(-share)), (left, up.at(share)), (right, up.at(share)), (right, up.at(-share))]


def _error_mark(number: int, one: Judged, x: float, up: plots.Axis, looks: Looks) -> plots.Mark:
    low, high = up.at(one.low), up.at(one.high)
    return plots.Mark(
        x=x,
        y=up.at(one.times.error),
        whisker=f"M{x - 4:.2f} {low}h8M{x} {low}V{high}M{x - 4:.2f} {high}h8",
        ends=(low, high),
        shape=looks.shape(one.cell.gpus),
        look=looks.look(one.cell.method, one.cell.scope),
        row=number,
        tip=_tip(one),
    )
