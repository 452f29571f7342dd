"""Rows of bars in drawings: names beside them, or above them on phones, and round figures along them."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.pages.drawn.pictures import is_narrow
from experiments.pages.drawn.plots import Frame, Mark, Tick, named

ROW = 26
"""Pixels of a bar with its distance to the next."""
_NAME = 18
"""Pixels of a name above what it names."""


def rows_in(names: Sequence[str], left: float, width: float, high: float = ROW) -> tuple[Frame, list[Tick]]:
    """Return the frame of rows with names, and the middle of each: names stand beside them, on phones above."""
    above = _NAME if is_narrow(width) and any(names) else 0
    frame = Frame(14 if above else left, 10, width - 20, 10 + (high + above) * len(names))
    tops = [frame.top + (high + above) * row + above for row in range(len(names))]
    return frame, [
        named(name, top + high / 2, top, frame, above=bool(above)) for name, top in zip(names, tops, strict=True)
    ]


def bar_mark(
    left: float, long: float, middle: float, look: str, row: int, tip: str, within: tuple[float, float] | None = None
) -> Mark:
    """Return a bar that begins at the left and is so long; ``within`` is where its interval begins and ends."""
    high = 0.4 * ROW
    outline = f"M0 {-high:.2f}h{long:.2f}v{2 * high:.2f}h{-long:.2f}z"
    whisker = ""
    if within:
        (low, most), top = within, middle - 4
        whisker = f"M{low:.2f} {top:.2f}v8M{low:.2f} {middle:.2f}H{most:.2f}M{most:.2f} {top:.2f}v8"
    return Mark(x=left, y=middle, whisker=whisker, ends=(left, left + long), shape=outline, look=look, row=row, tip=tip)


def round_values(most: float) -> list[float]:
    """Return four to eight round values from 0 up to one."""
    step = 10.0**-9
    while most / step > 8:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    return [number * step for number in range(int(most / step) + 1)]
