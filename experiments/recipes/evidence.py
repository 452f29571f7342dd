"""``make evidence``: predict all case files and records anew, and write the chapter, the table of the front page and
the errors of steps that ship.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from experiments.evidence.executed.executed_cases import executed_cases, own_schedules
from experiments.evidence.executed.record import Record, kept_records
from experiments.evidence.headlines import headlines, steps_on
from experiments.evidence.kept import Kept
from experiments.evidence.links.lab import LabRecord, kept_labs
from experiments.evidence.papers.coverage import (
    REGIME_HEADS,
    STEP_ERRORS_FILE,
    StepSet,
    encoded,
    learned_from,
    regime_rows,
)
from experiments.evidence.papers.published import CasePrediction, Evidence
from experiments.evidence.provenance import command_line
from experiments.pages.chapter import CHAPTER_FILE, FRONT_PAGE, chapter, on_front_page
from experiments.verbs.evaluate import print_table, show_cases, tracked
from experiments.verbs.validate import show
from sim.base.errors import InputError
from sim.base.files import Output, require_outputs
from sim.base.presets import preset_names, read_bytes
from sim.engine.intervals.learned import Learned, shipped
from sim.words.profile import load_profile


class EvidenceFiles(NamedTuple):
    """What evidence is written to, in a checkout of the repository."""

    chapter: str = "experiments/results/README.md"
    front_page: str | None = "README.md"
    """Whose table of headlines is replaced by that of the chapter."""
    step_errors: str | None = "sim/step_errors.json"
    """How far off these steps are, from which the chapter then takes its intervals; else from what ships."""


def evidence(
    console: Console,
    cases: Sequence[str] = ("all",),
    records: Sequence[str] = ("experiments/results",),
    files: EvidenceFiles = EvidenceFiles(),  # noqa: B008 - immutable
) -> None:
    """Print what case files and records say, each by itself, and write all of it as a chapter.

    ``cases`` are as ``longstep evaluate`` takes them, ``records`` files and folders. Raises InputError, before anything
    is predicted, for a file that cannot be written and for a front page without headlines.
    """
    to = CHAPTER_FILE.at(files.chapter, force=True)
    front = FRONT_PAGE.at(files.front_page, force=True) if files.front_page else None
    errors = STEP_ERRORS_FILE.at(files.step_errors, force=True) if files.step_errors else None
    require_outputs([to, front, errors])
    if front:
        on_front_page(_text(front), [])
    kept = [one for path in records for one in kept_records(path)]
    labs = [one for path in records for one in kept_labs(path)]
    found = show_cases(cases, console)
    for one in kept:
        show(one.record, console)
    _write(found, kept, labs, (to, front, errors), console, profiles="all" in cases)


def _text(front: Output) -> str:
    return read_bytes("front page", front.path, "`front_page` of EvidenceFiles").decode(errors="replace")


def _write(
    evidence: Sequence[Evidence],
    kept: Sequence[Kept[Record]],
    labs: Sequence[Kept[LabRecord]],
    files: tuple[Output, Output | None, Output | None],
    console: Console,
    *,
    profiles: bool,
) -> None:
    """Write what case files, records and labs say, and print how many steps are in their intervals. With ``profiles``
    it also says how well points of shipped profiles predict each other.
    """
    from calibrate.held.leave_one_out import leave_one_out

    to, front, errors = files
    records = [one.record for one in kept]
    anew = [_anew(record, console) for record in records]
    learned = shipped()
    if errors:
        learned = learned_from(_step_sets(evidence, kept, anew), command_line())
        errors.write(encoded(learned))
    evidence = [one._replace(found=_within(one.found, learned.without(one.file.title))) for one in evidence]
    anew = [_within(found, learned.without(steps_on(record))) for record, found in zip(records, anew, strict=True)]
    rows, alone = (
        [one.row for one in headlines(evidence, records, anew) if one.attention_alone is apart]
        for apart in (False, True)
    )
    regimes = regime_rows(_step_sets(evidence, kept, anew), learned)
    print_table(REGIME_HEADS, regimes, console)
    names = preset_names("sim/profiles", ".json") if profiles else []
    residuals = {name: leave_one_out(load_profile(name)) for name in names}
    folder = Path(to.path).parent
    text = chapter(rows, alone, regimes, evidence, kept, labs, residuals, command=command_line(), folder=folder)
    to.write(text.encode())
    if front:
        front.write(on_front_page(_text(front), rows).encode())


def _anew(record: Record, console: Console) -> list[CasePrediction]:
    """Return what this version predicts of a record's cells; nothing, and why, where it cannot."""
    for name in own_schedules(record):
        console.print(f"not predicted anew, so in no interval: {name}: no schedule that ships", markup=False)
    try:
        return tracked(executed_cases(record), steps_on(record), console)[0]
    except InputError as error:
        console.print(f"not predicted anew, so in no interval: {record.title}: {error}", markup=False)
        return []


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
