"""What a report says of each kind of result: its lines, charts, tables, timeline and evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from experiments.evidence.lab import LabRecord
from experiments.evidence.lab_verdict import lab_lines
from experiments.evidence.provenance import evidence_lines
from experiments.evidence.record import Record, judged, provenance, summary
from experiments.evidence.results import Result
from experiments.evidence.units import length, percent, seconds, size
from experiments.pages.charts import BYTES, NUMBER, SECONDS, SHARE, Chart, Point, bars, lines, parity
from experiments.pages.sweep_chapter import sweep_charts, sweep_lines
from experiments.pages.tables import Rows, cell, head, table
from experiments.pages.timeline import busy, memory_charts, of_chrome
from sim.engine.report import Evidence
from sim.errors import InputError
from sim.memory import TERMS


class Chapter(msgspec.Struct, frozen=True, kw_only=True):
    """What a report says of one result."""

    title: str
    says: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Rows] = ()
    timeline: dict[str, Any] | None = None
    evidence: Sequence[str] = ()
    """What its figures rest on."""


def chapter(result: Result) -> Chapter:
    """Return the chapter of a result; raises InputError for one that lacks what its kind has."""
    try:
        return _CHAPTERS[result.kind](result)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{result.name!r} looks like what longstep {result.kind} wrote, but cannot be shown ({error!r}): it is of "
            f"another version, or was edited; write it again"
        ) from error


def _rows(result: Result) -> Chapter:
    rows: list[dict[str, Any]] = result.data
    return Chapter(
        title=f"Sweep: {result.name}",
        says=sweep_lines(rows),
        charts=sweep_charts(rows),
        tables=[table("all rows", rows)],
        evidence=[f"by: {result.command}"] if result.command else [],
    )


def _trace(result: Result) -> Chapter:
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


def _record(result: Result) -> Chapter:
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


def _lab(result: Result) -> Chapter:
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


def _compare(result: Result) -> Chapter:
    found = result.data
    step: dict[str, Any] = {"op_kind": "step", "ops": None, **_times(found["step"])}
    kinds = [
        {"op_kind": f"{row['kind']} {row['part']}", "ops": row["count"], **_times(row["times"])}
        for row in found["kinds"]
    ]
    both = f"simulated {seconds(step['simulated_s'])}, measured {seconds(step['measured_s'])}"
    return Chapter(
        title=f"Executed beside simulated: {result.name}",
        says=[f"{both}: error {percent(step['error'])}", *found["diagnosis"]],
        charts=[_parity([step, *kinds], "op_kind")],
        tables=[table("op kinds, mean of the ranks, and the step", [*kinds, step])],
        evidence=_evidence(found["report"]["evidence"]),
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


def _simulate(result: Result) -> Chapter:
    found = result.data
    parts, room = found["breakdown"], found.get("room")
    held = room["terms"] if room else found["memory"]
    within = found["interval_s"]
    interval = f", 90 % interval {seconds(within[0])} to {seconds(within[1])}" if within else ""
    charts = [_stack("where the step of the critical rank goes", {name: [s] for name, s in parts.items()}, SECONDS)]
    if any(held.values()):
        charts.append(_stack("peak memory of a GPU", {name: [nbytes] for name, nbytes in held.items()}, BYTES))
    if saves := found.get("saves"):
        first = sorted(saves, key=lambda figure: -saves[figure])
        charts.append(
            bars(first, {"saved": [saves[figure] for figure in first]}, title="what doubling each figure saves",
                 about="Share of the step that doubling each figure of the machine saves", unit=SHARE)
        )  # fmt: skip
    rows = [{"figure": head(name), "value": _shown(name, value)} for name, value in found.items() if _is_figure(value)]
    rows += [{"figure": f"floor of {name}", "value": seconds(value)} for name, value in found["floors"].items()]
    return Chapter(
        title=f"Predicted step: {result.name}",
        says=[f"{seconds(found['step_time_s'])} a step{interval}; bound by {found['bound_by'] or 'not asked'}"],
        charts=charts,
        tables=[table("figures", rows)],
        evidence=_evidence(found["evidence"]),
    )


def _stack(title: str, parts: Mapping[str, Sequence[float]], unit: Any) -> Chart:
    return bars(["step"], parts, title=title, about=f"One bar of its parts: {title}", unit=unit)


def _is_figure(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _shown(name: str, value: Any) -> str:
    return cell(name, value).shown or "not known"


def _evidence(found: Mapping[str, Any]) -> list[str]:
    return evidence_lines(msgspec.convert(found, Evidence))


def _run(result: Result) -> Chapter:
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


def _plan(result: Result) -> Chapter:
    best, lost = result.data["best"], result.data["lost"]
    tried = result.data.get("tried") or []
    says = [f"{result.data['configurations']} configurations, {result.data['simulated']} simulated"]
    charts = []
    if best:
        series = {
            f"{row['schedule']} {row['options']}": [Point(row["peak_hbm_bytes"], row["step_time_s"], _interval(row))]
            for row in best
        }
        charts.append(
            lines(series, title="the best configurations", x=("peak HBM", BYTES), y=("step", SECONDS), joined=False,
                  about="Seconds of a step over the peak of memory, of each of the best configurations")
        )  # fmt: skip
    else:
        says.append(f"nothing fits; the smallest shortage: {result.data['shortage']}")
    tables = [table("best", best), table("why others lose", lost), table("tried", tried)]
    return Chapter(
        title=f"Plan: {result.name}", says=[*_answered(result.data), *says], charts=charts,
        tables=[one for one in tables if one.rows],
    )  # fmt: skip


def _answer(result: Result) -> Chapter:
    return Chapter(
        title=f"Plan: {result.name}", says=_answered(result.data), tables=[table("tried", result.data["tried"])]
    )


def _answered(found: Mapping[str, Any]) -> list[str]:
    if "tried" not in found:
        return []
    of_length = found["tried"] and "seq" in found["tried"][0]
    value = found["value"]
    shown = "nothing that was tried" if value is None else length(value) if of_length else str(value)
    said = f"{'longest context' if of_length else 'fewest GPUs'}: {shown}"
    return [said if found["sure"] else f"{said}; the search was cut short, so that there may be a better answer"]


def _interval(row: Mapping[str, Any]) -> tuple[float, float] | None:
    low, high = row.get("low_s"), row.get("high_s")
    return None if low is None or high is None else (low, high)


def _doctor(result: Result) -> Chapter:
    found = result.data
    causes = [{name: value for name, value in row.items() if _is_figure(value)} for row in found["causes"]]
    said = [f"{found['verdict']}: predicted {seconds(found['simulated_s'])}"]
    if found["measured_s"] is not None:
        said[0] += f", measured {seconds(found['measured_s'])}"
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
        title=f"Doctor: {result.name}", says=[*said, *found["findings"]], charts=charts, tables=tables,
        evidence=[f"not simulated: {line}" for line in found["skipped"]],
    )  # fmt: skip


def _cause(row: Mapping[str, Any]) -> str:
    return str(row.get("cause") or row.get("name"))


def _balance(result: Result) -> Chapter:
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
        says=[f"{len(documents)} documents of {min(documents)} to {max(documents)} tokens, {sum(documents)} in all"],
        charts=charts,
        tables=[table("planners", result.data["planners"])],
    )


def _roofline(result: Result) -> Chapter:
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
    return Chapter(title=f"Roofline: {result.name}", charts=[chart], tables=tables, evidence=list(notes))


def _study(result: Result) -> Chapter:
    found = result.data
    charts = sweep_charts(found["rows"]) if all(row.get("step_time_s") for row in found["rows"]) else []
    says = [found["conclusion"]]
    return Chapter(title=found["question"], says=says, charts=charts, tables=[table("rows", found["rows"])])


def _ladder(result: Result) -> Chapter:
    rows = result.data
    terms: dict[str, list[float]] = {term: [row[term] for row in rows] for term in TERMS}
    names = [row["techniques"] for row in rows]
    capacity = rows[0]["peak_hbm_bytes"] + rows[0]["free_bytes"]
    shown = [{**{k: v for k, v in row.items() if k not in TERMS}, **_sizes(row)} for row in rows]
    about = "Peak memory of a GPU by term, a bar for each set of techniques; free and peak add up to the line"
    return Chapter(
        title=f"Ladder: {result.name}",
        says=[f"techniques at {length(rows[0]['seq'])}: memory by term, and the longest context"],
        charts=[
            bars(names, terms, title="peak memory of a GPU", about=about, unit=BYTES, limit=(size(capacity), capacity)),
            bars(names, {"step": [row["step_time_s"] for row in rows]}, title="step", unit=SECONDS,
                 about="Seconds of a step with each set of techniques"),
        ],
        tables=[table("techniques", shown)],
    )  # fmt: skip


def _sizes(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms of a ladder's row under names that say that they are bytes."""
    return {f"{term.replace(' ', '_')}_bytes": row[term] for term in TERMS}


