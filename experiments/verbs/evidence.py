"""The evidence of case files and records: predicted, printed, and written as a chapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.evidence.executed.executed_cases import executed_cases, own_schedules
from experiments.evidence.executed.record import Record
from experiments.evidence.headlines import headlines, steps_on
from experiments.evidence.kept import Kept
from experiments.evidence.links.lab import LabRecord
from experiments.evidence.papers.cases import Case, HostFigures, fit_cases
from experiments.evidence.papers.coverage import REGIME_HEADS, StepSet, encoded, learned_from, regime_rows
from experiments.evidence.papers.host_fit import host_figures
from experiments.evidence.papers.memory_cases import memory_cases, memory_tables, predicted_memory
from experiments.evidence.papers.published import (
    HEADS,
    CasePrediction,
    Evidence,
    fitted_from,
    judged_groups,
    predicted_twice,
    provenance,
    read_all,
)
from experiments.evidence.provenance import command_line
from experiments.pages.chapter import chapter, on_front_page
from sim.base.errors import InputError
from sim.base.files import Output
from sim.base.presets import preset_names
from sim.engine.intervals.learned import Learned, shipped
from sim.words.profile import load_profile


class ChapterFiles(NamedTuple):
    """Where to write a chapter, and what goes with it."""

    chapter: Output
    front_page: Output | None
    step_errors: Output | None


def show_cases(names: Sequence[str], console: Console, *, quiet: bool = False) -> list[Evidence]:
    """Predict all cases of the files that are named (all: those that ship), and print how far off they are, unless
    ``quiet``.
    """
    shown = []
    read = [(file, cases, fit_cases(file), memory_cases(file)) for file, cases in read_all(names)]
    for file, cases, fitting, of_memory in read:
        host = host_figures(fitting)
        found, with_fit = _tracked(cases, file.title, console, host)
        shown.append(Evidence(file, found, host, with_fit, predicted_memory(of_memory)))
        if quiet:
            continue
        for line in [*provenance(file), *(f"  {line}" for line in fitted_from(shown[-1]))]:
            console.print(line, markup=False)
        groups = [(HEADS, judged_groups(shown[-1]))] if file.group else []
        for heads, rows in [*groups, *memory_tables(shown[-1].memory)]:
            _print(heads, rows, console)
    return shown


def write_chapter(
    evidence: Sequence[Evidence],
    kept: Sequence[Kept[Record]],
    labs: Sequence[Kept[LabRecord]],
    files: ChapterFiles,
    console: Console,
    *,
    profiles: bool,
) -> None:
    """Write what case files, records and labs say, and print how many steps are in their intervals; ``profiles``: with
    how well points of those that ship predict each other.
    """
    from calibrate.held.leave_one_out import leave_one_out

    records = [one.record for one in kept]
    anew = [_anew(record, console) for record in records]
    learned = shipped()
    if files.step_errors:
        learned = learned_from(_step_sets(evidence, kept, anew), command_line())
        files.step_errors.write(encoded(learned))
    evidence = [one._replace(found=_within(one.found, learned.without(one.file.title))) for one in evidence]
    anew = [_within(found, learned.without(steps_on(record))) for record, found in zip(records, anew, strict=True)]
    rows = [one.row for one in headlines(evidence, records, anew)]
    regimes = regime_rows(_step_sets(evidence, kept, anew), learned)
    _print(REGIME_HEADS, regimes, console)
    names = preset_names("sim/profiles", ".json") if profiles else []
    residuals = {name: leave_one_out(load_profile(name)) for name in names}
    folder = Path(files.chapter.path).parent
    files.chapter.write(
        chapter(rows, regimes, evidence, kept, labs, residuals, command=command_line(), folder=folder).encode()
    )
    if files.front_page:
        files.front_page.write(on_front_page(Path(files.front_page.path).read_text(), rows).encode())


def _anew(record: Record, console: Console) -> list[CasePrediction]:
    """Return what this version predicts of a record's cells; nothing, and why, where it cannot."""
    for name in own_schedules(record):
        console.print(f"not predicted anew, so in no interval: {name}: no schedule that ships", markup=False)
    try:
        return _tracked(executed_cases(record), steps_on(record), console)[0]
    except InputError as error:
        console.print(f"not predicted anew, so in no interval: {record.title}: {error}", markup=False)
        return []


def progress_bar(console: Console) -> Progress:
    """Return a bar on standard error, which is gone when it is done."""
    return Progress(console=type(console)(stderr=True), transient=True)


def _step_sets(
    evidence: Sequence[Evidence], kept: Sequence[Kept[Record]], anew: Sequence[list[CasePrediction]]
) -> list[StepSet]:
    """Return the steps of every machine as a set: those of records by machine, those of case files by file."""
    executed: dict[str, list[CasePrediction]] = {}
    for one, found in zip(kept, anew, strict=True):
        executed.setdefault(steps_on(one.record), []).extend(found)
    return [
        *(StepSet(title, found) for title, found in executed.items()),
        *(StepSet(one.file.title, one.found) for one in evidence),
    ]


def _within(found: Sequence[CasePrediction], learned: Learned) -> list[CasePrediction]:
    return [one.within(learned) for one in found]


def _tracked(
    cases: Sequence[Case], title: str, console: Console, host: HostFigures | None = None
) -> tuple[list[CasePrediction], list[CasePrediction]]:
    """Return what is predicted of a set of cases, and with other figures of the host."""
    with progress_bar(console) as progress:
        both = list(progress.track(predicted_twice(cases, title, host), len(cases), description="predicting"))
    return [found for found, _ in both], [fitted for _, fitted in both if fitted]


def _print(heads: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    console.print(table)
