"""``longstep validate``: holds predictions against executed steps over a sweep of lengths, ranks and schedules.

It uses the host's profile, and calibrates first if there is none. Nothing is asserted: machines differ and are noisy.
Kernels are timed before and after each repeat. Where they are off their calibration, the machine is not the one that is
simulated, and the repeat stands in brackets.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import tyro
from rich.console import Console
from rich.table import Table

from experiments.evidence.executed.cells import Cell, Repeated, compared
from experiments.evidence.executed.comparison import Comparison
from experiments.evidence.executed.executed_cases import (
    CASES_FILE,
    common_fields,
    own_profile,
    require_portable,
    save_cases,
)
from experiments.evidence.executed.execution import Execution
from experiments.evidence.executed.record import (
    RECORD_FILE,
    Judged,
    Record,
    Tally,
    begun,
    joined,
    judged,
    kept_records,
    read_record,
    save_record,
    summary,
)
from experiments.pages.drawn.render import FIGURE_FILE, PAGE_FILE
from experiments.pages.sweep_page import figure, page
from experiments.verbs.calibrate import Calibrate, calibrate
from experiments.verbs.cli import with_flags
from experiments.verbs.shared.cells import CellSelection, cells_of, playable
from experiments.verbs.shared.kinds import OptionalFloat, OptionalText, Texts
from experiments.verbs.shared.terminal import progress_bar
from experiments.verbs.shared.writes import Writes
from sim.base.errors import InputError, LongstepError
from sim.base.files import Output, require_outputs
from sim.base.units import percent, seconds, size
from sim.words.profile import profile_names

if TYPE_CHECKING:
    from runtime.processes.torchrun import Workers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validate(Writes):
    """Compare simulated and executed steps over several lengths, ranks and schedules. Ctrl-C keeps what there is."""

    sweep: Annotated[CellSelection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=CellSelection)
    repeats: int = 5
    """Comparisons of every cell; all cells take turns."""
    attention: str = ""
    """Attention kernel of GPUs: flash-attn-3, flash-attn-2, aten-flash, aten-efficient or aten-cudnn; by default what
    the profile was calibrated with, else the fastest that is installed and runs the data type."""
    seconds: OptionalFloat = None
    """Begin no comparison after so many seconds; --go-on makes what is left."""
    go_on: bool = False
    """Keep the comparisons that the record at --out has, if it is there, and make those that it lacks."""
    record: Texts = ()
    """Measure nothing: show this record, or several as one; of a folder all records in it."""
    out: OptionalText = None
    """Write the record to this JSON file, after every comparison."""
    html: OptionalText = None
    """Write one HTML page to this file: a parity plot, the error over length, and all cells."""
    figure: OptionalText = None
    """Write both plots to this SVG file."""
    cases_out: OptionalText = None
    """Write what was executed as cases for longstep evaluate to this FILE.toml, its profile next to it."""


class _Outputs(NamedTuple):
    """Files to write, as far as they are asked for."""

    out: Output | None
    html: Output | None
    figure: Output | None
    cases_out: Output | None


def validate(command: Validate, console: Console, workers: Workers | None = None) -> None:
    """Compare every cell several times, and show how far the simulated steps are from the executed ones."""
    outputs = _outputs(command)
    if command.record:
        record = joined([kept.record for path in command.record for kept in kept_records(path)])
        show(record, console)
        if outputs.out:
            save_record(record, outputs.out)
        _write(record, outputs)
        return
    _require_comparisons(command)
    cells = cells_of(command.sweep)
    if command.cases_out:
        require_portable(common_fields(command.sweep.setup()), cells)
    cells, refused = playable(cells, command.sweep)
    if (command.sweep.cluster, command.sweep.profile) == ("host", None) and "host" not in profile_names():
        if workers:
            raise InputError("this host has no profile: run longstep calibrate first, without torchrun")
        dtype = (command.sweep.dtype,) if command.sweep.dtype else ()
        calibrate(Calibrate(quick=True, model=command.sweep.model, dtype=dtype), console)
    for cell, why in refused.items():
        console.print(f"left out: {cell.name}: {with_flags(why)}", markup=False)
    _sweep(cells, command, outputs, console, workers)


def _require_comparisons(command: Validate) -> None:
    """Raise InputError where it is not said how many comparisons to make."""
    if command.go_on and not command.out:
        raise InputError("`go_on` keeps what the record at `out` has: name it by --out FILE.json")
    if command.seconds is not None and not command.seconds > 0:
        raise InputError(f"`seconds` {command.seconds}: expected seconds above 0")
    if command.repeats < 1:
        raise InputError(f"`repeats` {command.repeats}: expected 1 or more")


def _outputs(command: Validate) -> _Outputs:
    """Return the files to write; raises InputError for one that cannot be written."""
    outputs = _Outputs(
        command.output(command.out, RECORD_FILE),
        command.output(command.html, PAGE_FILE),
        command.output(command.figure, FIGURE_FILE),
        command.output(command.cases_out, CASES_FILE),
    )
    require_outputs([*outputs, own_profile(outputs.cases_out) if outputs.cases_out else None])
    if command.figure and not command.figure.endswith(".svg"):
        raise InputError(f"--figure {command.figure}: expected a file that ends in .svg; browsers print it to PDF")
    if command.cases_out and not command.cases_out.endswith(".toml"):
        raise InputError(f"--cases-out {command.cases_out}: expected a file that ends in .toml, for longstep evaluate")
    return outputs


def _sweep(cells: list[Cell], command: Validate, outputs: _Outputs, console: Console, workers: Workers | None) -> None:
    """Compare, and show what there is, also of a sweep that was interrupted or failed."""
    record = begun(cells[0].setup(command.sweep.setup()), common_fields(command.sweep.setup()))
    found: dict[Cell, list[Comparison]] = {cell: [] for cell in cells}
    if command.go_on and command.out and Path(command.out).exists():
        record = joined([read_record(command.out), record])
        found |= dict(record.comparisons)

    def keep(cell: Cell, result: Comparison) -> None:
        nonlocal record
        found[cell].append(result)
        record = msgspec.structs.replace(record, comparisons=[(cell, some) for cell, some in found.items() if some])
        if outputs.out:
            save_record(record, outputs.out)

    stopped: BaseException | None = None
    sweep = Repeated(
        cells, command.sweep.setup(), command.repeats, Execution(attention=command.attention),
        had={cell: len(some) for cell, some in found.items()},
        seconds=math.inf if command.seconds is None else command.seconds,
    )  # fmt: skip
    try:
        with progress_bar(console) as progress:
            task = progress.add_task("comparing", total=sweep.num_steps)
            compared(sweep, keep, lambda: progress.advance(task), workers)
    except (KeyboardInterrupt, LongstepError) as error:
        stopped = error
    if record.comparisons:
        show(record, console)
        _write(record, outputs)
    if stopped:
        raise stopped


def show(record: Record, console: Console) -> None:
    """Print a record's table, and what its cells say together."""
    cells = judged(record)
    heads = ("P", "what", "S", "schedule", "simulated", "measured", "errors", "target", "quiet", "all")
    table = Table(*heads, title=record.title, title_justify="left")
    for cell in cells:
        table.add_row(*_row(cell))
    console.print(table)
    if any(one.memory.allocated for one in cells):
        console.print(_memory_table(cells))
    for line in summary(record):
        console.print(line, markup=False)


