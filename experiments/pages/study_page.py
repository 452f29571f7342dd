"""A study as one HTML page: lines, shares or a map of winners, and the rows behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from experiments.pages.drawn.bars import bar_mark, round_values, rows_in
from experiments.pages.drawn.pictures import Drawn, Entry, Picture, is_narrow, legend, picture
from experiments.pages.drawn.plots import (
    HUES,
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
)
from experiments.pages.drawn.render import render
from experiments.pages.drawn.tables import head
from experiments.pages.drawn.texts import text_width
from sim.base.errors import InputError
from sim.base.files import Kind, marked
from sim.base.units import length, seconds, size

_WIDTH, _HEIGHT, _LOW = 860, 380, 320
"""Pixels of lines, on a wide screen; their height on a phone."""
_CELL = 40
"""Pixels of a row of a map."""
_SPREAD_ROW = 112
"""Pixels of a row of marks with whiskers."""


_CHAPTER = """# Studies

Questions of the field, each a file of this folder with the sweep that answers it. This page and its pictures are
written by `longstep study all --markdown experiments/studies/README.md`; the `--page` of a study shows its rows.
Kernels take their median times, without noise. What a prediction is worth stands in [results](../results/README.md).
"""
_CLAIMS = """## What do papers claim of interconnects, and what comes of it here?

`longstep study claims`

