"""What a lab of slow links says, as one HTML page: predicted against measured steps, and every cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.evidence.lab import MBIT, LabRecord, LabResult
from experiments.evidence.lab_verdict import lab_lines
from experiments.evidence.units import percent, seconds
from experiments.pages import plots
from experiments.pages.legend import BANDS
from experiments.pages.render import render

_SIZE = (760, 620)


def page(record: LabRecord) -> str:
    """Return the page of a record."""
    methods = list(dict.fromkeys(one.cell.method for one in record.results))
    networks = list(dict.fromkeys(one.cell.network for one in record.results))
    colours = [plots.Entry(plots.CIRCLE, _hue(methods, name), name) for name in methods]
    shapes = [plots.Entry(_shape(networks, name), "inked", name) for name in networks]
    bands = [plots.Entry(plots.SWATCH, look, f"±{100 * share:g} %") for share, look in plots.band_looks(BANDS)]
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
    profile = record.profile
    return render(
        "lab.html.j2",
        title=f"Lab of slow links: {record.title}",
        lines=lab_lines(record),
        provenance=[
            f"machine: {profile.machine.gpu}",
            f"kernels: profile of {profile.name}, by: {profile.command}",
            f"lab: begun {record.begun}, by: {record.command}",
        ],
        key=plots.legend([colours, shapes, bands], _SIZE[0]),
        parity=plots.parity_plot(points, BANDS, *_SIZE, "Predicted against measured step time of every cell"),
        heads=("network", "Mbit/s", "S", "schedule", "communicating", "predicted", "measured", "error", "void"),
        rows=[_row(one) for one in record.results],
    )


def _row(one: LabResult) -> list[tuple[Any, str]]:
    """Return what a row sorts by, and what it shows."""
    cell, void = one.cell, sum(repeat.void for repeat in one.repeats)
    return [
        (cell.network, f"{cell.network} {cell.fault}".strip()),
        (cell.bytes_per_s, f"{cell.bytes_per_s / MBIT:g}"),
        (cell.seq, cell.seq),
        (cell.method, cell.method),
        (one.share, f"{100 * one.share:.0f} %"),
        (one.predicted_s, seconds(one.predicted_s)),
        (one.times.median_s, seconds(one.times.median_s)),
        (one.times.error, percent(one.times.error)),
        (void, f"{void} of {len(one.repeats)}"),
    ]


def _hue(methods: Sequence[str], method: str) -> str:
    return f"hue-{methods.index(method) % len(plots.HUES)}"


def _shape(networks: Sequence[str], network: str) -> str:
    return plots.SHAPES[networks.index(network) % len(plots.SHAPES)]