def _write(record: Record, outputs: _Outputs) -> None:
    """Write what a record is to fill."""
    if outputs.html:
        outputs.html.write(page(record).encode())
    if outputs.figure:
        outputs.figure.write(figure(record).encode())
    if outputs.cases_out:
        save_cases(record, outputs.cases_out)


def _row(found: Judged) -> list[str]:
    """Return what the table says of one cell; repeats that were not quiet stand in brackets."""
    cell = found.cell
    errors = zip(map(percent, found.errors), found.quiet, strict=True)
    return [
        str(cell.gpus),
        cell.what,
        cell.seq,
        cell.method,
        seconds(found.times.simulated_s),
        seconds(found.times.median_s),
        ", ".join(error if quiet else f"({error})" for error, quiet in errors),
        f"{100 * cell.target:g} %",
        _verdict(found.met_when_quiet),
        _verdict(found.met),
    ]


def _memory_table(cells: list[Judged]) -> Table:
    """Return the peaks of GPUs, with what kernels hold beside buffers: of the walk, and of the allocator."""
    heads = ("P", "what", "S", "schedule", "simulated", "allocated", "error")
    table = Table(*heads, title="Largest memory of a GPU, simulated and given by its allocator", title_justify="left")
    for one in cells:
        cell, peak = one.cell, one.memory
        table.add_row(
            str(cell.gpus), cell.what, cell.seq, cell.method, size(peak.simulated_hbm), size(peak.allocated),
            percent(peak.error),
        )  # fmt: skip
    return table


def _verdict(met: Tally) -> str:
    return f"{met}: missed" if met.missed else str(met)