def _fit(result: Result) -> Chapter:
    rows = result.data
    series: dict[str, list[Point]] = {}
    for row in rows:
        if row["step_time_s"] is not None:
            hollow = row["fits"] is not True
            series.setdefault(row["row"], []).append(Point(row["seq"], row["step_time_s"], hollow=hollow))
    about = "Seconds of a step of what fits, over the sequence length; hollow: at the limit"
    charts = [lines(series, title="what fits", about=about, x=("S", None), y=("step", SECONDS))] if series else []
    return Chapter(title=f"What fits: {result.name}", charts=charts, tables=[table("cells", rows)])


def _elasticities(result: Result) -> Chapter:
    rows = result.data
    names, values = [row["figure"] for row in rows], [row["elasticity"] for row in rows]
    about = "Share by which the step changes when a figure does by one per cent, times one hundred"
    chart = bars(names, {"elasticity": values}, title="elasticity of the step", about=about, unit=NUMBER)
    return Chapter(title=f"Elasticities: {result.name}", charts=[chart], tables=[table("figures", rows)])


def _table_alone(title: str) -> Callable[[Result], Chapter]:
    return lambda result: Chapter(title=f"{title}: {result.name}", tables=[table("rows", result.data)])


_CHAPTERS: dict[str, Callable[[Result], Chapter]] = {
    "answer": _answer, "balance": _balance, "compare": _compare, "crossover": _table_alone("Crossover"),
    "doctor": _doctor, "elasticities": _elasticities, "fit": _fit, "lab": _lab, "ladder": _ladder, "plan": _plan,
    "record": _record, "roofline": _roofline, "rows": _rows, "run": _run, "simulate": _simulate, "study": _study,
    "trace": _trace, "winners": _table_alone("Winners"),
}  # fmt: skip
