"""Pictures: a plot with its key, laid out for wide screens and for phones.

A drawing that is scaled down to a phone cannot be read, so pages have each of them twice and show the one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from experiments.pages.drawn.plots import Plot
from experiments.pages.drawn.texts import TEXT_ROW, text_width, wrapped

NARROW = 340
"""Pixels that every phone has across, between the margins of a page."""
_LEGEND_ROW = 20


class Entry(NamedTuple):
    """What a shape or a colour means."""

    shape: str
    look: str
    label: str


class Legend(msgspec.Struct, frozen=True, kw_only=True):
    """Entries with their places, in rows."""

    width: float
    height: float
    entries: list[tuple[float, float, Entry]]


class Drawn(NamedTuple):
    """A plot with its key."""

    plot: Plot
    key: Legend | None = None


class Picture(NamedTuple):
    """One drawing, laid out for wide screens and for phones."""

    wide: Drawn
    narrow: Drawn


def picture(lay_out: Callable[[float], Drawn], width: float) -> Picture:
    """Return what a function lays out for a width in pixels, for this one and for phones."""
    return Picture(lay_out(width), lay_out(min(width, NARROW)))


def is_narrow(width: float) -> bool:
    """Return whether a drawing of a width is for phones: names stand above what they name rather than beside it."""
    return width <= NARROW


def legend(groups: Sequence[Sequence[Entry]], width: float) -> Legend:
    """Return a legend that breaks its rows at a width, if it can between groups; a label that is longer goes on below
    itself.
    """
    x, y, placed = 0.0, _LEGEND_ROW / 2, []
    for group in groups:
        lengths = [38 + text_width(entry.label) for entry in group]
        if x and x + sum(lengths) > width:
            x, y = 0.0, y + _LEGEND_ROW
        for entry, long in zip(group, lengths, strict=True):
            if x and x + long > width:
                x, y = 0.0, y + _LEGEND_ROW
            first, *rest = wrapped(entry.label, width - 22) if long - 17 > width else [entry.label]
            placed.append((x + 9, y, entry._replace(label=first)))
            for line in rest:
                y += TEXT_ROW
                placed.append((x + 9, y, Entry("", entry.look, line)))
            x += long
        x += 10
    return Legend(width=width, height=y + _LEGEND_ROW / 2, entries=placed)