Every claim with its verdict. What a study finds over all that it sweeps is a range: it confirms a claim if all of it
is inside, qualifies it if some of it is, and contradicts it if none is. Where something is missing, the range is what
a sweep of the unknown gives, and tests nothing.
"""
CHAPTER_FILE = Kind("a page of studies", marked(_CHAPTER.splitlines()[0]))


class Line(NamedTuple):
    """Points that are joined: of each x, y, and what hovering says."""

    name: str
    points: Sequence[tuple[float, float, str]]


def lines(series: Sequence[Line], *, about: str, x_label: str, y_label: str, x_name: Callable[[float], str]) -> Picture:
    """Return lines over a logarithmic x; y begins at 0."""
    return picture(partial(_lines, series, about, x_label, y_label, x_name), _WIDTH)


def _lines(
    series: Sequence[Line], about: str, x_label: str, y_label: str, x_name: Callable[[float], str], width: float
) -> Drawn:
    frame = Frame(66, 14, width - 16, (_LOW if is_narrow(width) else _HEIGHT) - 48)
    xs = sorted({x for line in series for x, _, _ in line.points})
    most = max(y for line in series for _, y, _ in line.points) * 1.06
    across = Axis(low=xs[0] / 1.1, high=xs[-1] * 1.1, begin=frame.left, end=frame.right)
    up = Axis(low=0.0, high=most, begin=frame.bottom, end=frame.top, logarithmic=False)
    looks = [(SHAPES[number % len(SHAPES)], f"hue-{number % len(HUES)}") for number in range(len(series))]
    marks, trends, row = [], [], 0
    for line, (shape, look) in zip(series, looks, strict=True):
        places = [(across.at(x), up.at(y)) for x, y, _ in line.points]
        trends.append(Trend(look, places))
        for (x, y), (_, _, tip) in zip(places, line.points, strict=True):
            said = f"{line.name}\n{tip}"
            marks.append(Mark(x=x, y=y, whisker="", ends=(x, x), shape=shape, look=look, row=row, tip=said))
            row += 1
    plot = Plot(
        about=about, width=width, height=height_below(frame, x_label), frame=frame,
        x_ticks=apart([Tick(across.at(x), x_name(x)) for x in xs], width),
        y_ticks=[Tick(up.at(value), f"{value:.4g}") for value in round_values(most)], x_label=x_label, y_label=y_label,
        trends=trends, marks=marks,
    )  # fmt: skip
    entries = [Entry(shape, look, line.name) for line, (shape, look) in zip(series, looks, strict=True)]
    return Drawn(plot, legend([[entry] for entry in entries], width))


def shares(bars: Sequence[tuple[str, Mapping[str, float]]], *, about: str, x_label: str) -> Picture:
    """Return a bar for each row, whose parts stand for shares."""
    return picture(partial(_shares, bars, about, x_label), _WIDTH)


def _shares(bars: Sequence[tuple[str, Mapping[str, float]]], about: str, x_label: str, width: float) -> Drawn:
    frame, middles = rows_in([bar for bar, _ in bars], 90, width)
    names = list(dict.fromkeys(name for _, parts in bars for name in parts))
    most = max(sum(parts.values()) for _, parts in bars)
    across = Axis(low=0.0, high=most, begin=frame.left, end=frame.right, logarithmic=False)
    marks = []
    for row, (bar, parts) in enumerate(bars):
        begin, middle = 0.0, middles[row].at
        for name in names:
            if share := parts.get(name, 0.0):
                left, right = across.at(begin), across.at(begin + share)
                tip, look = f"{bar}\n{name} {100 * share:.3g} %", f"hue-{names.index(name) % len(HUES)}"
                marks.append(bar_mark(left, right - left, middle, look, row, tip))
                begin += share
    plot = Plot(
        about=about, width=width, height=height_below(frame, x_label), frame=frame,
        x_ticks=[Tick(across.at(share), f"{100 * share:.0f} %") for share in (0, 0.25, 0.5, 0.75, 1) if share <= most],
        y_ticks=middles, x_label=x_label, marks=marks,
    )  # fmt: skip
    entries = [Entry(SWATCH, f"hue-{number % len(HUES)}", name) for number, name in enumerate(names)]
    return Drawn(plot, legend([[entry] for entry in entries], width))


def winners(cells: Mapping[tuple[str, str], tuple[str, str]], *, about: str, x_label: str, y_label: str) -> Picture:
    """Return a map: by column and row who wins, and what hovering says."""
    return picture(partial(_winners, cells, about, x_label, y_label), _WIDTH)


def _winners(
    cells: Mapping[tuple[str, str], tuple[str, str]], about: str, x_label: str, y_label: str, width: float
) -> Drawn:
    xs, ys = (list(dict.fromkeys(key[number] for key in cells)) for number in (0, 1))
    names = sorted({winner for winner, _ in cells.values()})
    frame, rows = rows_in(ys, 90, width, _CELL)
    wide, high = (frame.right - frame.left) / len(xs), _CELL
    fits = max(map(text_width, names)) + 4 < wide
    known = {name: name if fits else chr(ord("A") + number) for number, name in enumerate(names)}
    marks = []
    for number, ((x, y), (winner, tip)) in enumerate(cells.items()):
        left, top = frame.left + wide * xs.index(x), rows[ys.index(y)].at - high / 2
        marks.append(
            Mark(
                x=round(left, 2), y=round(top, 2), whisker="", ends=(left, left + wide),
                shape=f"M1 1h{wide - 2:.2f}v{high - 2:.2f}h{2 - wide:.2f}z", look=f"hue-{names.index(winner)}",
                row=number, tip=f"{x}, {y}\n{tip}", name=known[winner],
                name_at=(round(left + wide / 2, 2), round(top + high / 2 + 4, 2), "middle"),
            )
        )  # fmt: skip
    plot = Plot(
        about=about, width=width, height=height_below(frame, x_label), frame=frame,
        x_ticks=apart([Tick(frame.left + wide * (number + 0.5), x) for number, x in enumerate(xs)], width),
        y_ticks=rows, x_label=x_label, y_label=y_label, marks=marks,
    )  # fmt: skip
    said = [name if fits else f"{known[name]}: {name}" for name in names]
    return Drawn(plot, legend([[Entry(SWATCH, f"hue-{number}", name)] for number, name in enumerate(said)], width))


class Spread(NamedTuple):
    """One mark of a row: least, middle and most, and what hovering says."""

    row: str
    name: str
    values: tuple[float, float, float]
    tip: str


def spreads(marks: Sequence[Spread], *, about: str, x_label: str) -> Picture:
    """Return a row of marks with whiskers for each of their rows, over a logarithmic x."""
    return picture(partial(_spreads, marks, about, x_label), _WIDTH)


def _spreads(marks: Sequence[Spread], about: str, x_label: str, width: float) -> Drawn:
    rows, names = (list(dict.fromkeys(getattr(one, key) for one in marks)) for key in ("row", "name"))
    frame, middles = rows_in(rows, 150, width, _SPREAD_ROW)
    low, high = min(one.values[0] for one in marks) / 1.1, max(one.values[2] for one in marks) * 1.1
    across = Axis(low=low, high=high, begin=frame.left, end=frame.right)
    looks = {name: (SHAPES[at % len(SHAPES)], f"hue-{at % len(HUES)}") for at, name in enumerate(names)}
    drawn = []
    for number, one in enumerate(marks):
        share = (names.index(one.name) + 1) / (len(names) + 1)
        y = middles[rows.index(one.row)].at + _SPREAD_ROW * (share - 0.5)
        left, middle, right = (across.at(value) for value in one.values)
        shape, look = looks[one.name]
        drawn.append(
            Mark(x=middle, y=y, whisker=f"M{left:.2f} {y:.2f}H{right:.2f}", ends=(left, right), shape=shape, look=look,
                 row=number, tip=f"{one.row}: {one.name}\n{one.tip}")
        )  # fmt: skip
    steps = [value for value in (1, 2, 5, 10, 20, 50, 100, 200, 500) if low <= value <= high]
    plot = Plot(
        about=about, width=width, height=height_below(frame, x_label), frame=frame,
        x_ticks=apart([Tick(across.at(value), f"{value} x") for value in steps], width), y_ticks=middles,
        x_label=x_label, marks=drawn,
    )  # fmt: skip
    return Drawn(plot, legend([[Entry(*looks[name], name)] for name in names], width))


def lengths(bars: Sequence[tuple[str, int, str]], *, about: str, x_label: str) -> Picture:
    """Return a bar for each row, as long as its tokens, with what hovering says."""
    return picture(partial(_lengths, bars, about, x_label), _WIDTH)


def _lengths(bars: Sequence[tuple[str, int, str]], about: str, x_label: str, width: float) -> Drawn:
    frame, middles = rows_in([name for name, _, _ in bars], 200, width)
    most = max(tokens for _, tokens, _ in bars) * 1.05
    across = Axis(low=0.0, high=most, begin=frame.left, end=frame.right, logarithmic=False)
    marks = [
        bar_mark(frame.left, across.at(tokens) - frame.left, middles[row].at, "hue-0", row, f"{name}\n{tip}")
        for row, (name, tokens, tip) in enumerate(bars)
    ]
    steps = [number * 2**20 for number in range(int(most / 2**20) + 1)]
    plot = Plot(
        about=about, width=width, height=height_below(frame, x_label), frame=frame,
        x_ticks=apart([Tick(across.at(tokens), length(tokens)) for tokens in steps], width), y_ticks=middles,
        x_label=x_label, marks=marks,
    )  # fmt: skip
    return Drawn(plot, legend([[Entry(SWATCH, "hue-0", x_label)]], width))


def page(
    name: str, question: str, answer: str, conclusion: str, picture: Picture, rows: Sequence[dict[str, Any]]
) -> str:
    """Return the page of a study."""
    return render(
        "study.html.j2", title=question, answer=answer, name=name, conclusion=conclusion, picture=picture,
        heads=[head(key) for key in rows[0]], rows=rows, said=said,
    )  # fmt: skip


def section(name: str, question: str, about: str, conclusion: str) -> str:
    """Return what a page of studies says of one: its question, its picture and what that shows, its conclusion."""
    return f"## {question}\n\n`longstep study {name}`\n\n![{about}]({name}.svg)\n\n{conclusion}\n"


def chapter(sections: Sequence[str], claims: str) -> str:
    """Return a page of studies, which the table of claims ends."""
    return "\n".join([_CHAPTER, *sections, f"{_CLAIMS}\n{claims}"])


def with_section(text: str, name: str, anew: str) -> str:
    """Return a page of studies with the section of one in place of the one that it has; raises InputError where it
    has none.
    """
    sections = text.split("\n## ")
    found = [number for number, one in enumerate(sections) if f"\n`longstep study {name}`\n" in one]
    if not found:
        raise InputError(f"`markdown`: the page has no section of {name}; longstep study all --markdown writes all")
    sections[found[0]] = anew.removeprefix("## ")
    return "\n## ".join(sections)


def with_claims(text: str, claims: str) -> str:
    """Return a page of studies with another table of claims; raises InputError where it has none."""
    before, head, _ = text.partition(_CLAIMS)
    if not head:
        raise InputError("`markdown`: the page has no claims; longstep study all --markdown writes all")
    return f"{before}{head}\n{claims}"


def said(key: str, value: Any) -> str:
    """Return a value of a row as people write it, by the unit that its key ends in."""
    if value is None or isinstance(value, str | bool):
        return "" if value is None else str(value)
    if key in {"seq", "longest"}:
        return length(value)
    if key.endswith("_s") and not key.endswith("_per_s"):
        return seconds(value)
    return size(value) if key.endswith("_bytes") else f"{value:.4g}"
