"""Plots as data: scales, ticks, marks and legends in the pixels of an SVG, which ``templates/plots.j2`` draws.

As in SVG, x grows to the right and y downwards. Colours are classes, so that one drawing serves light and dark. What
has a width is laid out for it: ``pictures.py`` says for which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from experiments.evidence.executed.comparison import Measured
from experiments.pages.drawn.texts import TEXT_ROW, shortened, text_width, wrapped
from sim.base.units import seconds

HUES = {
    "blue": ("#0072b2", "#4ba3e3"),
    "vermilion": ("#d55e00", "#ff8a3d"),
    "green": ("#009e73", "#2fc79b"),
    "purple": ("#b0568f", "#e39cc4"),
    "orange": ("#e69f00", "#f5bd48"),
    "sky": ("#56b4e9", "#a8dcff"),
    "grey": ("#8a8f98", "#b4bac3"),
    "yellow": ("#c2b200", "#f0e442"),
}
"""Okabe and Ito's palette, which is told apart with every kind of colour vision; for light and for dark paper."""
THEMES = {
    "light": {
        "paper": "#ffffff", "panel": "#f5f6f8", "ink": "#16191d", "soft": "#565d66", "line": "#d3d7dc",
        "band-0": "#eceff2", "band-1": "#dee3e8", "band-2": "#ccd3db"
    },
    "dark": {
        "paper": "#14171a", "panel": "#1d2126", "ink": "#e8eaed", "soft": "#a2a9b2", "line": "#3a4048",
        "band-0": "#1f242a", "band-1": "#2a3037", "band-2": "#38404a"
    }
}  # fmt: skip
"""Colours of everything else."""
SHAPES = (
    "M-5.5 0a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0 -11 0z",
    "M-5 -5h10v10h-10z",
    "M-6.3 4.6h12.6l-6.3 -10.8z",
    "M0 -7l7 7l-7 7l-7 -7z",
    "M-6.3 -4.6h12.6l-6.3 10.8z",
    "M0 -6.5l6.2 4.5l-2.4 7.3h-7.6l-2.4 -7.3z",
)
"""Outlines around the origin: circle, square, triangle, diamond, triangle upside down, pentagon."""
CIRCLE, SQUARE, TRIANGLE = SHAPES[:3]
SWATCH = "M-8 -5.5h16v11h-16z"
_MARGIN = 8
"""Pixels between texts, at least."""


Anchor = Literal["start", "middle", "end"]


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """Puts values on pixels."""

    low: float
    high: float
    begin: float
    """Where ``low`` lies."""
    end: float
    """Where ``high`` lies."""
    logarithmic: bool = True

    def at(self, value: float) -> float:
        """Return the place of a value, in hundredths of a pixel."""
        low, high, here = self.low, self.high, value
        if self.logarithmic:
            low, high, here = math.log10(low), math.log10(high), math.log10(here)
        return round(self.begin + (here - low) / (high - low) * (self.end - self.begin), 2)


class Tick(NamedTuple):
    """A labelled line across a plot."""

    at: float
    label: str
    label_at: float | None = None
    """The base of its label where that stands inside the frame, at its left."""


class Area(NamedTuple):
    """A polygon below all else."""

    look: str
    corners: list[tuple[float, float]]


class Trend(NamedTuple):
    """A line through points."""

    look: str
    points: list[tuple[float, float]]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A point with its interval."""

    x: float
    y: float
    whisker: str
    """Outline, in the plot's pixels."""
    ends: tuple[float, float]
    """Where the whisker ends along its axis."""
    shape: str
    look: str
    """CSS classes."""
    row: int
    """Of the table that shows the same: choosing it there picks the mark out."""
    tip: str
    """What hovering says."""
    name: str = ""
    """Written beside it, where there is room."""
    name_at: tuple[float, float, Anchor] | None = None


class Frame(NamedTuple):
    """The rectangle that data lie in."""

    left: float
    top: float
    right: float
    bottom: float


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """One drawing."""

    about: str
    """Says to who cannot see it what it shows."""
    title: str = ""
    width: float
    height: float
    frame: Frame
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    x_label: str = ""
    y_label: str = ""
    areas: list[Area] = []
    trends: list[Trend] = []
    marks: list[Mark]

    @property
    def x_lines(self) -> list[str]:
        """The name of the x axis, in lines that its frame has room for."""
        return wrapped(self.x_label, self.frame.right - self.frame.left)


