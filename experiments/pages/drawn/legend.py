"""How a plot tells cells apart: schedules by colour, ranks by shape, layers from attention by hollow marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from experiments.pages.drawn.pictures import Entry, Legend, legend
from experiments.pages.drawn.plots import CIRCLE, HUES, SHAPES, SWATCH, band_looks
from sim.schedule.methods.catalog import SCHEDULES

BANDS = (0.05, 0.10, 0.20)
"""Errors that parity plots shade."""


class Kind(NamedTuple):
    """What shows of a cell."""

    schedule: str
    """And its stack."""
    gpus: int
    scope: str


class Looks:
    """How the cells of one plot look; schedules have the order of the catalog, those of the user's own come last."""

    def __init__(self, cells: Sequence[Kind]) -> None:
        known = list(SCHEDULES)
        found = dict.fromkeys(one.schedule for one in cells)
        self.schedules = sorted(found, key=lambda name: known.index(name) if name in known else len(known))
        self.ranks = sorted({one.gpus for one in cells})
        self.scopes = sorted({one.scope for one in cells})

    def look(self, schedule: str, scope: str = "attention") -> str:
        """Return the classes of a mark."""
        hue = f"hue-{self.schedules.index(schedule) % len(HUES)}"
        return hue if scope == "attention" else f"{hue} hollow"

    def shape(self, gpus: int) -> str:
        """Return the outline of a mark."""
        return SHAPES[self.ranks.index(gpus) % len(SHAPES)]

    def key(self, width: float) -> Legend:
        """Return what colours, shapes and shades mean."""
        groups = [[Entry(CIRCLE, self.look(name), name) for name in self.schedules]]
        groups.append([Entry(self.shape(gpus), "inked", f"P = {gpus}") for gpus in self.ranks])
        if len(self.scopes) > 1:
            groups.append([Entry(CIRCLE, "inked", "attention"), Entry(CIRCLE, "inked hollow", "whole layers")])
        groups.append([Entry(SWATCH, look, f"±{100 * share:g} %") for share, look in band_looks(BANDS)])
        return legend(groups, width)
