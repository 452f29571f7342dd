"""Results of any verbs as one HTML page: a chapter each, with charts that plotly.js draws from within the page.

plotly.js lies in the page as a whole, 4.8 MB, so that it works without a network. Chapters are in
``step_chapters.py`` and ``search_chapters.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from markupsafe import Markup

from experiments.evidence.results import Result
from experiments.pages.drawn.plots import HUES
from experiments.pages.drawn.render import render
from experiments.pages.drawn.timeline import family_colours
from experiments.pages.report.chapters import Chapter
from experiments.pages.report.search_chapters import (
    answer_chapter,
    balance_chapter,
    crossover_chapter,
    fit_chapter,
    ladder_chapter,
    plan_chapter,
    roofline_chapter,
    rows_chapter,
    study_chapter,
    winners_chapter,
)
from experiments.pages.report.step_chapters import (
    cases_chapter,
    compare_chapter,
    doctor_chapter,
    elasticities_chapter,
    lab_chapter,
    neighbours_chapter,
    record_chapter,
    run_chapter,
    simulate_chapter,
    trace_chapter,
)
from sim.base.errors import InputError

NEEDS_PLOTLY = "report needs the package plotly: pip install 'longstep[report]'"
_CHAPTERS: dict[str, Callable[[Result], Chapter]] = {
    "answer": answer_chapter,
    "balance": balance_chapter,
    "compare": compare_chapter,
    "cases": cases_chapter,
    "crossover": crossover_chapter,
    "doctor": doctor_chapter,
    "elasticities": elasticities_chapter,
    "fit": fit_chapter,
    "lab": lab_chapter,
    "ladder": ladder_chapter,
    "neighbours": neighbours_chapter,
    "plan": plan_chapter,
    "record": record_chapter,
    "roofline": roofline_chapter,
    "rows": rows_chapter,
    "run": run_chapter,
    "simulate": simulate_chapter,
    "study": study_chapter,
    "trace": trace_chapter,
    "winners": winners_chapter,
}
"""By kinds of results."""


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
        answer=next(iter(chapters[0].says), "") if len(chapters) == 1 else "",
        chapters=chapters,
        library=Markup(library),  # noqa: S704 - of a package, as a script; the test sees that no tag ends it
        charts=charts,
        timelines=timelines,
        palette={tone: [hue[number] for hue in HUES.values()] for number, tone in enumerate(("light", "dark"))},
        family_hues=family_colours(),
    )


def chapter(result: Result) -> Chapter:
    """Return the chapter of a result; raises InputError for one that lacks what its kind has."""
    try:
        return msgspec.structs.replace(_CHAPTERS[result.kind](result), rests_on=result.rests_on)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{result.name!r} looks like what longstep {result.kind} wrote, but cannot be shown ({error!r}): it is of "
            f"another version, or was edited; write it again"
        ) from error


def plotly_js() -> str:
    """Return plotly.js; raises InputError if its package is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise InputError(NEEDS_PLOTLY) from None
    found: str = get_plotlyjs()
    return found
