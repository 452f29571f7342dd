"""What a report says of many steps: sweeps, plans, studies, and what fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.evidence.peaks import BESIDE, PEAK
from experiments.evidence.results import Result
from experiments.pages.drawn.charts import BYTES, NUMBER, RATIO, SECONDS, Point, Unit, bars, lines
from experiments.pages.drawn.tables import head, table
from experiments.pages.report.chapters import Chapter, is_number, said, stated
from experiments.pages.report.sweep_chapter import sweep_charts, sweep_lines
from sim.accounts.memory import TERMS
from sim.base.units import length, size


def rows_chapter(result: Result) -> Chapter:
    """Return a chapter of the rows of a sweep."""
    rows: list[dict[str, Any]] = result.data
    return Chapter(
        title=f"Sweep: {result.name}",
        says=[*said(result, []), *sweep_lines(rows)],
        charts=sweep_charts(rows),
        tables=[table("all rows", rows)],
        evidence=[f"by: {result.command}"] if result.command else [],
    )


def plan_chapter(result: Result) -> Chapter:
    """Return a chapter of the best configurations."""
    best, lost = result.data["best"], result.data["lost"]
    tried = result.data.get("tried") or []
    says = [f"{result.data['configurations']} configurations, {result.data['simulated']} simulated"]
    if result.data["slack"] and not result.answer:
        says.append("the search was cut short, so that there may be a better one")
    charts = []
    if best:
        series = {
            f"{row['schedule']} {row['options']}": [Point(row["peak_hbm_bytes"], row["step_time_s"], _interval(row))]
            for row in best
        }
        charts.append(
            lines(series, title="the best configurations", x=(PEAK, BYTES), y=("step", SECONDS), joined=False,
                  about=f"Seconds of a step of each of the best configurations. {BESIDE}")
        )  # fmt: skip
    elif not result.answer:
        says.append(f"nothing fits; the smallest shortage: {result.data['shortage']}")
    tables = [table("best", best), table("why others lose", lost), table("tried", tried)]
    return Chapter(
        title=f"Plan: {result.name}", says=[*said(result, _answered(result.data)), *says], charts=charts,
        tables=[one for one in tables if one.rows],
        evidence=stated(result.data["evidence"]) if result.data.get("evidence") else [],
    )  # fmt: skip


def answer_chapter(result: Result) -> Chapter:
    """Return a chapter of a reverse question to the planner."""
    return Chapter(
        title=f"Plan: {result.name}",
        says=said(result, _answered(result.data)),
        tables=[table("tried", result.data["tried"])],
    )


def _answered(found: Mapping[str, Any]) -> list[str]:
    if "tried" not in found:
        return []
    of_length = found["tried"] and "seq" in found["tried"][0]
    value = found["value"]
    shown = "nothing that was tried" if value is None else length(value) if of_length else str(value)
    if found["sure"]:
        return [f"{'longest context' if of_length else 'fewest GPUs'}: {shown}"]
    least = "" if value is None else "at least " if of_length else "at most "
    return [f"{'longest context' if of_length else 'fewest GPUs'}: {least}{shown}; the search was cut short"]


def _interval(row: Mapping[str, Any]) -> tuple[float, float] | None:
    low, high = row.get("low_s"), row.get("high_s")
    return None if low is None or high is None else (low, high)


def balance_chapter(result: Result) -> Chapter:
    """Return a chapter of planners of a batch, rank by rank."""
    charts = []
    for planner, found in result.data["of"].items():
        ranks = found["ranks"]
        name = next(key for key in ranks[0] if key == "seconds" or key.endswith("_s"))
        charts.append(
            bars([f"rank {row['rank']}" for row in ranks], {"attention": [row[name] for row in ranks]}, unit=SECONDS,
                 title=f"{planner}, by rank", about=f"Seconds of attention of every rank, as {planner} plans it")
        )  # fmt: skip
    documents = result.data["documents"]
    return Chapter(
        title=f"Balance: {result.name}",
        says=[
            *said(result, []),
            f"{len(documents)} documents of {min(documents)} to {max(documents)} tokens, {sum(documents)} in all",
        ],
        charts=charts,
        tables=[table("planners", result.data["planners"])],
    )


def roofline_chapter(result: Result) -> Chapter:
    """Return a chapter of kernels and machine balances."""
    series: dict[str, list[Point]] = {}
    for row in sorted(result.data["kernels"], key=lambda row: row["flops_per_byte"]):
        name = f"{row['kernel']} {row['attention'] or row['variant'] or ''}".strip()
        says = f"length {length(row['seq'])}, bound by {row['bound']}"
        series.setdefault(name, []).append(Point(row["flops_per_byte"], row["flops_per_s"], says=says))
    chart = lines(
        series, title="kernels of a layer", x=("FLOPs a byte of HBM", NUMBER), y=("FLOP/s", NUMBER), joined=False,
        about="Rate of every kernel over its FLOPs a byte",
    )  # fmt: skip
    notes = dict.fromkeys(row["note"] for row in result.data["kernels"] if row["note"])
    tables = [table("machine balance", result.data["balance"]), table("kernels", result.data["kernels"])]
    return Chapter(
        title=f"Roofline: {result.name}", says=said(result, []), charts=[chart], tables=tables, evidence=list(notes)
    )


def study_chapter(result: Result) -> Chapter:
    """Return a chapter of a study."""
    found = result.data
    charts = sweep_charts(found["rows"]) if all(row.get("step_time_s") for row in found["rows"]) else []
    says = [found[key] for key in ("answer", "conclusion") if key in found]
    return Chapter(title=found["question"], says=says, charts=charts, tables=[table("rows", found["rows"])])


def ladder_chapter(result: Result) -> Chapter:
    """Return a chapter of techniques, by memory and time."""
    rows = result.data
    terms: dict[str, list[float]] = {term: [row[term] for row in rows] for term in TERMS}
    names = [row["techniques"] for row in rows]
    capacity = rows[0]["peak_hbm_bytes"] + rows[0]["free_bytes"]
    shown = [{**{k: v for k, v in row.items() if k not in TERMS}, **_sizes(row)} for row in rows]
    about = f"A bar for each set of techniques, by term; free and peak add up to the line. {BESIDE}"
    return Chapter(
        title=f"Ladder: {result.name}",
        says=said(result, [f"techniques at {length(rows[0]['seq'])}: memory by term, and the longest context"]),
        charts=[
            bars(names, terms, title=f"{PEAK} of a GPU", about=about, unit=BYTES, limit=(size(capacity), capacity)),
            bars(names, {"step": [row["step_time_s"] for row in rows]}, title="step", unit=SECONDS,
                 about="Seconds of a step with each set of techniques"),
        ],
        tables=[table("techniques", shown)],
    )  # fmt: skip


def _sizes(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms of a ladder's row under names that say that they are bytes."""
    return {f"{term.replace(' ', '_')}_bytes": row[term] for term in TERMS}


