"""``longstep compare``: execute a schedule, simulate the same object, and lay both side by side."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro
from rich.console import Console
from rich.table import Table

from experiments.diagnosis import diagnosis
from experiments.execute import Execution, measured_steps, median_step, open_session
from experiments.selection import Chosen, Selection, choose
from experiments.simulate import predict, title, writable, write_trace
from experiments.stragglers import straggler_costs
from experiments.tables import evidence_lines, percent, seconds, size
from sim.engine.report import Report
from sim.errors import InputError
from sim.memory import walk
from sim.profile import Profile, write_whole
from sim.schedule.check import Checked
from sim.trace import Trace

if TYPE_CHECKING:
    from runtime.launch import Session
    from runtime.run import Step


_PROBES, _PROBE_S = 6, 0.1
"""Kernels that are timed again to see whether the machine has drifted, and for how long each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Execute and simulate the same schedule, and compare op kinds and the step."""

    selection: Annotated[Selection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Selection)
    execution: Annotated[Execution, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Execution)
    trace: str | None = None
    """Write a Chrome trace with both to this file: the simulated step, and the executed one of median time."""
    html: str | None = None
    """Write one HTML page with both to this file: op kinds, a parity plot, a timeline and where the step went."""
    json: bool = False
    """Print one JSON object instead of a table."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated time beside executed ones."""

    simulated_s: float
    median_s: float
    low_s: float
    """Least of the executed times."""
    high_s: float
    """Largest of the executed times."""
    error: float
    """simulated / median - 1."""


