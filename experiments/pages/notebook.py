"""Charts in notebooks: those of the pages, drawn without a script, so that outputs are small and need nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.pages.drawn.charts import Chart
from experiments.pages.drawn.render import render
from experiments.pages.drawn.step_charts import memory_chart, parts_chart, saves_chart
from experiments.pages.drawn.still import still
from experiments.pages.report.sweep_chapter import sweep_charts
from sim.setup.answers.charts import Drawing
from sim.setup.played import PlayedStep

_OF_STEPS = {"step_time_s", "mfu"}
"""Keys of rows that each are a step."""


def of_step(prediction: PlayedStep) -> str:
    """Return the charts of a prediction as HTML: its memory, where its step goes, and what doubling saves."""
    found = prediction.figures
    charts = [memory_chart(found), parts_chart(found.breakdown)]
    return _shown([*charts, saves_chart(found.saves)] if found.saves else charts)


def of_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the charts of steps side by side as HTML; "" for a single one, and for rows of anything else."""
    return _shown(sweep_charts(rows)) if len(rows) > 1 and rows[0].keys() >= _OF_STEPS else ""


DRAWING = Drawing(of_step, of_rows)


def _shown(charts: Sequence[Chart]) -> str:
    drawn = [(chart, still(chart)) for chart in charts if chart.traces]
    return render("notebook.html.j2", drawn=drawn) if drawn else ""
