"""``make demo``: calibrate this machine, execute and simulate two schedules on it, predict both for 8 x H100."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

import longstep
from experiments.evidence.executed.comparison import Comparison, comparison, drift_line
from experiments.evidence.executed.execution import Execution, open_session
from experiments.verbs.calibrate import Calibrate, calibrate
from experiments.verbs.several import Asked, rows_table
from experiments.verbs.shared.terminal import comparison_table, tell_basis
from sim.accounts.trace import CHROME_TRACE
from sim.base.units import percent, seconds
from sim.setup.answers.answer import sentence
from sim.setup.prediction import write_trace

TRACE_FILE = CHROME_TRACE.at("demo-trace.json")
LENGTHS = ("128K", "256K", "512K", "1M")


def demo(console: Console) -> None:
    """Calibrate this machine, execute and simulate two schedules on it, and predict both for 8 x H100."""
    TRACE_FILE.require()
    console.rule("1. Calibrate: time the kernels and links of this machine")
    calibrate(Calibrate(quick=True), console)
    console.rule("2. Ring and Ulysses on this machine: the same schedule, simulated and executed")
    compare_here(console)
    console.rule("3. The same simulator for 8 x H100, with the profile that ships for it")
    predict_h100(console)


def compare_here(console: Console) -> None:
    """Compare ring and Ulysses attention of the tiny model on two ranks; write a trace of the last comparison."""
    from runtime.run import ScheduleRun

    found: list[tuple[str, str, Comparison]] = []
    ring = longstep.predict("ring", model="tiny", cluster="host", gpus=2, seq="2K", scope="attention")
    with open_session(ring.checked, ring.cluster.spec, ring.profile) as session:
        for seq in ("4K", "8K"):
            for schedule in ("ring", "ulysses"):
                predicted = ring.replace(seq=seq, schedule=schedule)
                result, traces = comparison(predicted, session, Execution().repeats)
                console.print(result.answer, markup=False)
                console.print(comparison_table(predicted.title, result))
                found.append((seq, schedule, result))
        write_trace(TRACE_FILE, predicted.checked, traces)
        run = ScheduleRun(session, ring.checked)
        run.step()
        errors = ", ".join(f"{tensor} {error:.1e}" for tensor, error in run.errors().items())
    table = Table("S", "schedule", "simulated", "measured", "error", title="step times", title_justify="left")
    for seq, schedule, result in found:
        times = (seconds(result.step.simulated_s), seconds(result.step.median_s), percent(result.step.error))
        table.add_row(seq, schedule, *times)
    console.print(table)
    console.print(drift_line([found[0][2].drift[0], found[-1][2].drift[1]]), markup=False)
    console.print(f"largest relative error of the executed ring at S = 2K: {errors}", markup=False)
    console.print(f"trace of the last comparison: {TRACE_FILE.path} (open it in https://ui.perfetto.dev)", markup=False)


def predict_h100(console: Console) -> None:
    """Predict training steps of Llama 3 8B on 8 x H100."""
    for seq in LENGTHS:
        found = [
            longstep.predict(schedule, model="llama3-8b", cluster="hgx-h100", seq=seq)
            for schedule in ("ring", "zigzag", "ulysses")
        ]
        console.print(sentence(found), markup=False)
        console.print(rows_table([Asked({}, one.schedule, one) for one in found]))
    tell_basis(found, console)
