"""Results of any verbs as one HTML page: a chapter each, with charts that plotly.js draws from within the page.

plotly.js lies in the page as a whole, 4.8 MB, so that it works without a network. Chapters are in ``chapters.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from experiments.evidence.results import Result
from experiments.pages.chapters import Chapter, chapter
from experiments.pages.plots import HUES
from experiments.pages.render import render
from experiments.pages.timeline import family_colours
from sim.errors import InputError

NEEDS_PLOTLY = "report needs the package plotly: pip install 'longstep[report]'"


def page(title: str, results: Sequence[Result]) -> str:
    """Return the page of some results; raises InputError if plotly is not installed, or a result cannot be shown."""
    library = plotly_js()
    chapters: list[Chapter] = [chapter(result) for result in results]
    charts = {
        f"chart-{number}-{place}": {"traces": chart.traces, "layout": chart.layout}
        for number, one in enumerate(chapters)
        for place, chart in enumerate(one.charts)
    }
    timelines = {f"timeline-{number}": one.timeline for number, one in enumerate(chapters) if one.timeline}
    return render(
        "report.html.j2",
        title=title,
        chapters=chapters,
        library=Markup(library),  # noqa: S704 - of a package, as a script; the test sees that no tag ends it
        charts=charts,
        timelines=timelines,
        palette={tone: [hue[number] for hue in HUES.values()] for number, tone in enumerate(("light", "dark"))},
        family_hues=family_colours(),
    )


def plotly_js() -> str:
    """Return plotly.js; raises InputError if its package is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise InputError(NEEDS_PLOTLY) from None
    found: str = get_plotlyjs()
    return found
