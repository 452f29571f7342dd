"""``longstep compare``: execute a schedule, simulate the same object, and lay both side by side."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from experiments.evidence.executed.comparison import calibrated, comparison, comparison_lines
from experiments.evidence.executed.execution import Execution, open_session
from experiments.pages.comparison_page import page
from experiments.pages.drawn.render import PAGE_FILE
from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.selection import Selection
from experiments.verbs.shared.terminal import comparison_table, print_json, tell_basis
from experiments.verbs.shared.writes import Writes
from sim.accounts.trace import CHROME_TRACE
from sim.base.files import require_outputs
from sim.setup.prediction import write_trace

if TYPE_CHECKING:
    from runtime.processes.torchrun import Workers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(Writes):
    """Execute and simulate the same schedule, and compare op kinds and the step."""

    selection: Annotated[Selection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Selection)
    execution: Annotated[Execution, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Execution)
    trace: OptionalText = None
    """Write a Chrome trace with both to this file: the simulated step, and the executed one of median time."""
    html: OptionalText = None
    """Write one HTML page with both to this file: op kinds, a parity plot, a timeline and where the step went."""
    json: bool = False
    """Print one JSON object instead of a table."""
    evidence: bool = False
    """Also print all that the prediction rests on, as a table."""


def compare(command: Compare, console: Console, workers: Workers | None = None) -> None:
    """Execute and simulate, and print both."""
    trace, html = command.output(command.trace, CHROME_TRACE), command.output(command.html, PAGE_FILE)
    require_outputs([trace, html])
    predicted = command.selection.setup().predicted()
    checked, spec, profile = predicted.checked, predicted.cluster.spec, calibrated(predicted.profile)
    with open_session(checked, spec, profile, command.execution, workers) as session:
        found, traces = comparison(predicted, session, command.execution.repeats)
    if trace:
        write_trace(trace, checked, traces)
    if html:
        html.write(page(predicted.title, found, *traces, rests_on=predicted.rests_on).encode())
    if command.json:
        print_json(found.to_dict(predicted.rests_on), console)
        return
    console.print(found.answer, markup=False)
    console.print(comparison_table(predicted.title, found))
    for line in comparison_lines(found):
        console.print(line, markup=False)
    tell_basis([predicted], console, everything=command.evidence)
