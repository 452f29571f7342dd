"""What a page shows of an answer: figures as texts, and charts as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from experiments.evidence.peaks import beside_in
from experiments.evidence.provenance import evidence_lines
from experiments.pages.drawn.charts import SECONDS, Chart, bars
from experiments.pages.drawn.step_charts import memory_chart, parts_chart, saves_chart
from experiments.pages.drawn.tables import Rows, table
from experiments.pages.report.sweep_chapter import sweep_charts
from sim.base.units import FEW, number, seconds, seconds_between
from sim.compare.portions import COLUMNS, Row, columns
from sim.engine.results.report import Report
from sim.setup.answers.answer import grounds, interval
from sim.setup.answers.figures import figures_shown, limit_shown
from sim.setup.answers.places import is_able
from sim.setup.prediction import Prediction

COMPARED = (
    "variant", "degrees", "step_time_s", "90 % interval", "tokens_per_s_per_gpu", "for_a_token", "mfu",
    "peak_hbm_bytes", "fits", "bound_by", "error",
)  # fmt: skip
"""Columns of variants side by side."""


def figures(prediction: Prediction, found: Report) -> dict[str, Any]:
    """Return what is known of a step at once."""
    training = found.training
    return {
        "title": prediction.title,
        "step_time_s": found.step_time_s,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
        "mfu": found.mfu,
        "peak_hbm_bytes": found.peak_hbm_bytes,
        "fits": found.verdict,
        "breakdown": {str(part): taken for part, taken in found.breakdown.items()},
        "gpus": prediction.checked.schedule.num_ranks,
        "seq": prediction.checked.schedule.header.workload.real_seq,
        "gpu_hours": training.gpu_hours_per_billion_tokens if training else None,
        "said": _said(found),
        "shown": figures_shown(prediction, found),
        "beside": beside_in(found.room, prediction.cluster.spec),
        "charts": {"memory": plain(memory_chart(found)), "parts": plain(parts_chart(found.breakdown))},
    }


def _said(found: Report) -> str:
    """Return what there is to say before the interval is known."""
    rate = f"{seconds(found.step_time_s, FEW)} a step, {number(found.tokens_per_s_per_gpu, FEW)} tokens/s/GPU"
    return f"{rate}; {limit_shown(found.room.tightest)}" if found.room else rate


def answered(prediction: Prediction) -> dict[str, Any]:
    """Return the sentence with the interval, which takes three further plays."""
    within = prediction.interval
    return {"answer": prediction.answer, "interval_s": within, "shown": [["90 % interval", interval(prediction)]]}


def whole(prediction: Prediction, found: Report) -> dict[str, Any]:
    """Return what bounds the step, and what the answer rests on."""
    basis = grounds(prediction)
    return {
        "shown": [["bound by", found.bound_by]],
        "bound_by": found.bound_by,
        "saves": found.saves,
        "rests_on": basis.lines,
        "warnings": basis.warnings,
        "evidence": evidence_lines(found.evidence),
        "techniques": prediction.techniques,
        "charts": {"saves": plain(saves_chart(found.saves))} if found.saves else {},
    }


def row_of(prediction: Prediction, found: Report) -> Row:
    """Return the columns of a row of a sweep."""
    return {**columns(prediction, found, found.interval_s), "error": ""}


def compared(rows: Sequence[Row]) -> dict[str, Any]:
    """Return variants side by side: their steps with intervals, what these and their memory consist of, and a table."""
    best = max((row["tokens_per_s_per_gpu"] for row in rows if is_able(row)), default=None)
    told = [{**row, "for_a_token": _slower(row, best), "90 % interval": _within(row)} for row in rows]
    played = [row for row in told if not row["error"]]
    within = [(row["low_s"], row["high_s"]) if row["low_s"] else None for row in played]
    names = [row["variant"] for row in played]
    steps = bars(
        names, {"step": [row["step_time_s"] for row in played]}, title="seconds of a step",
        about="Seconds of a step of each variant, with 90 % intervals", unit=SECONDS, within=within,
    )  # fmt: skip
    others = sweep_charts([{"schedule": row["variant"], **{key: row[key] for key in COLUMNS}} for row in played])
    return {
        "charts": [plain(chart) for chart in ([steps, *others] if played else [])],
        "table": msgspec.to_builtins(table("variants", told, COMPARED)),
    }


def plain(chart: Chart | Rows) -> Any:
    """Return a chart as data for the page."""
    return msgspec.to_builtins(chart)


def _slower(row: Row, best: float | None) -> str:
    """Return how many times as long a token takes as by the fastest that fits."""
    if row["error"] or best is None:
        return ""
    times = best / row["tokens_per_s_per_gpu"]
    return "fastest" if times == 1 else f"{number(times, FEW)} times as long"


def _within(row: Row) -> str:
    return seconds_between(row["low_s"], row["high_s"]) if row["low_s"] else ""
