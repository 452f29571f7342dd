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

from experiments.evidence.comparison import Comparison, comparison_lines, comparison_table, laid_side_by_side
from experiments.pages.comparison_page import page
from experiments.verbs.run import Execution, measured_steps, median_step, open_session
from experiments.verbs.selection import Chosen, Selection, choose
from experiments.verbs.simulate import title, writable, write_trace
from sim.engine.report import report
from sim.errors import InputError
from sim.profile import Profile, write_whole
from sim.schedule.proof.check import Checked
from sim.trace import Trace

if TYPE_CHECKING:
    from runtime.processes.launch import Session
    from runtime.processes.torchrun import Workers
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


def compare(command: Compare, console: Console, workers: Workers | None = None) -> None:
    """Execute and simulate, and print both."""
    chosen = choose(command.selection)
    for path in (command.trace, command.html):
        if path:
            writable(path)
    calibrated(chosen)
    checked = chosen.checked()
    with open_session(chosen, checked, command.execution, workers) as session:
        found, traces = comparison(chosen, checked, session, command.execution.repeats)
    if command.trace:
        write_trace(command.trace, checked, traces)
    if command.html:
        simulated, executed = traces
        text = page(title(chosen, checked), found, simulated, executed)
        write_whole(Path(command.html), text.encode())
    if command.json:
        console.print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode(), markup=False)
        return
    console.print(comparison_table(title(chosen, checked), found))
    for line in comparison_lines(found):
        console.print(line, markup=False)


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
    """Return the comparison, and the simulated and the (median) executed trace."""
    from runtime.run import ScheduleRun

    profile = calibrated(chosen)
    drift = [_drift(session, profile)]
    run = ScheduleRun(session, checked)
    simulation = chosen.simulated(checked)
    predicted = report(simulation, with_interval=True)

    def advancing() -> Step:
        step = run.step()
        advance()
        return step

    steps = measured_steps(advancing, repeats)
    run.close()
    drift.append(_drift(session, profile))
    if chosen.spec.gpu.kind == "cpu" and not session.one_host:
        predicted.evidence.notes.append(
            "executed on several hosts, predicted as on one: a host's profile knows no other"
        )
    found = laid_side_by_side(checked, simulation.trace, predicted, steps, drift)
    return found, [simulation.trace, median_step(steps).trace]


def _drift(session: Session, profile: Profile) -> float:
    """Return how much longer kernels of the profile take now: the median over a few, since each point has its noise."""
    from calibrate.residuals import repeat

    repeated = repeat(profile, session, most=_PROBES, budget_s=_PROBE_S)
    return statistics.median(one.drift for one in repeated) if repeated else 0.0
