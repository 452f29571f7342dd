"""Interactive charts as data that plotly.js draws: each with a table of its figures for who cannot see it.

Colours are numbers of ``plots.HUES``, which the page resolves for light and for dark. What hovering says is written
here, in the units that tables have. Texts of charts are plain: plotly.js would read some as HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from experiments.pages.drawn.plots import HUES
from sim.base.units import length, percent, seconds, size

SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "pentagon")
"""The outlines of ``plots.SHAPES``, as plotly.js names them."""
_MOST_TICKS = 12


class Unit(NamedTuple):
    """How an axis shows a figure."""

    label: str
    shown: Callable[[float], str]
    scale: float = 1.0
    """What one of the axis is, in the unit of the figure."""
    axis: Mapping[str, str] = {}
    """What plotly.js is told of its ticks."""


SECONDS = Unit("seconds", seconds, 1.0, {"tickformat": "~s", "ticksuffix": "s"})
BYTES = Unit("GiB", size, 2.0**30, {"tickformat": "~g", "ticksuffix": " GiB"})
SHARE = Unit("share", percent, 1.0, {"tickformat": "~%"})
RATIO = Unit("", lambda value: f"{value:.4g}", 1.0, {"tickformat": "~g"})
NUMBER = Unit("", lambda value: f"{value:.4g}", 1.0, {"tickformat": "~s"})


class Cell(NamedTuple):
    """What a cell of a table sorts by, and what it shows."""

    value: Any
    shown: str


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One drawing, and the table that says the same."""

    title: str
    about: str
    """Says to who cannot see it what it shows."""
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    heads: Sequence[str]
    rows: list[list[Cell]]
    logs: tuple[str, ...] = ()
    """Axes that may change to a logarithmic scale and back: x, y."""


class Point(NamedTuple):
    """A point of a line, with the ends of its interval where it has one."""

    x: float
    y: float
    within: tuple[float, float] | None = None
    hollow: bool = False
    says: str = ""
    """Beside its figures."""


