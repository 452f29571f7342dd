"""Predictions against published measurements as one HTML page: a parity plot of every case file, and all its cases."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.evidence.comparison import Measured
from experiments.evidence.published import HEADS, CasePrediction, Evidence, judged_groups, provenance
from experiments.pages.legend import BANDS, Kind, Looks
from experiments.pages.plots import Plot, Point, parity_plot
from experiments.pages.render import render
from sim.units import percent, seconds

_SIZE = (560, 520)
"""Width and height of a plot in pixels."""


def page(evidence: Sequence[Evidence]) -> str:
    """Return the page of some case files."""
    sections, first = [], 0
    for one in evidence:
        looks = Looks([_kind(found) for found in one.found])
        sections.append(
            {
                "provenance": provenance(one.file),
                "groups": judged_groups(one),
                "key": looks.key(_SIZE[0]),
                "parity": _parity(one.found, looks, first),
                "cases": one.found,
                "first": first,
            }
        )
        first += len(one.found)
    return render("evidence.html.j2", title="Predicted against published times", heads=HEADS, sections=sections)


def _kind(found: CasePrediction) -> Kind:
    return Kind(found.case.name, found.ranks, found.case.setup.scope)


def _parity(found: Sequence[CasePrediction], looks: Looks, first: int) -> Plot:
    points = [
        Point(
            times=_times(one),
            shape=looks.shape(one.ranks),
            look=looks.look(one.case.name, one.case.setup.scope),
            row=first + number,
            tip=_tip(one),
        )
        for number, one in enumerate(found)
    ]
    return parity_plot(points, BANDS, *_SIZE, "Predicted against published time of every case, on logarithmic axes")


def _times(one: CasePrediction) -> Measured:
    measured_s = one.case.measured_s
    return Measured(
        simulated_s=one.predicted_s, median_s=measured_s, low_s=measured_s, high_s=measured_s, error=one.error
    )


def _tip(one: CasePrediction) -> str:
    options = f"{one.case.options}\n" if one.case.options else ""
    return (
        f"{one.case.group}\n{one.what}\n{options}"
        f"predicted {seconds(one.predicted_s)} [{seconds(one.low_s)} to {seconds(one.high_s)}], "
        f"measured {seconds(one.case.measured_s)}: {percent(one.error)}"
    )
