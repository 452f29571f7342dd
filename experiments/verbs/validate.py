"""``longstep validate``: holds predictions against executed steps over a sweep of lengths, ranks and schedules.

It uses the host's profile, and calibrates first if there is none. Nothing is asserted: machines differ and are noisy. A
repeat before or after which kernels were off their calibration stands in brackets: the machine was not the one that was
simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.evidence.cells import Cell, Repeated, compared
from experiments.evidence.comparison import Comparison
from experiments.evidence.executed_cases import common_fields, require_portable, save_cases
from experiments.evidence.execution import Execution
from experiments.evidence.published import HEADS, Evidence, judged_groups, predicted, provenance, read_all
from experiments.evidence.record import (
    Judged,
    Record,
    Tally,
    begun,
    joined,
    judged,
    read_record,
    save_record,
    summary,
)
from experiments.evidence.units import percent, seconds
from experiments.pages.evidence_page import page as evidence_page
from experiments.pages.sweep_page import figure, page
from experiments.verbs.calibrate import Calibrate, calibrate
from experiments.verbs.simulate import writable
from experiments.verbs.sweep import Sweep, cells_of, playable
from sim.errors import InputError, LongstepError
from sim.profile import profile_names, write_whole

if TYPE_CHECKING:
    from runtime.processes.torchrun import Workers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validate:
    """Compare simulated and executed steps over several lengths, ranks and schedules. Ctrl-C keeps what there is."""

    sweep: Annotated[Sweep, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Sweep)
    repeats: int = 5
    """Comparisons of every cell; all cells take turns."""
    attention: str = ""
    """Attention kernel of GPUs: flash-attn-3, flash-attn-2, aten-flash, aten-efficient or aten-cudnn; by default what
    the profile was calibrated with, else the fastest that is installed and runs the data type."""
    record: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Measure nothing: show this record, or several as one."""
    cases: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Execute nothing: hold predictions against the measurements of this case file (NAME, FILE.toml, or all)."""
    out: str | None = None
    """Write the record to this JSON file, after every comparison."""
    html: str | None = None
    """Write one HTML page to this file: a parity plot, the error over length (but of --cases), and all cells."""
    figure: str | None = None
    """Write both plots to this SVG file."""
    cases_out: str | None = None
    """Write what was executed to this FILE.toml as cases, its profile next to it, for --cases to predict again."""


def validate(command: Validate, console: Console, workers: Workers | None = None) -> None:
    """Compare every cell several times, and show how far the simulated steps are from the executed ones."""
    _require_outputs(command)
    if command.cases:
        found = show_cases(command.cases, console)
        if command.html:
            write_whole(Path(command.html), evidence_page(found).encode())
        return
    if command.record:
        show(joined([read_record(path) for path in command.record]), command, console)
        return
    if command.repeats < 1:
        raise InputError(f"`repeats` {command.repeats}: expected 1 or more")
    cells = cells_of(command.sweep)
    if (command.sweep.cluster, command.sweep.profile) == ("host", None) and "host" not in profile_names():
        if workers:
            raise InputError("this host has no profile: run longstep calibrate first, without torchrun")
        dtype = (command.sweep.dtype,) if command.sweep.dtype else ()
        calibrate(Calibrate(quick=True, model=command.sweep.model, dtype=dtype), console)
    if command.cases_out:
        require_portable(common_fields(command.sweep.setup()), cells)
    cells, refused = playable(cells, command.sweep)
    for cell, why in refused.items():
        console.print(f"left out: {cell.name}: {why}", markup=False)
    _sweep(cells, command, console, workers)


def _require_outputs(command: Validate) -> None:
    """Raise InputError for files that cannot be written, or that what is asked for does not fill."""
    for path in (command.out, command.html, command.figure, command.cases_out):
        if path:
            writable(path)
    if command.figure and not command.figure.endswith(".svg"):
        raise InputError(f"--figure {command.figure}: expected a file that ends in .svg; browsers print it to PDF")
    if command.cases_out and not command.cases_out.endswith(".toml"):
        raise InputError(f"--cases-out {command.cases_out}: expected a file that ends in .toml, as --cases takes it")
    if command.cases and command.cases_out:
        raise InputError(
            "--cases-out writes what was executed, and --cases executes nothing: leave one of them out, or give "
            "--cases-out a --record"
        )
    if command.cases and (command.figure or command.out or command.record or command.sweep.named):
        raise InputError("--cases goes with --html only: what is predicted stands in the files")


def show_cases(names: Sequence[str], console: Console) -> list[Evidence]:
    """Predict all cases of the files that are named (all: those that ship), and print how far off they are."""
    shown = []
    for file, cases in read_all(names):
        with _progress(console) as progress:
            found = list(progress.track(predicted(cases), len(cases), description="predicting"))
        shown.append(Evidence(file, found))
        for line in provenance(file):
            console.print(line, markup=False)
        table = Table(*HEADS)
        for row in judged_groups(shown[-1]):
            table.add_row(*row)
        console.print(table)
    return shown


def _progress(console: Console) -> Progress:
    return Progress(console=type(console)(stderr=True), transient=True)


def _sweep(cells: list[Cell], command: Validate, console: Console, workers: Workers | None) -> None:
    """Compare, and show what there is, also of a sweep that was interrupted or failed."""
    record = begun(cells[0].setup(command.sweep.setup()).resolved(), common_fields(command.sweep.setup()))
    found: dict[Cell, list[Comparison]] = {cell: [] for cell in cells}

    def keep(cell: Cell, result: Comparison) -> None:
        nonlocal record
        found[cell].append(result)
        record = msgspec.structs.replace(record, comparisons=[(cell, some) for cell, some in found.items() if some])
        if command.out:
            save_record(record, command.out)

    stopped: BaseException | None = None
    sweep = Repeated(cells, command.sweep.setup(), command.repeats, Execution(attention=command.attention))
    try:
        with _progress(console) as progress:
            task = progress.add_task("comparing", total=sweep.num_steps)
            compared(sweep, keep, lambda: progress.advance(task), workers)
    except (KeyboardInterrupt, LongstepError) as error:
        stopped = error
    if record.comparisons:
        show(record, command, console)
    if stopped:
        raise stopped


def show(record: Record, command: Validate, console: Console) -> None:
    """Print a record's table and write what else was asked for."""
    cells = judged(record)
    heads = ("P", "what", "S", "schedule", "simulated", "measured", "errors", "target", "quiet", "all")
    table = Table(*heads, title=record.title, title_justify="left")
    for cell in cells:
        table.add_row(*_row(cell))
    console.print(table)
    for line in summary(record):
        console.print(line, markup=False)
    if command.record and command.out:
        save_record(record, command.out)
    if command.html:
        write_whole(Path(command.html), page(record).encode())
    if command.figure:
        write_whole(Path(command.figure), figure(record).encode())
    if command.cases_out:
        save_cases(record, command.cases_out)


def _row(found: Judged) -> list[str]:
    """Return what the table says of one cell; repeats that were not quiet stand in brackets."""
    cell = found.cell
    errors = zip(map(percent, found.errors), found.quiet, strict=True)
    return [
        str(cell.gpus),
        cell.what,
        cell.seq,
        cell.schedule,
        seconds(found.times.simulated_s),
        seconds(found.times.median_s),
        ", ".join(error if quiet else f"({error})" for error, quiet in errors),
        f"{100 * cell.target:g} %",
        _verdict(found.met_when_quiet),
        _verdict(found.met),
    ]


def _verdict(met: Tally) -> str:
    return f"{met}: missed" if met.missed else str(met)