class KindRow(msgspec.Struct, frozen=True, kw_only=True):
    """All ops of one kind, in seconds at work, averaged over the ranks."""

    kind: str
    part: str
    count: int
    times: Measured


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """Largest sum of the buffers of a rank, over all ranks, in bytes: no workspace of kernels."""

    simulated: int
    executed: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule, simulated and executed."""

    schedule_hash: str
    step: Measured
    step_times_s: list[float]
    kinds: list[KindRow]
    peak_bytes: Peak
    diagnosis: list[str]
    """Where the error comes from, in sentences."""
    drift: list[float]
    """Before and after: how much longer kernels take now than when the machine was calibrated."""
    report: Report


def compare(command: Compare, console: Console) -> None:
    """Execute and simulate, and print both."""
    chosen = choose(command.selection)
    for path in (command.trace, command.html):
        if path:
            writable(path)
    calibrated(chosen)
    if command.execution.device != "cpu":
        raise InputError(f"--device {command.execution.device}: a GPU cannot be calibrated yet; set --device cpu")
    checked = chosen.checked()
    with open_session(chosen, checked, command.execution) as session:
        found, traces = comparison(chosen, checked, session, command.execution.repeats)
    if command.trace:
        write_trace(command.trace, checked, traces)
    if command.html:
        from experiments.page import page  # which knows what a comparison is

        simulated, executed = traces
        text = page(title(chosen, checked), found, simulated, executed, straggler_costs(chosen))
        write_whole(Path(command.html), text.encode())
    if command.json:
        console.print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode(), markup=False)
        return
    console.print(comparison_table(title(chosen, checked), found))
    for line in comparison_lines(found):
        console.print(line, markup=False)


def comparison_lines(found: Comparison) -> list[str]:
    """Return what a comparison says beside its table: memory, the machine, where the error lies, and the evidence."""
    peak = found.peak_bytes
    return [
        f"peak of the buffers: simulated {size(peak.simulated)}, executed {size(peak.executed)}",
        drift_line(found.drift),
        *(f"diagnosis: {sentence}" for sentence in found.diagnosis),
        *evidence_lines(found.report.evidence),
    ]


def calibrated(chosen: Chosen) -> Profile:
    """Return the profile that a comparison rests on; raises InputError if there is none."""
    if chosen.profile is None:
        raise InputError(
            "comparing needs a profile of this machine: run longstep calibrate --quick, then set --profile"
        )
    return chosen.profile


def comparison(
    chosen: Chosen, checked: Checked, session: Session, repeats: int, advance: Callable[[], None] = lambda: None
) -> tuple[Comparison, list[Trace]]:
    """Return the comparison, and the simulated and the (median) executed trace.

    Every executed step is followed by a simulated one, which has to come out the same each time.
    """
    from runtime.run import ScheduleRun

    profile = calibrated(chosen)
    drift = [_drift(session, profile)]
    run = ScheduleRun(session, checked)
    _, simulation, report = predict(chosen)

    def both() -> object:
        step = run.step()
        again = predict(chosen)[2].step_time_s
        assert again == report.step_time_s, "a simulation came out differently"
        advance()
        return step

    steps = measured_steps(both, repeats)
    run.close()
    drift.append(_drift(session, profile))
    found = laid_side_by_side(checked, simulation.trace, report, steps, drift)
    return found, [simulation.trace, median_step(steps).trace]


def laid_side_by_side(
    checked: Checked, simulated: Trace, report: Report, steps: list[Step], drift: list[float]
) -> Comparison:
    """Return what a simulated and some executed steps of one schedule say of each other."""
    traces = [step.trace for step in steps]
    times = [trace.step_time_s for trace in traces]
    kinds = _kinds(simulated, traces)
    errors = {f"{row.kind} {row.part}": row.times.simulated_s - row.times.median_s for row in kinds}
    walks = [walk(p, d) for p, d in zip(checked.schedule.programs, checked.dependencies, strict=True)]
    median = median_step(steps)
    return Comparison(
        schedule_hash=checked.schedule.hash,
        step=measured(report.step_time_s, times),
        step_times_s=times,
        kinds=kinds,
        peak_bytes=Peak(simulated=max(found.buffer_peak_bytes for found in walks), executed=max(median.peak_bytes)),
        diagnosis=diagnosis(errors, drift, simulated, median.trace),
        drift=drift,
        report=report,
    )


def measured(simulated: float, executed: list[float]) -> Measured:
    """Return a simulated time beside executed ones."""
    median = statistics.median(executed)
    return Measured(
        simulated_s=simulated,
        median_s=median,
        low_s=min(executed),
        high_s=max(executed),
        error=simulated / median - 1 if median else 0.0,
    )


def _kinds(simulated: Trace, executed: list[Trace]) -> list[KindRow]:
    """Return the time at work by op kind and pass, averaged over ranks."""
    keys = sorted({(row.part, row.kind) for row in simulated.rows}, key=lambda key: (key[0] == "backward", key))

    def total(trace: Trace, key: tuple[str, str]) -> float:
        return sum(row.busy_s for row in trace.rows if (row.part, row.kind) == key) / trace.num_ranks

    return [
        KindRow(
            kind=kind,
            part=part,
            count=sum((row.part, row.kind) == (part, kind) for row in simulated.rows),
            times=measured(total(simulated, (part, kind)), [total(trace, (part, kind)) for trace in executed]),
        )
        for part, kind in keys
    ]


def _drift(session: Session, profile: Profile) -> float:
    """Return how much longer kernels of the profile take now: the median over a few, since each point has its noise."""
    from calibrate.residuals import repeat

    repeated = repeat(profile, session, most=_PROBES, budget_s=_PROBE_S)
    return statistics.median(one.drift for one in repeated) if repeated else 0.0


def comparison_table(name: str, found: Comparison) -> Table:
    """Return simulated against measured, per op kind and for the step."""
    table = Table("op kind", "ops", "simulated", "measured", "least", "most", "error", title=name, title_justify="left")
    for row in found.kinds:
        table.add_row(f"{row.kind} {row.part}", str(row.count), *_cells(row.times))
    table.add_section()
    table.add_row("step", "", *_cells(found.step))
    return table


def _cells(times: Measured) -> list[str]:
    shown = [seconds(value) for value in (times.simulated_s, times.median_s, times.low_s, times.high_s)]
    return [*shown, percent(times.error)]


def drift_line(drift: list[float]) -> str:
    """Return what some kernels say of the machine's speed since its calibration."""
    before, after = (percent(value) for value in drift)
    return f"machine: beside its calibration, kernels take {before} before these steps and {after} after them"
