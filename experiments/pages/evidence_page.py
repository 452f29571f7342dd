"""Predictions against published measurements as one HTML page: a parity plot of every case file, and all its cases."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.evidence.executed.comparison import Measured
from experiments.evidence.papers.published import HEADS, CasePrediction, Evidence, judged_groups, provenance
from experiments.pages.drawn.legend import BANDS, Kind, Looks
from experiments.pages.drawn.pictures import Drawn, Picture, is_narrow, picture
from experiments.pages.drawn.plots import Point, parity_plot
from experiments.pages.drawn.render import render
from sim.base.units import percent, seconds

_WIDTH, _HEIGHT, _LOW = 560, 520, 340
"""Of a plot in pixels, on a wide screen; its height on a phone."""


def page(evidence: Sequence[Evidence]) -> str:
    """Return the page of some case files."""
    sections, first = [], 0
    for one in evidence:
        looks = Looks([_kind(found) for found in one.found])
        sections.append(
            {
                "provenance": provenance(one.file),
                "groups": judged_groups(one),
                "parity": _parity(one.found, looks, first),
                "cases": one.found,
                "first": first,
            }
        )
        first += len(one.found)
    return render(
        "evidence.html.j2", title="Predicted against published times", answer=_answer(evidence), heads=HEADS,
        sections=sections,
    )  # fmt: skip


def _answer(evidence: Sequence[Evidence]) -> str:
    found = [case for one in evidence for case in one.found]
    if not found:
        return ""
    mean = sum(abs(one.error) for one in found) / len(found)
    bounded = [one for one in found if one.bounded]
    covered = f"; {sum(one.covered for one in bounded)} of {len(bounded)} intervals hold what was measured"
    return (
        f"Predicted times of {len(found)} published cases are off by {100 * mean:.1f} % in the mean"
        f"{covered if bounded else ''}."
    )


def _kind(found: CasePrediction) -> Kind:
    return Kind(found.case.name, found.ranks, found.case.setup.scope)


def _parity(found: Sequence[CasePrediction], looks: Looks, first: int) -> Picture:
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
    about = "Predicted against published time of every case, on logarithmic axes"

    def lay_out(width: float) -> Drawn:
        plot = parity_plot(points, BANDS, width, _LOW if is_narrow(width) else _HEIGHT, about)
        return Drawn(plot, looks.key(width))

    return picture(lay_out, _WIDTH)


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