def fit_chapter(result: Result) -> Chapter:
    """Return a chapter of what fits."""
    rows = result.data
    series: dict[str, list[Point]] = {}
    for row in rows:
        if row["step_time_s"] is not None:
            hollow = row["fits"] is not True
            series.setdefault(row["row"], []).append(Point(row["seq"], row["step_time_s"], hollow=hollow))
    about = "Seconds of a step of what fits, over the sequence length; hollow: at the limit"
    charts = [lines(series, title="what fits", about=about, x=("S", None), y=("step", SECONDS))] if series else []
    says = said(result, [])
    return Chapter(title=f"What fits: {result.name}", says=says, charts=charts, tables=[table("cells", rows)])


def winners_chapter(result: Result) -> Chapter:
    """Return a chapter of who is fastest where: a map, or, of one axis that has numbers, by how much."""
    rows = result.data
    axes = [key for key in [*rows[0]][: [*rows[0]].index("winner")] if all(is_number(row[key]) for row in rows)]
    places: dict[str, list[Point]] = {}
    across = axes[-1] if axes else ""
    for row in rows if axes else ():
        lead = f"{100 * (row['ratio'] - 1):.2g} % before {row['behind']}" if row["ratio"] else row["why"]
        y = row[axes[0]] if len(axes) > 1 else row["ratio"] or 1.0
        hollow = row["tied"] is not False
        places.setdefault(row["winner"] or "nobody", []).append(Point(row[across], y, hollow=hollow, says=lead))
    charts = []
    if places:
        up = (
            (head(axes[0]), across_unit(axes[0]) or NUMBER)
            if len(axes) > 1
            else ("times as fast as the one behind", RATIO)
        )
        about = f"Who is fastest by {' and '.join(map(head, axes))}; hollow: tied with the one behind, or not known"
        charts.append(
            lines(places, title="the fastest", about=about, x=(head(across), across_unit(across)), y=up, joined=False)
        )
    says = said(result, [f"{name}: {len(found)} of {len(rows)} places" for name, found in places.items()])
    return Chapter(title=f"Winners: {result.name}", says=says, charts=charts, tables=[table("places", rows)])


def crossover_chapter(result: Result) -> Chapter:
    """Return a chapter of where the faster of two changes."""
    found, key = result.data, result.data["along"]
    names = {"a": found["a"], "b": found["b"], "": "neither"}
    series = {
        names[which]: [Point(row["value"], row[f"{which}_s"]) for row in found["points"] if row[f"{which}_s"]]
        for which in "ab"
    }

    def shown(value: float) -> str:
        return length(int(value)) if key == "seq" else f"{value:.4g}"

    says, rows = [], []
    for row in found["crossings"]:
        if row["value"] is not None:
            known = "" if row["low"] is None else f", known to be in {shown(row['low'])} to {shown(row['high'])}"
            says.append(f"at {shown(row['value'])} {names[row['above']]} instead of {names[row['below']]}{known}")
        told = {name: None if row[name] is None else shown(row[name]) for name in ("value", "low", "high")}
        rows.append({**told, "below": names[row["below"]], "above": names[row["above"]]})
    about = f"Seconds of a step of both over {head(key)}, wherever they were played"
    drawn = {name: points for name, points in series.items() if points}
    charts = [
        lines(drawn, title="both", about=about, x=(head(key), across_unit(key)), y=("step", SECONDS))
    ] if drawn else []  # fmt: skip
    says = said(result, says or [f"no crossover: {names[found['crossings'][-1]['below']]} everywhere"])
    return Chapter(title=f"Crossover: {result.name}", says=says, charts=charts, tables=[table("changes", rows)])


def across_unit(key: str) -> Unit | None:
    """Return how an axis shows a key that was varied; None for lengths of sequences."""
    return None if key == "seq" else NUMBER
