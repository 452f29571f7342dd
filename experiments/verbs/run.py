"""``longstep run``: execute a schedule on this machine or on torchrun's workers; --verify: beside the reference."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from experiments.evidence.executed.execution import Execution, attention_ran, measured_steps, median_step, open_session
from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.selection import Selection
from experiments.verbs.shared.terminal import parts_line, print_json
from experiments.verbs.shared.writes import Writes
from sim.accounts.breakdown import breakdown, critical_rank
from sim.accounts.trace import CHROME_TRACE
from sim.base.errors import RankError
from sim.base.files import require_outputs
from sim.base.units import seconds, size
from sim.setup.prediction import write_trace

if TYPE_CHECKING:
    from runtime.processes.torchrun import Workers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Writes):
    """Execute a schedule for real, one process per rank."""

    selection: Annotated[Selection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Selection)
    execution: Annotated[Execution, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Execution)
    verify: bool = False
    """Compare outputs and gradients with a one-process reference in fp64, and print how far they may be off."""
    trace: OptionalText = None
    """Write a Chrome trace (Perfetto opens it) to this file."""
    json: bool = False
    """Print one JSON object instead of a table."""


def run(command: Run, console: Console, workers: Workers | None = None) -> None:
    """Execute some steps, and print what happened."""
    from runtime.execution.verify import BOUNDS, verifiable
    from runtime.run import ScheduleRun

    found = command.selection.setup().resolved()
    trace = command.output(command.trace, CHROME_TRACE)
    require_outputs([trace])
    checked = found.checked()
    if command.verify or not found.workload.forward:  # one pass alone gets its out and lse from the reference
        verifiable(found.workload)
    with open_session(checked, found.spec, found.profile, command.execution, workers) as session:
        schedule_run = ScheduleRun(session, checked)
        steps = measured_steps(schedule_run.step, command.execution.repeats)
        errors = schedule_run.errors() if command.verify else {}
    median = median_step(steps)
    if trace:
        write_trace(trace, checked, [median.trace])
    rank = critical_rank(median.trace)
    times = [step.trace.step_time_s for step in steps]
    bound = BOUNDS[found.workload.dtype]
    result: dict[str, Any] = {
        "step_time_s": statistics.median(times),
        "step_times_s": times,
        "peak_bytes": max(median.peak_bytes),
        "breakdown": breakdown(median.trace, rank),
        "critical_rank": rank,
        "attention": attention_ran(median.trace),
        "schedule_hash": median.trace.schedule_hash,
        "errors": errors,
        "error_bound": bound if command.verify else None,
    }
    if command.json:
        print_json(result, console)
    else:
        console.print(_table(found.title, result))
    wrong = [name for name, error in errors.items() if not error <= bound]
    if wrong:
        raise RankError(f"executed tensors differ from the reference by more than {bound:g}: {', '.join(wrong)}")


def _table(name: str, result: dict[str, Any]) -> Table:
    """Return the figures of a run."""
    times, rank = result["step_times_s"], result["critical_rank"]
    table = Table("figure", "value", title=name, title_justify="left")
    table.add_row("step time, median", seconds(result["step_time_s"]))
    table.add_row("  of", ", ".join(seconds(value) for value in times))
    table.add_row("peak of buffers", size(result["peak_bytes"]))
    table.add_row(f"critical rank {rank}", parts_line(result["breakdown"]))
    table.add_row("attention kernel", result["attention"])
    table.add_row("schedule", result["schedule_hash"])
    for tensor, error in result["errors"].items():
        table.add_row(f"{tensor}: largest relative error", f"{error:.2g} (at most {result['error_bound']:g})")
    return table
