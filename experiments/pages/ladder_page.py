"""A ladder of techniques as one HTML page: bars of memory by term, and what each technique saves and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.evidence.peaks import PEAK, beside
from experiments.pages.plots import HUES, SWATCH, Axis, Entry, Frame, Mark, Plot, Tick, Trend, legend
from experiments.pages.render import render
from sim.memory import TERMS
from sim.setup.answer_table import of_ladder
from sim.units import length, size
from topology.specs import ClusterSpec

_WIDTH, _ROW, _LEFT = 1000, 24, 210
"""Pixels: of the plot, of a bar with its distance to the next, and of the names beside them."""


def page(title: str, rows: Sequence[dict[str, Any]], spec: ClusterSpec) -> str:
    """Return the page of what ``longstep.ladder`` returned, on this cluster."""
    looks = [Entry(SWATCH, f"hue-{number % len(HUES)}", term) for number, term in enumerate(TERMS)]
    return render(
        "ladder.html.j2",
        title=title,
        answer=of_ladder(rows),
        seq=length(rows[0]["seq"]),
        key=legend([[look] for look in looks], _WIDTH),
        plot=bars(rows, spec.hbm.capacity_bytes - spec.reserved.nbytes),
        beside=beside(spec),
        heads=("techniques", "longest context", "step", PEAK, "left", "host", *TERMS),
        rows=rows,
        terms=TERMS,
        length=length,
        size=size,
    )


def bars(rows: Sequence[dict[str, Any]], room_bytes: int) -> Plot:
    """Return a bar for each row, of the terms of its peak, and a line where a GPU has no more room for it."""
    frame = Frame(_LEFT, 10, _WIDTH - 20, 10 + _ROW * len(rows))
    most = 1.05 * max(room_bytes, *(row["peak_hbm_bytes"] for row in rows))
    across = Axis(low=0.0, high=most, begin=frame.left, end=frame.right, logarithmic=False)
    middles = [frame.top + _ROW * (number + 0.5) for number in range(len(rows))]
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
    return Plot(
        about="Peak allocated of a GPU by term, a bar for each set of techniques",
        width=_WIDTH,
        height=frame.bottom + 44,
        frame=frame,
        x_ticks=[Tick(across.at(nbytes), size(nbytes)) for nbytes in _round_sizes(most)],
        y_ticks=[Tick(middle, row["techniques"]) for row, middle in zip(rows, middles, strict=True)],
        x_label=f"{PEAK} of a GPU; the line is where its room ends",
        trends=[Trend("equal", [(ends, frame.top), (ends, frame.bottom)])],
        marks=marks,
    )


def _bar(left: float, right: float, middle: float, look: str, row: int, tip: str) -> Mark:
    high = 0.36 * _ROW
    outline = f"M0 {-high:.2f}h{right - left:.2f}v{2 * high:.2f}h{left - right:.2f}z"
    return Mark(x=left, y=middle, whisker="", ends=(left, right), shape=outline, look=look, row=row, tip=tip)


def _round_sizes(most: float) -> list[int]:
    """Return from four to eight round sizes up to one."""
    step = 2**30
    while most / step > 8:
        step *= 2
    return [number * step for number in range(int(most / step) + 1)]
