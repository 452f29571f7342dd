"""A batch of documents as one HTML page: what every rank attends, a row of bars for each planner."""

from __future__ import annotations

from experiments.pages.plots import HUES, Frame, Mark, Plot, Tick, Trend
from experiments.pages.render import render
from sim.setup.balance import Balance
from sim.units import seconds, size

_WIDTH, _ROW, _LEFT = 1000, 64, 130
"""Pixels: of the plot, of a planner's bars with the distance to the next, and of the names beside them."""
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
    return render(
        "balance.html.j2",
        title=title,
        answer=found.answer,
        plot=bars(found),
        heads=heads,
        rows=found.rows.rows,
        size=size,
    )


def bars(found: Balance) -> Plot:
    """Return a bar for each rank of every planner, as high as its seconds, and a line at their mean."""
    frame = Frame(_LEFT, 10, _WIDTH - 20, 10 + _ROW * max(1, len(found.found)))
    wide = (frame.right - frame.left) / found.ranks
    most = max((float(one.seconds.sum(axis=1).max()) for one in found.found), default=0.0) or 1.0
    places = {row["planner"]: number for number, row in enumerate(found.rows)}
    marks, trends, names = [], [], []
    for number, one in enumerate(found.found):
        per_rank = one.seconds.sum(axis=1).tolist()
        ground = frame.top + _ROW * (number + 0.92)
        mean = ground - 0.84 * _ROW * (sum(per_rank) / len(per_rank)) / most
        trends.append(Trend("equal", [(frame.left, mean), (frame.right, mean)]))
        names.append(Tick(ground - 0.42 * _ROW, one.planned.planner))
        look = f"hue-{number % len(HUES)}"
        for rank, taken in enumerate(per_rank):
            left, high = frame.left + wide * (rank + 0.1), 0.84 * _ROW * taken / most
            outline = f"M0 0h{0.8 * wide:.2f}v{-high:.2f}h{-0.8 * wide:.2f}z"
            tip = f"{one.planned.planner}, rank {rank}\n{seconds(taken)}\n{one.statistics.tokens[rank]} tokens"
            marks.append(
                Mark(x=left, y=ground, whisker="", ends=(left, left + 0.8 * wide), shape=outline, look=look,
                     row=places[one.planned.planner], tip=tip)
            )  # fmt: skip
    step = -(-found.ranks // _MOST_TICKS)
    return Plot(
        about="Predicted seconds of attention of every rank, a row of bars for each planner",
        width=_WIDTH,
        height=frame.bottom + 44,
        frame=frame,
        x_ticks=[Tick(frame.left + wide * (rank + 0.5), str(rank)) for rank in range(0, found.ranks, step)],
        y_ticks=names,
        x_label="rank; the lines are means",
        trends=trends,
        marks=marks,
    )