def height_below(frame: Frame, x_label: str) -> float:
    """Return the height of a plot with this frame: below it are its ticks' labels and the name of its x axis."""
    return frame.bottom + 28 + TEXT_ROW * len(wrapped(x_label, frame.right - frame.left))


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What a parity plot shows of one thing."""

    times: Measured
    shape: str
    look: str
    row: int
    tip: str
    name: str = ""


def parity_plot(points: Sequence[Point], shares: Sequence[float], width: float, height: float, about: str) -> Plot:
    """Return measured times across and simulated ones up, on logarithmic axes of one range, with a band for every share
    of the measured time; points without any time on one side are left out.
    """
    shown = [point for point in points if plottable(point.times)]
    low, high = _time_range([point.times for point in shown])
    frame = Frame(72, 10, width - 14, height - 44)
    across = Axis(low=low, high=high, begin=frame.left, end=frame.right)
    up = Axis(low=low, high=high, begin=frame.bottom, end=frame.top)
    return Plot(
        about=about,
        width=width,
        height=height,
        frame=frame,
        x_ticks=apart(time_ticks(across), width),
        y_ticks=time_ticks(up),
        x_label="measured (median)",
        y_label="simulated",
        areas=[Area(look, _band(share, across, up)) for share, look in reversed(band_looks(shares))],
        trends=[Trend("equal", [(across.at(low), up.at(low)), (across.at(high), up.at(high))])],
        marks=_named([_parity_mark(point, across, up) for point in shown], frame),
    )


def band_looks(shares: Sequence[float]) -> list[tuple[float, str]]:
    """Return up to three shares, the least first, with the classes of their bands: the narrowest is the darkest."""
    return list(zip(sorted(shares), ("band-2", "band-1", "band-0"), strict=False))


def times_in_words(times: Measured) -> str:
    """Return two lines for whoever points at a mark."""
    measured = f"{seconds(times.median_s)} [{seconds(times.low_s)} to {seconds(times.high_s)}]"
    return f"simulated {seconds(times.simulated_s)}\nmeasured {measured}"


def plottable(times: Measured) -> bool:
    """Return whether both sides took any time: nothing has no logarithm."""
    return min(times.simulated_s, times.low_s) > 0


def _time_range(times: Sequence[Measured]) -> tuple[float, float]:
    """Return the ends of both axes: padded, and a factor of four apart at least."""
    values = [value for t in times for value in (t.simulated_s, t.low_s, t.high_s)] or [1e-3]
    low, high = math.log10(min(values)), math.log10(max(values))
    pad = max(0.08 * (high - low), (math.log10(4) - (high - low)) / 2)
    return 10 ** (low - pad), 10 ** (high + pad)


def _band(share: float, across: Axis, up: Axis) -> list[tuple[float, float]]:
    """Return the area in which simulated times are at most a share of the measured ones away from them."""
    low, high, less, more = across.low, across.high, 1 - share, 1 + share
    corners = [(low, low), (low, low * more), (high / more, high), (high, high), (high, high * less), (low / less, low)]
    return [(across.at(x), up.at(y)) for x, y in corners]


def _parity_mark(point: Point, across: Axis, up: Axis) -> Mark:
    ends = across.at(point.times.low_s), across.at(point.times.high_s)
    y = up.at(point.times.simulated_s)
    return Mark(
        x=across.at(point.times.median_s),
        y=y,
        whisker=f"M{ends[0]} {y - 4:.2f}v8M{ends[0]} {y}H{ends[1]}M{ends[1]} {y - 4:.2f}v8",
        ends=ends,
        shape=point.shape,
        look=point.look,
        row=point.row,
        tip=point.tip,
        name=point.name,
    )


def time_ticks(axis: Axis, shown: Callable[[float], str] = seconds) -> list[Tick]:
    """Return 1, 2 and 5 times every power of ten, or the powers of ten, where these are three or more and have no more
    room; of what is no time, as ``shown`` writes it.
    """
    decade = abs(axis.end - axis.begin) / math.log10(axis.high / axis.low)
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    inside = sum(axis.low <= 10.0**power <= axis.high for power in powers)
    steps = (1, 2, 5) if decade > 170 or inside < 3 else (1,)
    values = [float(f"{step}e{power}") for power in powers for step in steps]
    return [Tick(axis.at(value), shown(value)) for value in values if axis.low <= value <= axis.high]


def share_ticks(axis: Axis, apart: float = 20) -> list[Tick]:
    """Return round percentages, at least some pixels apart."""
    least = apart * (axis.high - axis.low) / abs(axis.end - axis.begin)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    numbers = range(math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9) + 1)
    return [Tick(axis.at(n * step), f"{100 * n * step:+.6g} %" if n else "0 %") for n in numbers]


def apart(ticks: Sequence[Tick], width: float) -> list[Tick]:
    """Return those of an x axis whose labels lie in the plot's width and do not run into the one before."""
    found: list[Tick] = []
    for tick in ticks:
        half = text_width(tick.label) / 2
        if not half <= tick.at <= width - half:
            continue
        if not found or tick.at - found[-1].at >= (text_width(tick.label) + text_width(found[-1].label)) / 2 + _MARGIN:
            found.append(tick)
    return found


def named(label: str, at: float, top: float, frame: Frame, *, above: bool) -> Tick:
    """Return the tick of what has a name, which stands above its ``top`` or at the left of the frame."""
    if above:
        return Tick(at, shortened(label, frame.right - frame.left - _MARGIN), top - 4)
    return Tick(at, shortened(label, frame.left - _MARGIN))


def _named(marks: Sequence[Mark], frame: Frame) -> list[Mark]:
    """Return the marks with names where there is room: the longest times first, as they matter most."""
    taken = [(min(m.ends[0], m.x - 7), m.y - 7, max(m.ends[1], m.x + 7), m.y + 7) for m in marks]
    placed: dict[int, tuple[float, float, Anchor]] = {}
    for mark in sorted(marks, key=lambda mark: -mark.x):
        long = text_width(mark.name)
        places: list[tuple[float, float, Anchor]] = [
            (max(mark.ends[1], mark.x + 7) + 6, mark.y + 4, "start"),
            (min(mark.ends[0], mark.x - 7) - 6, mark.y + 4, "end"),
            (mark.x, mark.y - 11, "middle"),
            (mark.x, mark.y + 20, "middle"),
        ]
        for x, y, anchor in places if mark.name else ():
            left = x - long * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
            box = (left - 2, y - 11, left + long + 2, y + 3)
            if _inside(box, frame) and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                placed[mark.row] = (round(x, 2), round(y, 2), anchor)
                break
    return [msgspec.structs.replace(mark, name_at=placed.get(mark.row)) for mark in marks]


def _inside(box: tuple[float, float, float, float], frame: Frame) -> bool:
    return box[0] > frame.left and box[1] > frame.top and box[2] < frame.right and box[3] < frame.bottom


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] <= other[2] and other[0] <= one[2] and one[1] <= other[3] and other[1] <= one[3]
