"""Plots as data: where values and names lie, and which ticks there are."""

from __future__ import annotations

import pytest

from experiments.evidence.executed.comparison import measured
from experiments.pages.drawn.pictures import Entry, legend
from experiments.pages.drawn.plots import CIRCLE, Axis, Point, parity_plot, share_ticks, time_ticks
from experiments.pages.drawn.texts import text_width


def test_an_axis_puts_values_on_pixels() -> None:
    assert Axis(low=1.0, high=100.0, begin=0.0, end=300.0).at(10.0) == 150.0
    assert Axis(low=-0.1, high=0.1, begin=200.0, end=0.0, logarithmic=False).at(0.05) == 50.0


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1.5e-3, 12e-3, ["2 ms", "5 ms", "10 ms"]),
        (0.4, 6.0, ["500 ms", "1 s", "2 s", "5 s"]),
        (0.8e-6, 2e-3, ["1 us", "10 us", "100 us", "1 ms"]),
    ],
)
def test_ticks_of_time_are_round(low: float, high: float, labels: list[str]) -> None:
    ticks = time_ticks(Axis(low=low, high=high, begin=0.0, end=400.0))
    assert [tick.label for tick in ticks] == labels
    assert all(0 <= tick.at <= 400 for tick in ticks)


def test_ticks_of_shares_are_round_and_apart() -> None:
    ticks = share_ticks(Axis(low=-0.32, high=0.14, begin=140.0, end=0.0, logarithmic=False))
    assert [tick.label for tick in ticks] == ["-30 %", "-20 %", "-10 %", "0 %", "+10 %"]
    fine = share_ticks(Axis(low=-0.011, high=0.012, begin=200.0, end=0.0, logarithmic=False))
    assert [tick.label for tick in fine] == ["-1 %", "-0.5 %", "0 %", "+0.5 %", "+1 %"]


def point(row: int, simulated: float, times: list[float], name: str = "") -> Point:
    return Point(times=measured(simulated, times), shape=CIRCLE, look="", row=row, tip="", name=name)


def test_a_parity_plot_by_hand() -> None:
    """2 s measured, 1 s simulated: right of the diagonal, by as much as a point of 2 s and 2 s lies above."""
    plot = parity_plot([point(0, 1.0, [2.0, 1.8, 2.4]), point(1, 2.0, [2.0])], [0.1], 466.0, 434.0, "")
    low, even = plot.marks
    assert low.x == even.x
    assert low.y > even.y
    frame = plot.frame
    assert even.x - frame.left == pytest.approx(frame.bottom - even.y, abs=0.02), "a square frame: on the diagonal"
    assert low.ends[0] < low.x < low.ends[1]
    assert even.ends == (even.x, even.x)
    (band,) = plot.areas
    assert all(frame.left <= x <= frame.right and frame.top <= y <= frame.bottom for x, y in band.corners)


def test_what_takes_no_time_is_left_out() -> None:
    plot = parity_plot([point(0, 0.0, [1.0]), point(1, 1.0, [0.0]), point(2, 1.0, [1.0])], [], 400.0, 400.0, "")
    assert [mark.row for mark in plot.marks] == [2]
    assert parity_plot([], [0.1], 400.0, 400.0, "").marks == []


def test_names_do_not_overlap() -> None:
    names = [f"a kind of op {row}" for row in range(12)]
    plot = parity_plot([point(row, 1.0 + row / 10, [1.0], names[row]) for row in range(12)], [], 500.0, 430.0, "")
    boxes = []
    for mark in plot.marks:
        if mark.name_at:
            x, y, anchor = mark.name_at
            left = x - text_width(mark.name) * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
            boxes.append((left, y - 11, left + text_width(mark.name), y + 3))
    assert len(boxes) > 2
    for number, (a, b, c, d) in enumerate(boxes):
        assert all(c < e or g < a or d < f or h < b for e, f, g, h in boxes[:number])


def test_a_legend_breaks_its_rows() -> None:
    groups = [[Entry(CIRCLE, "", f"schedule {n}") for n in range(count)] for count in (2, 3, 9)]
    found = legend(groups, 400.0)
    assert [entry for _, _, entry in found.entries] == [entry for group in groups for entry in group]
    assert all(x + 12 + text_width(entry.label) <= 400 for x, _, entry in found.entries)
    assert found.entries[2][1] > found.entries[1][1], "a group that does not fit begins a row"
    assert found.height == max(y for _, y, _ in found.entries) + 10
