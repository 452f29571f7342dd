"""Static charts: plots of a ``Chart`` for where no script runs, as in notebooks. What plotly.js shows on hovering is in
them, too.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from experiments.pages.drawn.bars import bar_mark, round_values, rows_in
from experiments.pages.drawn.charts import SYMBOLS, Chart
from experiments.pages.drawn.pictures import NARROW, Drawn, Entry, legend
from experiments.pages.drawn.plots import (
    SHAPES,
    SWATCH,
    Axis,
    Frame,
    Mark,
    Plot,
    Tick,
    Trend,
    apart,
    height_below,
    time_ticks,
)
from sim.base.units import seconds

_HEIGHT = 260
"""Pixels of lines."""
_LINE = "M-8 -0.8h16v1.6h-16z"
_PER_TICK = 60
"""Pixels from one label of an x axis to the next, at least."""

Trace = Mapping[str, Any]


def still(chart: Chart) -> Drawn:
    """Return a chart of ``charts.bars``, of figures from 0 on, or of ``charts.lines``, laid out for phones, so that two
    have room beside each other elsewhere.
    """
    return _bars(chart) if chart.traces[0]["type"] == "bar" else _lines(chart)


def _bars(chart: Chart) -> Drawn:
    names = [_text(name) for name in chart.layout["yaxis"]["ticktext"]]
    frame, middles = rows_in(names, 0, NARROW)
    limits = [(shape["x0"], shape["label"]["text"]) for shape in chart.layout["shapes"]]
    sums = [sum(trace["x"][row] for trace in chart.traces) for row in range(len(names))]
    ends = [end for trace in chart.traces for one in _within(trace, trace["x"], "error_x") for end in one or ()]
    most = 1.02 * max([*sums, *ends, *(at for at, _ in limits)])
    across = Axis(low=0.0, high=most or 1.0, begin=frame.left, end=frame.right, logarithmic=False)
    marks, taken = [], [0.0] * len(names)
    for trace in chart.traces:
        within = _within(trace, trace["x"], "error_x")
        for row, value in enumerate(trace["x"]):
            left, right = across.at(taken[row]), across.at(taken[row] + value)
            taken[row] += value
            if value:
                found = within[row]
                ends_at = (across.at(found[0]), across.at(found[1])) if found else None
                tip = _text(trace["hovertext"][row])
                marks.append(bar_mark(left, right - left, middles[row].at, _look(trace), row, tip, ends_at))
    plot = Plot(
        about=chart.about, width=NARROW, height=height_below(frame, ""), frame=frame,
        x_ticks=_ticks(chart.layout["xaxis"], across), y_ticks=middles,
        trends=[Trend("equal", [(across.at(at), frame.top), (across.at(at), frame.bottom)]) for at, _ in limits],
        marks=marks,
    )  # fmt: skip
    entries = [Entry(SWATCH, _look(trace), _text(trace["name"])) for trace in chart.traces if len(chart.traces) > 1]
    return _drawn(plot, [*entries, *(Entry(_LINE, "inked", name) for _, name in limits)])


def _lines(chart: Chart) -> Drawn:
    x_axis, y_axis = chart.layout["xaxis"], chart.layout["yaxis"]
    x_label, y_label = (_text(axis["title"]["text"]) for axis in (x_axis, y_axis))
    frame = Frame(76, 10, NARROW - 20, _HEIGHT - 48)
    within = [_within(trace, trace["y"], "error_y") for trace in chart.traces]
    ys = [value for trace in chart.traces for value in trace["y"]]
    across = _axis(x_axis, [value for trace in chart.traces for value in trace["x"]], frame.left, frame.right)
    up = _axis(y_axis, [*ys, *(end for ends in within for one in ends for end in one or ())], frame.bottom, frame.top)
    marks, trends, row = list[Mark](), [], 0
    for trace, ends in zip(chart.traces, within, strict=True):
        places = [(across.at(x), up.at(y)) for x, y in zip(trace["x"], trace["y"], strict=True)]
        if "lines" in trace["mode"]:
            trends.append(Trend(_look(trace), places))
        for (x, y), end, symbol, tip in zip(places, ends, trace["marker"]["symbol"], trace["hovertext"], strict=True):
            low, high = (up.at(end[0]), up.at(end[1])) if end else (y, y)
            whisker = f"M{x - 4:.2f} {low}h8M{x} {low}V{high}M{x - 4:.2f} {high}h8" if end else ""
            look = f"{_look(trace)} hollow" if symbol.endswith("-open") else _look(trace)
            shape, said = _shape(trace), _text(tip)
            marks.append(Mark(x=x, y=y, whisker=whisker, ends=(x, x), shape=shape, look=look, row=row, tip=said))
            row += 1
    plot = Plot(
        about=chart.about, width=NARROW, height=height_below(frame, x_label), frame=frame,
        x_ticks=_ticks(x_axis, across), y_ticks=_ticks(y_axis, up), x_label=x_label, y_label=y_label,
        trends=trends, marks=marks,
    )  # fmt: skip
    entries = [Entry(_shape(trace), _look(trace), _text(trace["name"])) for trace in chart.traces]
    return _drawn(plot, entries if len(entries) > 1 else [])


def _drawn(plot: Plot, entries: Sequence[Entry]) -> Drawn:
    return Drawn(plot, legend([[entry] for entry in entries], NARROW) if entries else None)


def _axis(axis: Mapping[str, Any], values: Sequence[float], begin: float, end: float) -> Axis:
    """Return where values lie, with room at both ends; a linear one begins at 0."""
    low, high = min(values), max(values)
    if axis["type"] == "log":
        return Axis(low=low / 1.15, high=high * 1.15, begin=begin, end=end)
    return Axis(low=min(0.0, 1.08 * low), high=1.08 * high or 1.0, begin=begin, end=end, logarithmic=False)


def _ticks(axis: Mapping[str, Any], places: Axis) -> list[Tick]:
    """Return the labels of an axis, of one across a plot no more than it has room for."""
    shown = partial(_shown, axis)
    if "tickvals" in axis:
        found = [Tick(places.at(at), _text(text)) for at, text in zip(axis["tickvals"], axis["ticktext"], strict=True)]
    else:
        found = time_ticks(places, shown) if places.logarithmic else []
        if len(found) < 2:  # also where a logarithmic axis spans little
            values = round_values(places.high)
            found = [Tick(places.at(value), shown(value)) for value in values if value >= places.low]
    if places.begin > places.end:
        return found
    every = -(-len(found) * _PER_TICK // NARROW)
    return apart(found[:: max(1, every)], NARROW)


def _shown(axis: Mapping[str, Any], value: float) -> str:
    """Return a figure with the unit that its axis has."""
    suffix = axis.get("ticksuffix", "")
    if suffix == "s":
        return seconds(value) if value else "0 s"
    return f"{100 * value:g} %" if "%" in axis.get("tickformat", "") else f"{value:g}{suffix}"


def _within(trace: Trace, values: Sequence[float], key: str) -> list[tuple[float, float] | None]:
    """Return the ends of the interval of each value; None where it has none."""
    found = trace.get(key)
    if not found:
        return [None] * len(values)
    ends = zip(values, found["arrayminus"], found["array"], strict=True)
    return [(value - less, value + more) if less or more else None for value, less, more in ends]


def _look(trace: Trace) -> str:
    hatched = "pattern" in trace.get("marker", {})
    return f"hue-{trace['hue']}{' hollow' * hatched}"


def _shape(trace: Trace) -> str:
    """Return the outline of a line's points."""
    return SHAPES[SYMBOLS.index(trace["marker"]["symbol"][0].removesuffix("-open"))]


def _text(plain: str) -> str:
    """Return what plotly.js would show of a text that has been made plain for it."""
    return html.unescape(plain.replace("<br>", "\n"))
