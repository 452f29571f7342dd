"""Charts of the rows of a sweep: figures over what was varied, and what steps and peaks consist of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.evidence.peaks import BESIDE, PEAK
from experiments.pages.drawn.charts import BYTES, NUMBER, SECONDS, Chart, Point, Unit, bars, lines
from experiments.pages.drawn.tables import cell, head
from sim.accounts.breakdown import PARTS
from sim.accounts.memory import TERMS
from sim.base.errors import InputError
from sim.base.units import seconds
from sim.compare.portions import COLUMNS, PLAYED
from sim.words.workload import parse_length

_FIGURES: tuple[tuple[str, str, Unit], ...] = (
    ("step_time_s", "step time", SECONDS),
    ("tokens_per_s_per_gpu", "tokens/s/GPU", NUMBER),
    ("peak_hbm_bytes", PEAK, BYTES),
)
_MOST_LINES, _MOST_BARS = 24, 60
"""Of a chart: more of them cannot be told apart; the table has all."""

Row = Mapping[str, Any]


def sweep_lines(rows: Sequence[Row]) -> list[str]:
    """Return how many rows there are, and which fits and takes least for a token."""
    refused = Counter(bool(row.get("error")) for row in rows)[True]
    unfit = sum(row.get("fits") in ("no", False) for row in rows)
    said = [f"{len(rows)} rows: {unfit} do not fit, {refused} cannot be played"]
    able = [row for row in _played(rows) if row.get("fits") not in ("no", False) and row.get("tokens_per_s_per_gpu")]
    if able:
        most = max(able, key=lambda row: row["tokens_per_s_per_gpu"])
        said.append(
            f"most tokens/s/GPU, {most['tokens_per_s_per_gpu']:.4g}: {_name(most, _varied(rows))}, "
            f"{seconds(most['step_time_s'])} a step"
        )
    return said


def sweep_charts(rows: Sequence[Row]) -> list[Chart]:
    """Return the charts of rows; what cannot be played is in none."""
    played = _played(rows)
    if not played:
        return []
    varied = _varied(rows)
    across = _across(played, varied)
    charts = []
    if across:
        others = [key for key in varied if key != across]
        kept = list(dict.fromkeys(_name(row, others) for row in played))[:_MOST_LINES]
        for column, name, unit in _FIGURES:
            series = {line: _points(played, across, others, line, column) for line in kept}
            found = {line or name: points for line, points in series.items() if points}
            if found:
                about = f"{name} over {head(across)}; hollow: does not fit, or not known to"
                x = (head(across), None if across == "seq" else NUMBER)
                charts.append(lines(found, title=name, about=about, x=x, y=(name, unit)))
    some = played[:_MOST_BARS]
    names = [_name(row, varied) or "step" for row in some]
    for title, columns, unit in (
        ("where the step of the critical rank goes", {str(part): f"{part}_s" for part in PARTS}, SECONDS),
        (f"{PEAK} of a GPU", {str(term): f"{term.replace(' ', '_')}_bytes" for term in TERMS}, BYTES),
    ):
        parts = {name: [row.get(key) or 0 for row in some] for name, key in columns.items()}
        if any(any(values) for values in parts.values()):
            cut = f", of the first {_MOST_BARS} rows" if len(played) > _MOST_BARS else ""
            about = f"A bar for each row: {title}{cut}" + (f". {BESIDE}" if unit is BYTES else "")
            charts.append(bars(names, parts, title=title + cut, about=about, unit=unit))
    if not across and not charts:
        steps = {"step": [row["step_time_s"] for row in some]}
        charts.append(bars(names, steps, title="step time", about="Seconds of each row's step", unit=SECONDS))
    return charts


def _points(played: Sequence[Row], across: str, others: Sequence[str], line: str, column: str) -> list[Point]:
    """Return the points of one line, in the order of their x."""
    found = []
    for row in played:
        if _name(row, others) != line or row.get(column) is None:
            continue
        low, high = row.get("low_s"), row.get("high_s")
        within = (low, high) if column == "step_time_s" and low is not None and high is not None else None
        bound = f"bound by {row['bound_by']}" if row.get("bound_by") else ""
        x = _number(row[across])
        assert x is not None
        found.append(Point(x, row[column], within, row.get("fits") not in ("yes", True), bound))
    return sorted(found, key=lambda point: point.x)


def _played(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row.get("error") and row.get("step_time_s")]


def _varied(rows: Sequence[Row]) -> list[str]:
    """Return the columns that say what a row is, of which some differ between rows."""
    own = [key for key in rows[0] if key not in {*COLUMNS, PLAYED}]
    keys = [key for key in own if isinstance(rows[0][key], str | int | float | None)]
    texts = [key for key in keys if not key.endswith(("_s", "_bytes"))]
    return [key for key in texts if len({row.get(key) for row in rows}) > 1]


def _across(played: Sequence[Row], varied: Sequence[str]) -> str:
    """Return what is varied over most values of those that are numbers; empty for none."""
    best, most = "", 1
    for key in varied:
        values = {_number(row.get(key)) for row in played}
        if None not in values and len(values) > most:
            best, most = key, len(values)
    return best


def _number(value: Any) -> float | None:
    """Return what stands for a number: 64K is 65536; None for what does not."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value)
    except ValueError:
        pass
    try:
        return float(parse_length(value, "`seq`"))
    except InputError:
        return None


def _name(row: Row, keys: Sequence[str]) -> str:
    """Return what tells a row from others."""
    return ", ".join(
        cell(key, row[key]).shown if key in ("schedule", "stack") else f"{head(key)} {cell(key, row[key]).shown}"
        for key in keys
        if row.get(key) not in (None, "")
    )