def lines(
    series: Mapping[str, Sequence[Point]], *, title: str, about: str, x: tuple[str, Unit | None], y: tuple[str, Unit],
    joined: bool = True,
) -> Chart:  # fmt: skip
    """Return lines over a figure, on logarithmic axes where no figure is below or at 0; lengths are those of sequences
    where ``x`` has no unit.
    """
    (x_name, x_unit), (y_name, y_unit) = x, y
    show_x = (lambda value: length(int(value))) if x_unit is None else x_unit.shown
    x_scale = 1.0 if x_unit is None else x_unit.scale
    points = [point for found in series.values() for point in found]
    xs = sorted({point.x for point in points})
    traces, rows = [], []
    for number, (name, found) in enumerate(series.items()):
        said = [
            f"{name}\n{x_name} {show_x(point.x)}\n{y_name} {y_unit.shown(point.y)}"
            + (f"\n90 % interval {' to '.join(map(y_unit.shown, point.within))}" if point.within else "")
            + (f"\n{point.says}" if point.says else "")
            for point in found
        ]
        symbol = SYMBOLS[number % len(SYMBOLS)]
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines+markers" if joined else "markers",
            "name": plain(name),
            "hue": number % len(HUES),
            "x": [point.x / x_scale for point in found],
            "y": [point.y / y_unit.scale for point in found],
            "marker": {"size": 9, "symbol": [f"{symbol}-open" if point.hollow else symbol for point in found]},
            **_hover(said),
        }
        if any(point.within for point in found):
            ends = [point.within or (point.y, point.y) for point in found]
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": [(high - point.y) / y_unit.scale for point, (_, high) in zip(found, ends, strict=True)],
                "arrayminus": [(point.y - low) / y_unit.scale for point, (low, _) in zip(found, ends, strict=True)],
                "thickness": 1.2,
            }
        traces.append(trace)
        rows += [
            [Cell(name, name), Cell(point.x, show_x(point.x)), Cell(point.y, y_unit.shown(point.y))] for point in found
        ]
    logs = tuple(axis for axis, least in (("x", min(xs)), ("y", min(point.y for point in points))) if least > 0)
    across: dict[str, Any] = {"title": {"text": plain(x_name), "standoff": 6}}
    if x_unit is None:
        powers = [value for value in xs if value > 0 and math.log2(value).is_integer()]
        known = powers if len(powers) > 2 else xs
        some = known[:: -(-len(known) // _MOST_TICKS)]
        across |= {"tickvals": some, "ticktext": [show_x(value) for value in some]}
    else:
        across |= x_unit.axis
    return Chart(
        title=title, about=about, traces=traces, heads=("series", x_name, y_name), rows=rows, logs=logs,
        layout={
            "xaxis": across | _scaled("x" in logs),
            "yaxis": {"title": {"text": plain(y_name), "standoff": 10}, **y_unit.axis, **_scaled("y" in logs)},
        },
    )  # fmt: skip


def bars(
    names: Sequence[str], parts: Mapping[str, Sequence[float]], *, title: str, about: str, unit: Unit,
    limit: tuple[str, float] | None = None, within: Sequence[tuple[float, float] | None] = (),
) -> Chart:  # fmt: skip
    """Return a bar for each name, of its parts, and a line at a limit; ``within`` are the intervals of bars of one
    part.
    """
    kept = {name: values for name, values in parts.items() if any(values)}
    hues = {name: number % len(HUES) for number, name in enumerate(parts)}  # the same whatever else there is
    traces: list[dict[str, Any]] = []
    for name, values in kept.items():
        said = [f"{bar}\n{name} {unit.shown(value)}" for bar, value in zip(names, values, strict=True)]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(name),
                "hue": hues[name],
                "x": [value / unit.scale for value in values],
                "y": list(range(len(names))),
                **_hover(said),
            }
        )
    if within and any(within):
        (values,), (trace,) = kept.values(), traces
        ends = [found or (value, value) for found, value in zip(within, values, strict=True)]
        trace["error_x"] = {
            "type": "data", "symmetric": False, "thickness": 1.2,
            "array": [(high - value) / unit.scale for value, (_, high) in zip(values, ends, strict=True)],
            "arrayminus": [(value - low) / unit.scale for value, (low, _) in zip(values, ends, strict=True)],
        }  # fmt: skip
        for number, found in enumerate(within):
            if found:
                trace["hovertext"][number] += f"<br>90 % interval {' to '.join(map(unit.shown, found))}"
    shapes = []
    if limit:
        at = limit[1] / unit.scale
        shapes = [{"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "label": {"text": limit[0]}}]
    return Chart(
        title=title, about=about, traces=traces, heads=("", *kept),
        rows=[
            [Cell(bar, bar), *(Cell(values[number], unit.shown(values[number])) for values in kept.values())]
            for number, bar in enumerate(names)
        ],
        layout={
            "barmode": "relative",
            "bargap": 0.25,
            "height": 150 + 26 * len(names),
            "shapes": shapes,
            "xaxis": dict(unit.axis),
            "yaxis": {
                "tickvals": list(range(len(names))), "ticktext": [_short(name) for name in names],
                "autorange": "reversed", "automargin": True, "showgrid": False,
            },
        },
    )  # fmt: skip


def parity(points: Sequence[tuple[str, float, float]], *, title: str, about: str) -> Chart:
    """Return predicted over measured seconds, both logarithmic, with the line on which they are equal; a point is a
    name with its measured and its predicted seconds, both above 0.
    """
    drawn = [(name, measured, predicted) for name, measured, predicted in points if min(measured, predicted) > 0]
    ends = [min(min(m, p) for _, m, p in drawn) / 1.3, max(max(m, p) for _, m, p in drawn) * 1.3]
    said = [
        f"{name}\nmeasured {seconds(m)}\npredicted {seconds(p)}\nerror {percent(p / m - 1)}" for name, m, p in drawn
    ]
    equal = {
        "type": "scatter", "mode": "lines", "name": "equal", "x": ends, "y": ends, "hue": 6, "hoverinfo": "skip",
        "line": {"width": 1},
    }  # fmt: skip
    cells = {
        "type": "scatter", "mode": "markers", "name": "predicted against measured", "hue": 0,
        "x": [m for _, m, _ in drawn], "y": [p for _, _, p in drawn], "marker": {"size": 9}, **_hover(said),
    }  # fmt: skip
    axis = {**SECONDS.axis, "type": "log"}
    return Chart(
        title=title, about=about, traces=[equal, cells], heads=("", "measured", "predicted", "error"),
        rows=[
            [Cell(name, name), Cell(m, seconds(m)), Cell(p, seconds(p)), Cell(p / m - 1, percent(p / m - 1))]
            for name, m, p in drawn
        ],
        layout={
            "height": 520, "xaxis": {**axis, "title": {"text": "measured", "standoff": 6}},
            "yaxis": {**axis, "title": {"text": "predicted", "standoff": 10}},
        },
        logs=("x", "y"),
    )  # fmt: skip


def memory(at_s: Sequence[float], held: Mapping[str, Sequence[int]], *, title: str, about: str) -> Chart:
    """Return bytes in use from each moment to the next, one kind on top of another; its table is of the peak."""
    totals = [sum(values) for values in zip(*held.values(), strict=True)]
    peak = totals.index(max(totals))
    traces = []
    for number, (name, values) in enumerate(held.items()):
        said = [
            f"{name} {size(value)}\nof {size(total)}, at {seconds(at)}"
            for at, value, total in zip(at_s, values, totals, strict=True)
        ]
        traces.append(
            {
                "type": "scatter", "mode": "lines", "stackgroup": "one", "name": plain(name),
                "hue": number % len(HUES), "line": {"shape": "hv", "width": 0.5}, "x": list(at_s),
                "y": [value / BYTES.scale for value in values], **_hover(said),
            }
        )  # fmt: skip
    whole = totals[peak]
    return Chart(
        title=title, about=f"{about}; the peak, {size(whole)}, is at {seconds(at_s[peak])}", traces=traces,
        heads=("at the peak", "bytes", "share"),
        rows=[
            [Cell(name, name), Cell(values[peak], size(values[peak])), _share(values[peak] / whole if whole else 0.0)]
            for name, values in held.items()
        ],
        layout={"xaxis": dict(SECONDS.axis), "yaxis": {**BYTES.axis, "rangemode": "tozero"}},
    )  # fmt: skip


def plain(text: str) -> str:
    """Return a text in which plotly.js finds no markup; lines stay."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "<br>")


def _share(value: float) -> Cell:
    return Cell(value, f"{100 * value:.3g} %")


def _hover(said: Sequence[str]) -> dict[str, Any]:
    return {"hovertext": [plain(text) for text in said], "hovertemplate": "%{hovertext}<extra></extra>"}


def _scaled(logarithmic: bool) -> dict[str, str]:
    return {"type": "log"} if logarithmic else {"type": "linear"}


def _short(name: str) -> str:
    """Return a name as long as it may be beside a bar."""
    return plain(name if len(name) <= 34 else f"{name[:33]}…")
