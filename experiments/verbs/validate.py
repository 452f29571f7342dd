"""``longstep validate``: holds predictions against executed steps over a sweep of lengths, ranks and schedules.

It uses the host's profile, and calibrates first if there is none. Nothing is asserted: machines differ and are noisy. A
repeat before or after which kernels were off their calibration stands in brackets: the machine was not the one that was
simulated.
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
from experiments.evidence.links.lab import kept_labs
from experiments.evidence.papers.coverage import STEP_ERRORS_FILE
from experiments.evidence.papers.published import case_rows
from experiments.pages.chapter import CHAPTER_FILE, FRONT_PAGE, on_front_page
from experiments.pages.drawn.render import FIGURE_FILE, PAGE_FILE
from experiments.pages.evidence_page import page as evidence_page
from experiments.pages.sweep_page import figure, page
from experiments.verbs.calibrate import Calibrate, calibrate
from experiments.verbs.cli import with_flags
from experiments.verbs.evidence import ChapterFiles, progress_bar, show_cases, write_chapter
from experiments.verbs.shared.cells import CellSelection, cells_of, playable
from experiments.verbs.shared.kinds import OptionalFloat, OptionalText, Texts
from experiments.verbs.shared.terminal import print_json
from experiments.verbs.shared.writes import Writes
from sim.base.errors import InputError, LongstepError
from sim.base.files import Output, require_outputs
from sim.base.presets import read_bytes
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
    cases: Texts = ()
    """Execute nothing: hold predictions against the measurements of this case file (NAME, FILE.toml, or all)."""
    json: bool = False
    """With --cases: print JSON instead of tables, a row for each case, which longstep report shows."""
    out: OptionalText = None
    """Write the record to this JSON file, after every comparison."""
    html: OptionalText = None
    """Write one HTML page to this file: a parity plot, the error over length (but of --cases), and all cells."""
    figure: OptionalText = None
    """Write both plots to this SVG file."""
    markdown: OptionalText = None
    """Write all that --cases and --record say, each by itself, as a chapter of Markdown to this FILE.md."""
    front_page: OptionalText = None
    """With --markdown: write the first table of that chapter into this FILE.md too, in place of the one there."""
    step_errors: OptionalText = None
    """With --markdown: write how far off these steps are to this FILE.json, and take the intervals of the chapter from
    there, not from what ships (sim/step_errors.json)."""
    cases_out: OptionalText = None
    """Write what was executed to this FILE.toml as cases, its profile next to it, for --cases to predict again."""


class _Outputs(NamedTuple):
    """Files to write, as far as they are asked for."""

    out: Output | None
    html: Output | None
    figure: Output | None
    cases_out: Output | None
    markdown: Output | None
    front_page: Output | None
    step_errors: Output | None


def validate(command: Validate, console: Console, workers: Workers | None = None) -> None:
    """Compare every cell several times, and show how far the simulated steps are from the executed ones."""
    outputs = _outputs(command)
    if outputs.markdown:
        _write_chapter(command, outputs, outputs.markdown, console)
        return
    if command.cases:
        found = show_cases(command.cases, console, quiet=command.json)
        if command.json:
            print_json([row for one in found for row in case_rows(one)], console)
        if outputs.html:
            outputs.html.write(evidence_page(found).encode())
        return
    if command.record:
        record = joined([kept.record for path in command.record for kept in kept_records(path)])
        show(record, console)
        if outputs.out:
            save_record(record, outputs.out)
        _write(record, outputs)
        return
    if command.json:
        raise InputError("`json` is of `cases`: name some, such as all; a record is JSON, which `out` writes")
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
    """Return the files to write; raises InputError for one that cannot be written, or that what is asked for does not
    fill.
    """
    outputs = _Outputs(
        command.output(command.out, RECORD_FILE),
        command.output(command.html, PAGE_FILE),
        command.output(command.figure, FIGURE_FILE),
        command.output(command.cases_out, CASES_FILE),
        command.output(command.markdown, CHAPTER_FILE),
        command.output(command.front_page, FRONT_PAGE),
        command.output(command.step_errors, STEP_ERRORS_FILE),
    )
    require_outputs([*outputs, own_profile(outputs.cases_out) if outputs.cases_out else None])
    if command.markdown and not (command.cases or command.record):
        raise InputError("`markdown` writes what `cases` and `record` say: name some, such as --cases all")
    if command.markdown and any((command.out, command.html, command.figure, command.cases_out, command.sweep.named)):
        raise InputError("`markdown` goes with `cases` and `record` only: write other files by a command of their own")
    if (command.front_page or command.step_errors) and not command.markdown:
        raise InputError("`front_page` and `step_errors` are written with a chapter: name its file by `markdown`")
    if command.front_page:
        on_front_page(read_bytes("front page", command.front_page, "`front_page`").decode(errors="replace"), [])
    if command.figure and not command.figure.endswith(".svg"):
        raise InputError(f"--figure {command.figure}: expected a file that ends in .svg; browsers print it to PDF")
    if command.cases_out and not command.cases_out.endswith(".toml"):
        raise InputError(f"--cases-out {command.cases_out}: expected a file that ends in .toml, as --cases takes it")
    if command.cases and command.cases_out:
        raise InputError(
            "--cases-out writes what was executed, and --cases executes nothing: leave one of them out, or give "
            "--cases-out a --record"
        )
    if command.cases and (command.figure or command.out or command.sweep.named):
        raise InputError("`cases` goes with `html` or `markdown` only: what is predicted stands in the files")
    if command.cases and command.record and not command.markdown:
        raise InputError("`cases` goes with `record` only where `markdown` writes both: leave one of them out")
    return outputs


def _write_chapter(command: Validate, outputs: _Outputs, to: Output, console: Console) -> None:
    """Print what cases and records say, each by itself, and write it as a chapter."""
    kept = [one for path in command.record for one in kept_records(path)]
    labs = [one for path in command.record for one in kept_labs(path)]
    evidence = show_cases(command.cases, console)
    for one in kept:
        show(one.record, console)
    files = ChapterFiles(to, outputs.front_page, outputs.step_errors)
    write_chapter(evidence, kept, labs, files, console, profiles="all" in command.cases)


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
