"""A ladder of techniques as one HTML page: bars of memory by term, and what each technique saves and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.evidence.peaks import PEAK, beside
from experiments.pages.drawn.pictures import Drawn, Entry, is_narrow, legend, picture
from experiments.pages.drawn.plots import HUES, SWATCH, Axis, Frame, Mark, Plot, Tick, Trend, apart, height_below, named
from experiments.pages.drawn.render import render
from sim.accounts.memory import TERMS
from sim.base.units import length, size
from sim.setup.answers.rows import of_ladder
from topology.specs import ClusterSpec

_WIDTH, _BAR, _LEFT, _NAME = 1000, 24, 210, 18
"""Pixels: of the plot, of a bar with its distance to the next, of the names beside bars, and of a name above one."""


def page(title: str, rows: Sequence[dict[str, Any]], spec: ClusterSpec) -> str:
    """Return the page of what ``longstep.ladder`` returned, on this cluster."""
    room = spec.hbm.capacity_bytes - spec.reserved.nbytes
    looks = [Entry(SWATCH, f"hue-{number % len(HUES)}", term) for number, term in enumerate(TERMS)]
    return render(
        "ladder.html.j2",
        title=title,
        answer=of_ladder(rows),
        seq=length(rows[0]["seq"]),
        picture=picture(
            lambda width: Drawn(bars(rows, room, width), legend([[look] for look in looks], width)), _WIDTH
        ),
        beside=beside(spec),
        heads=("techniques", "longest context", "step", PEAK, "left", "host", *TERMS),
        rows=rows,
        terms=TERMS,
        length=length,
        size=size,
    )


def bars(rows: Sequence[dict[str, Any]], room_bytes: int, width: float = _WIDTH) -> Plot:
    """Return a bar for each row, of the terms of its peak, and a line where a GPU has no more room for it."""
    above = _NAME if is_narrow(width) else 0
    step = _BAR + above
    frame = Frame(14 if above else _LEFT, 10, width - 20, 10 + step * len(rows))
    most = 1.05 * max(room_bytes, *(row["peak_hbm_bytes"] for row in rows))
    across = Axis(low=0.0, high=most, begin=frame.left, end=frame.right, logarithmic=False)
    middles = [frame.top + step * number + above + _BAR / 2 for number in range(len(rows))]
    marks = []
    for number, (row, middle) in enumerate(zip(rows, middles, strict=True)):
        held = 0
        for hue, term in enumerate(TERMS):
            if nbytes := row[term]:
                left, right = across.at(held), across.at(held + nbytes)
                tip = f"{row['techniques']}\n{term} {size(nbytes)} of {size(row['peak_hbm_bytes'])}"
                marks.append(_bar(left, right, middle, f"hue-{hue % len(HUES)}", number, tip))
                held += nbytes
    ends = across.at(room_bytes)
    x_label = f"{PEAK} of a GPU; the line is where its room ends"
    return Plot(
        about="Peak allocated of a GPU by term, a bar for each set of techniques",
        width=width,
        height=height_below(frame, x_label),
        frame=frame,
        x_ticks=apart([Tick(across.at(nbytes), size(nbytes)) for nbytes in _round_sizes(most)], width),
        y_ticks=[
            named(row["techniques"], middle, middle - 0.36 * _BAR, frame, above=bool(above))
            for row, middle in zip(rows, middles, strict=True)
        ],
        x_label=x_label,
        trends=[Trend("equal", [(ends, frame.top), (ends, frame.bottom)])],
        marks=marks,
    )


def _bar(left: float, right: float, middle: float, look: str, row: int, tip: str) -> Mark:
    high = 0.36 * _BAR
    outline = f"M0 {-high:.2f}h{right - left:.2f}v{2 * high:.2f}h{left - right:.2f}z"
    return Mark(x=left, y=middle, whisker="", ends=(left, right), shape=outline, look=look, row=row, tip=tip)


def _round_sizes(most: float) -> list[int]:
    """Return from four to eight round sizes up to one."""
    step = 2**30
    while most / step > 8:
        step *= 2
    return [number * step for number in range(int(most / step) + 1)]
