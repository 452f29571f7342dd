"""Figures for pages of Markdown: SVG files that stand alone, laid out for phones, as such a page only scales them."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.pages.drawn.pictures import NARROW, Drawn
from experiments.pages.drawn.render import render
from experiments.pages.drawn.texts import TEXT_ROW, wrapped

_EDGE, _GAP, _HEAD = 10, 8, 20
"""Pixels around a figure, below each of its drawings, and from one line of its title to the next."""
_SCALE = 1.3
"""Pixels of a figure over those that its drawings are laid out in: as large as the text of pages around it."""
_HEAD_SIZE = 1.4
"""Width of a character of its title, larger and bold, over that of other texts."""


def figure(title: str, drawings: Sequence[Drawn], about: Sequence[str] = ()) -> str:
    """Return drawings of the width of phones below each other, under a title and what there is to say about them."""
    y, texts = _EDGE / 2, []
    for line in wrapped(title, NARROW / _HEAD_SIZE):
        y += _HEAD
        texts.append((y, "head", line))
    for line in (line for one in about for line in wrapped(one, NARROW)):
        y += TEXT_ROW
        texts.append((y, "soft", line))
    y += _EDGE
    column = []
    for drawn in drawings:
        column.append((y, drawn))
        y += drawn.plot.height + _GAP
        if drawn.key:
            y += drawn.key.height + _GAP
    return render(
        "figure.svg.j2", title=title, texts=texts, column=column, edge=_EDGE, gap=_GAP, scale=_SCALE,
        width=NARROW + 2 * _EDGE, height=y + _EDGE,
    )  # fmt: skip
