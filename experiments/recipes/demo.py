"""``make demo``: calibrate this machine, execute and simulate two schedules on it, predict both for 8 x H100."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.table import Table

from experiments.evidence.comparison import Comparison, comparison, drift_line
from experiments.evidence.execution import Execution, open_session
from experiments.evidence.provenance import evidence_lines
from experiments.evidence.units import percent, seconds, size
from experiments.verbs.calibrate import Calibrate, calibrate
from experiments.verbs.selection import DATASHEET, Selection, choose
from experiments.verbs.simulate import title, write_trace
from experiments.verbs.terminal import comparison_table, parts_line
from sim.engine.report import report

TRACE_FILE = "demo-trace.json"
LENGTHS = ("128K", "256K", "512K", "1M")


def demo(console: Console) -> None:
    """Calibrate this machine, execute and simulate two schedules on it, and predict both for 8 x H100."""
    console.rule("1. Calibrate: time the kernels and links of this machine")
    calibrate(Calibrate(quick=True), console)
    console.rule("2. Ring and Ulysses on this machine: the same schedule, simulated and executed")
    compare_here(console)
    console.rule("3. The same simulator for 8 x H100, at the rates of the datasheet")
    predict_h100(console)


def compare_here(console: Console) -> None:
    """Compare ring and Ulysses attention of the tiny model on two ranks; write a trace of the last comparison."""
    from runtime.run import ScheduleRun

    found: list[tuple[str, str, Comparison]] = []
    base = Selection(gpus=2)
    first = choose(base)
    with open_session(first, first.checked(), Execution()) as session:
        for seq in ("4K", "8K"):
            for schedule in ("ring", "ulysses"):
                chosen = choose(dataclasses.replace(base, seq=seq, schedule=schedule))
                checked = chosen.checked()
                result, traces = comparison(chosen, checked, session, Execution().repeats)
                console.print(comparison_table(title(chosen, checked), result))
                found.append((seq, schedule, result))
        write_trace(TRACE_FILE, checked, traces)
        small = choose(dataclasses.replace(base, seq="2K"))
        checked = small.checked()
        run = ScheduleRun(session, checked)
        run.step()
        errors = ", ".join(f"{tensor} {error:.1e}" for tensor, error in run.errors().items())
    table = Table("S", "schedule", "simulated", "measured", "error", title="step times", title_justify="left")
    for seq, schedule, result in found:
        times = (seconds(result.step.simulated_s), seconds(result.step.median_s), percent(result.step.error))
        table.add_row(seq, schedule, *times)
    console.print(table)
    console.print(drift_line([found[0][2].drift[0], found[-1][2].drift[1]]), markup=False)
    console.print(f"largest relative error of the executed ring at S = 2K: {errors}", markup=False)
    console.print(f"trace of the last comparison: {TRACE_FILE} (open it in https://ui.perfetto.dev)", markup=False)


def predict_h100(console: Console) -> None:
    """Predict ring and Ulysses attention of one layer of Llama 3 8B, forward and backward, on 8 x H100."""
    table = Table(
        "S", "schedule", "step", "tokens/s/GPU", "MFU", "memory", "critical rank", title="llama3-8b on hgx-h100",
        title_justify="left"
    )  # fmt: skip
    for seq in LENGTHS:
        for schedule in ("ring", "ulysses"):
            selection = Selection(model="llama3-8b", cluster="hgx-h100", seq=seq, schedule=schedule, profile=DATASHEET)
            chosen = choose(selection)
            found = report(chosen.simulated(chosen.checked()))
            mfu = f"{100 * (found.mfu or 0.0):.1f} %"
            rate = f"{found.tokens_per_s_per_gpu:.4g}"
            memory, parts = size(found.peak_hbm_bytes), parts_line(found.breakdown)
            table.add_row(seq, schedule, seconds(found.step_time_s), rate, mfu, memory, parts)
    console.print(table)
    for line in evidence_lines(found.evidence):
        console.print(line, markup=False)
