"""A batch of documents as one HTML page: what every rank attends, a row of bars for each planner."""

from __future__ import annotations

from experiments.pages.drawn.pictures import Drawn, is_narrow, picture
from experiments.pages.drawn.plots import HUES, Frame, Mark, Plot, Tick, Trend, apart, height_below, named
from experiments.pages.drawn.render import render
from sim.balance.balance import Balance
from sim.base.units import seconds, size

_WIDTH, _BARS, _LEFT, _NAME = 1000, 64, 130, 18
"""Pixels: of the plot, of a planner's bars with the distance to the next, of the names beside them, and of a name above
them.
"""
_MOST_TICKS = 16


def page(title: str, found: Balance) -> str:
    """Return the page of what ``longstep.balance`` returned."""
    heads = (
        "planner",
        "attention",
        "slowest rank",
        "slowest / mean",
        "pairs",
        "tokens",
        "received",
        "planned in",
        "refused",
    )
    drawn = picture(lambda width: Drawn(bars(found, width)), _WIDTH)
    return render(
        "balance.html.j2",
        title=title,
        answer=found.answer,
        picture=drawn,
        heads=heads,
        rows=found.rows.rows,
        size=size,
    )


def bars(found: Balance, width: float = _WIDTH) -> Plot:
    """Return a bar for each rank of every planner, as high as its seconds, and a line at their mean."""
    above, x_label = is_narrow(width), "rank; the lines are means"
    row = _BARS + _NAME * above
    frame = Frame(14 if above else _LEFT, 10, width - 20, 10 + row * max(1, len(found.found)))
    wide = (frame.right - frame.left) / found.ranks
    most = max((float(one.seconds.sum(axis=1).max()) for one in found.found), default=0.0) or 1.0
    places = {row["planner"]: number for number, row in enumerate(found.rows)}
    marks, trends, names = [], [], []
    for number, one in enumerate(found.found):
        per_rank = one.seconds.sum(axis=1).tolist()
        ground = frame.top + row * (number + 1) - 0.08 * _BARS
        mean = ground - 0.84 * _BARS * (sum(per_rank) / len(per_rank)) / most
        trends.append(Trend("equal", [(frame.left, mean), (frame.right, mean)]))
        middle, top = ground - 0.42 * _BARS, ground - 0.84 * _BARS
        names.append(named(one.planned.planner, middle, top, frame, above=above))
        look = f"hue-{number % len(HUES)}"
        for rank, taken in enumerate(per_rank):
            left, high = frame.left + wide * (rank + 0.1), 0.84 * _BARS * taken / most
            outline = f"M0 0h{0.8 * wide:.2f}v{-high:.2f}h{-0.8 * wide:.2f}z"
            tip = f"{one.planned.planner}, rank {rank}\n{seconds(taken)}\n{one.statistics.tokens[rank]} tokens"
            marks.append(
                Mark(x=left, y=ground, whisker="", ends=(left, left + 0.8 * wide), shape=outline, look=look,
                     row=places[one.planned.planner], tip=tip)
            )  # fmt: skip
    step = -(-found.ranks // _MOST_TICKS)
    return Plot(
        about="Predicted seconds of attention of every rank, a row of bars for each planner",
        width=width,
        height=height_below(frame, x_label),
        frame=frame,
        x_ticks=apart(
            [Tick(frame.left + wide * (rank + 0.5), str(rank)) for rank in range(0, found.ranks, step)], width
        ),
        y_ticks=names,
        x_label=x_label,
        trends=trends,
        marks=marks,
    )
