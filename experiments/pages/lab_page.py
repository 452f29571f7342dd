"""What a lab of slow links says, as one HTML page: predicted against measured steps, and every cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.evidence.links.lab import LabRecord, LabResult
from experiments.evidence.links.lab_verdict import LAB_HEADS, lab_lines, lab_row
from experiments.pages.drawn import plots
from experiments.pages.drawn.figures import figure as alone
from experiments.pages.drawn.legend import BANDS
from experiments.pages.drawn.pictures import Drawn, Entry, Picture, is_narrow, legend, picture
from experiments.pages.drawn.render import render
from sim.base.units import percent

_WIDTH, _HEIGHT, _LOW = 760, 620, 340
"""Of the plot in pixels, on a wide screen; its height on a phone."""


def page(record: LabRecord) -> str:
    """Return the page of a record."""
    profile = record.profile
    answer, *lines = lab_lines(record)
    return render(
        "lab.html.j2",
        title=_title(record),
        answer=answer,
        notes=[
            *lines,
            f"machine: {profile.machine.gpu}",
            f"kernels: profile of {profile.name}, by: {profile.command}",
            f"lab: begun {record.begun}, by: {record.command}",
        ],
        parity=_parity(record),
        heads=LAB_HEADS,
        rows=[_row(one) for one in record.results],
    )


def figure(record: LabRecord) -> str:
    """Return the parity plot of a record as an SVG, light or dark as its reader prefers."""
    return alone(_title(record), [_parity(record).narrow], [f"{record.profile.machine.gpu}, begun {record.begun}"])


def _title(record: LabRecord) -> str:
    return f"Lab of slow links: {record.title}"


def _parity(record: LabRecord) -> Picture:
    """Return the parity plot of all cells, and its key."""
    methods = list(dict.fromkeys(one.cell.method for one in record.results))
    networks = list(dict.fromkeys(one.cell.network for one in record.results))
    colours = [Entry(plots.CIRCLE, _hue(methods, name), name) for name in methods]
    shapes = [Entry(_shape(networks, name), "inked", name) for name in networks]
    bands = [Entry(plots.SWATCH, look, f"±{100 * share:g} %") for share, look in plots.band_looks(BANDS)]
    points = [
        plots.Point(
            times=one.times,
            shape=_shape(networks, one.cell.network),
            look=_hue(methods, one.cell.method),
            row=number,
            tip=f"{one.cell.name}\n{plots.times_in_words(one.times)}\nerror {percent(one.times.error)}",
        )
        for number, one in enumerate(record.results)
    ]
    about = "Predicted against measured step time of every cell"

    def lay_out(width: float) -> Drawn:
        plot = plots.parity_plot(points, BANDS, width, _LOW if is_narrow(width) else _HEIGHT, about)
        return Drawn(plot, legend([colours, shapes, bands], width))

    return picture(lay_out, _WIDTH)


def _row(one: LabResult) -> list[tuple[Any, str]]:
    """Return what a row sorts by, and what it shows."""
    cell, void = one.cell, sum(repeat.void for repeat in one.repeats)
    by = (
        cell.network, cell.bytes_per_s, cell.seq, cell.method, one.share, one.predicted_s, one.times.median_s,
        one.times.error, void,
    )  # fmt: skip
    return list(zip(by, lab_row(one), strict=True))


def _hue(methods: Sequence[str], method: str) -> str:
    return f"hue-{methods.index(method) % len(plots.HUES)}"


def _shape(networks: Sequence[str], network: str) -> str:
    return plots.SHAPES[networks.index(network) % len(plots.SHAPES)]
