"""What a report says of single steps: simulated, executed, measured, and side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from experiments.evidence.executed.record import Record, judged, provenance, summary
from experiments.evidence.links.lab import LabRecord
from experiments.evidence.links.lab_verdict import lab_lines
from experiments.evidence.peaks import PEAK
from experiments.evidence.results import Result
from experiments.pages.drawn.charts import BYTES, NUMBER, RATIO, SECONDS, SHARE, Chart, Point, bars, lines, parity
from experiments.pages.drawn.step_charts import parts_chart, saves_chart
from experiments.pages.drawn.tables import cell, head, table
from experiments.pages.drawn.timeline import busy, memory_charts, of_chrome
from experiments.pages.report.chapters import Chapter, is_figure, said, stated
from sim.base.errors import InputError
from sim.base.units import percent, seconds


def trace_chapter(result: Result) -> Chapter:
    """Return a chapter of what one player or two did, by rank and stream."""
    events = result.data["traceEvents"]
    timeline = of_chrome(result.name, events)
    players, spent = timeline["players"], busy(timeline)
    rows = [{"op_kind": name, "ops": count, **_named(players, taken)} for name, count, taken in spent]
    hashes = {one["schedule_hash"] for one in result.data.get("otherData", {}).get("traces", [])}
    chart = bars(
        [name for name, _, _ in spent],
        {player: [taken[number] for _, _, taken in spent] for number, player in enumerate(players)},
        title="seconds at work by op kind, of all ranks", unit=SECONDS,
        about="Seconds at work of each op kind, summed over all ranks",
    )  # fmt: skip
    chart = msgspec.structs.replace(chart, layout={**chart.layout, "barmode": "group"})
    return Chapter(
        title=f"Step by rank and stream: {result.name}",
        says=[f"{' and '.join(players)}, to {seconds(timeline['end_s'])}"],
        charts=[*memory_charts(events), chart],
        tables=[table("op kinds, of all ranks", rows)],
        timeline=timeline,
        evidence=[f"schedule: {name}" for name in sorted(hashes)],
    )


def _named(players: Sequence[str], taken: Sequence[float]) -> dict[str, float]:
    return {f"{player}_s": spent for player, spent in zip(players, taken, strict=True)}


def record_chapter(result: Result) -> Chapter:
    """Return a chapter of cells of a record, simulated and measured."""
    record: Record = result.data
    cells = judged(record)
    if not cells:
        raise InputError(f"record {result.name!r} holds no comparison; longstep validate --out writes one")
    rows = [
        {
            "cell": one.cell.name, "seq": one.cell.seq, "ranks": one.cell.gpus, "schedule": one.cell.method,
            "simulated_s": one.times.simulated_s, "measured_s": one.times.median_s, "least_s": one.times.low_s,
            "most_s": one.times.high_s, "error": one.times.error, "met": str(one.met),
        }
        for one in cells
    ]  # fmt: skip
    return Chapter(
        title=f"Simulated against measured: {record.title}",
        says=summary(record),
        charts=[_parity(rows, "cell"), _errors(rows)],
        tables=[table("cells", rows)],
        evidence=provenance(record),
    )


def lab_chapter(result: Result) -> Chapter:
    """Return a chapter of cells of a lab of slow links."""
    record: LabRecord = result.data
    rows = [
        {
            "cell": one.cell.name, "network": one.cell.network, "schedule": one.cell.method,
            "communicating": f"{100 * one.share:.0f} %", "simulated_s": one.predicted_s,
            "measured_s": one.times.median_s, "error": one.times.error,
            "void": sum(repeat.void for repeat in one.repeats),
        }
        for one in record.results
    ]  # fmt: skip
    return Chapter(
        title=f"Lab of slow links: {record.title}",
        says=lab_lines(record),
        charts=[_parity(rows, "cell"), _errors(rows)],
        tables=[table("cells", rows)],
        evidence=[f"machine: {record.profile.machine.gpu}", f"begun {record.begun}, by: {record.command}"],
    )


def compare_chapter(result: Result) -> Chapter:
    """Return a chapter of one step, executed beside simulated."""
    found = result.data
    step: dict[str, Any] = {"op_kind": "step", "ops": None, **_times(found["step"])}
    kinds = [
        {"op_kind": f"{row['kind']} {row['part']}", "ops": row["count"], **_times(row["times"])}
        for row in found["kinds"]
    ]
    both = f"simulated {seconds(step['simulated_s'])}, measured {seconds(step['measured_s'])}"
    return Chapter(
        title=f"Executed beside simulated: {result.name}",
        says=[*said(result, [f"{both}: error {percent(step['error'])}"]), *found["diagnosis"]],
        charts=[_parity([step, *kinds], "op_kind")],
        tables=[table("op kinds, mean of the ranks, and the step", [*kinds, step])],
        evidence=stated(found["report"]["evidence"]),
    )


def _times(times: Mapping[str, float]) -> dict[str, float]:
    return {
        "simulated_s": times["simulated_s"], "measured_s": times["median_s"], "least_s": times["low_s"],
        "most_s": times["high_s"], "error": times["error"],
    }  # fmt: skip


def _parity(rows: Sequence[Mapping[str, Any]], name: str) -> Chart:
    points = [(row[name], row["measured_s"], row["simulated_s"]) for row in rows]
    about = "Simulated over measured seconds, both logarithmic, with the line on which they are equal"
    return parity(points, title="simulated against measured", about=about)


def _errors(rows: Sequence[Mapping[str, Any]]) -> Chart:
    names = [row["cell"] for row in rows]
    about = "Simulated over measured time, less one, of each cell"
    return bars(names, {"error": [row["error"] for row in rows]}, title="error", about=about, unit=SHARE)


def simulate_chapter(result: Result) -> Chapter:
    """Return a chapter of a predicted step."""
    found = result.data
    parts, room = found["breakdown"], found.get("room")
    held = room["terms"] if room else found["memory"]
    charts = [parts_chart(parts)]
    if any(held.values()):
        charts.append(_stack(f"{PEAK} of a GPU", {name: [nbytes] for name, nbytes in held.items()}, BYTES))
    if saves := found.get("saves"):
        charts.append(saves_chart(saves))
    rows = [
        {"figure": head(name), "value": _shown(name, value)}
        for name, value in found.items()
        if is_figure(value) and name != "answer"
    ]
    rows += [{"figure": f"floor of {name}", "value": seconds(value)} for name, value in found["floors"].items()]
    return Chapter(
        title=f"Predicted step: {result.name}",
        says=said(result, [f"{seconds(found['step_time_s'])} a step"]),
        charts=charts,
        tables=[table("figures", rows)],
        evidence=stated(found["evidence"]),
    )


def _stack(title: str, parts: Mapping[str, Sequence[float]], unit: Any) -> Chart:
    return bars(["step"], parts, title=title, about=f"One bar of its parts: {title}", unit=unit)


def _shown(name: str, value: Any) -> str:
    return cell(name, value).shown or "not known"


def run_chapter(result: Result) -> Chapter:
    """Return a chapter of executed steps."""
    found = result.data
    runs = {"executed": [Point(number + 1, taken) for number, taken in enumerate(found["step_times_s"])]}
    about = "Seconds of each executed step"
    parts = {name: [s] for name, s in found["breakdown"].items()}
    errors = [{"tensor": name, "largest_relative_error": error} for name, error in found["errors"].items()]
    return Chapter(
        title=f"Executed: {result.name}",
        says=[f"median of {len(found['step_times_s'])} steps {seconds(found['step_time_s'])}"],
        charts=[
            lines(runs, title="executed steps", about=about, x=("step", NUMBER), y=("time", SECONDS)),
            _stack(f"where the step of rank {found['critical_rank']} went", parts, SECONDS),
        ],
        tables=[table("against the reference", errors)] if errors else [],
        evidence=[f"schedule: {found['schedule_hash']}", f"attention kernel: {found['attention']}"],
    )


def doctor_chapter(result: Result) -> Chapter:
    """Return a chapter of what a measured run points to."""
    found = result.data
    causes = [{name: value for name, value in row.items() if is_figure(value)} for row in found["causes"]]
    verdict = f"{found['verdict']}: predicted {seconds(found['simulated_s'])}"
    if found["measured_s"] is not None:
        verdict += f", measured {seconds(found['measured_s'])}"
    charts = []
    if steps := [row for row in causes if row.get("step_time_s")]:
        limit = None if found["measured_s"] is None else ("measured", found["measured_s"])
        names = [_cause(row) for row in steps]
        charts.append(
            bars(names, {"step": [row["step_time_s"] for row in steps]}, unit=SECONDS, limit=limit,
                 title="the step with each cause", about="Simulated seconds of a step with each cause")
        )  # fmt: skip
    tables = [table("causes", causes)]
    if traced := found.get("traced"):
        tables.append(table("work beside the simulated one", traced["kinds"]))
    return Chapter(
        title=f"Doctor: {result.name}",
        says=[*said(result, [verdict]), *found["findings"]],
        charts=charts,
        tables=tables,
        evidence=[f"not simulated: {line}" for line in found["skipped"]],
    )


def _cause(row: Mapping[str, Any]) -> str:
    return str(row.get("cause") or row.get("name"))


def elasticities_chapter(result: Result) -> Chapter:
    """Return a chapter of what a step depends on."""
    rows = result.data
    known = [row for row in rows if row["elasticity"] is not None]
    names, values = [row["figure"] for row in known], [row["elasticity"] for row in known]
    about = "Share by which the step changes when a figure does by one per cent, times one hundred"
    chart = bars(names, {"elasticity": values}, title="elasticity of the step", about=about, unit=RATIO)
    return Chapter(title=f"Elasticities: {result.name}", charts=[chart], tables=[table("figures", rows)])


def neighbours_chapter(result: Result) -> Chapter:
    """Return a chapter of what is one change away from a step."""
    rows = result.data
    played = [row for row in rows if not row["error"]]
    names = [row["change"] or "none" for row in played]
    about = "Seconds for a token with each change of one degree or option, over those without any"
    chart = bars(names, {"for a token": [row["ratio"] for row in played]}, title="one change away", unit=RATIO,
                 about=about, limit=("no change", 1.0))  # fmt: skip
    faster = [row for row in played if row["ratio"] < 1 and row["fits"] is not False]
    says = [f"fastest that fits: {faster[0]['change']}, {faster[0]['ratio']:.3f} times as long for a token"] * bool(
        faster
    )
    return Chapter(
        title=f"One change away: {result.name}", says=says or ["no change that fits is faster"], charts=[chart],
        tables=[table("changes", rows)],
    )  # fmt: skip


def cases_chapter(result: Result) -> Chapter:
    """Return a chapter of predictions beside published measurements, a chart for each case file."""
    of_file: dict[str, list[dict[str, Any]]] = {}
    for row in result.data:
        of_file.setdefault(row["cases"], []).append(row)
    says, charts = [], []
    for title, rows in of_file.items():
        mean = sum(abs(row["error"]) for row in rows) / len(rows)
        says.append(f"{title}: {len(rows)} cases, mean error {100 * mean:.1f} %")
        points = [(row["case"], row["measured_s"], row["predicted_s"]) for row in rows]
        about = f"Predicted over measured seconds of {title}, both logarithmic, with the line on which they are equal"
        charts.append(parity(points, title=title, about=about))
    return Chapter(
        title=f"Predicted against published: {result.name}", says=says, charts=charts,
        tables=[table("cases", result.data)],
    )  # fmt: skip
