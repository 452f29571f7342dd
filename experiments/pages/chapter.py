"""The evidence as one chapter of Markdown: in a few rows, then every record and every case file by itself."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from experiments.evidence.executed.record import Judged, Record, judged, provenance, summary
from experiments.evidence.headlines import FRONT_HEADS, HEADLINE_HEADS, headlines
from experiments.evidence.kept import Kept
from experiments.evidence.links.lab import LabRecord
from experiments.evidence.links.lab_verdict import LAB_HEADS, lab_lines, lab_row
from experiments.evidence.papers.coverage import REGIME_HEADS
from experiments.evidence.papers.memory_cases import memory_tables
from experiments.evidence.papers.published import (
    HEADS,
    Evidence,
    fitted_from,
    judged_groups,
    measured_on,
    rests_on,
    software_of,
)
from sim.base.errors import InputError
from sim.base.files import Kind, marked
from sim.base.units import percent, seconds
from sim.words.profile import Profile, encode_profile

if TYPE_CHECKING:
    from calibrate.held.leave_one_out import Residual

SHOWN = 4
"""Cases of a set that a front page shows, at least."""
_MARK = "<!-- generator: longstep -->"
CHAPTER_FILE = Kind("a chapter of evidence", marked(_MARK))
_HEADLINES = re.compile(rf"(?m)^\| {HEADLINE_HEADS[0]} \|.*\n(?:\|.*\n)*")
FRONT_PAGE = Kind("a page with the headlines of the evidence", lambda file: bool(_HEADLINES.search(_text(file))))

_ABOUT = (
    "How far predicted times are from measured ones, executed on machines that we had, or published by others. This "
    "page is written by a command, with the figures of the version that runs it:"
)
_TERMS = (
    "An error is predicted / measured - 1. Of two schedules whose measured times are apart, the order is right where "
    "the faster one is predicted to be. Where the 90 % interval is empty, nothing is known of how far predictions may "
    "be off. Executed steps are held against it by their quiet repeats, beside which kernels took as long as in the "
    "calibration. A blind error is the mean of the first prediction, before anyone had seen how far off it was."
)
_ALONE = "Attention alone, without the layers around it:"
_REGIMES = (
    "Steps by what is busiest in them: kernels, links, or the host, at the upper end of what sources say of it. "
    "Errors and half-widths are medians; a half-width is half of the span of errors that measured times within the "
    "interval can show. Intervals reach as far as sources allow, and at least as far as measured steps were off, with "
    "a twentieth beyond each end: split conformal prediction (arXiv:1604.04173) with every set as heavy as any other "
    "(arXiv:1809.07441). The set of a row is not among those that gave its intervals. Where no other set has 20 steps "
    "of a regime, the profile's points stand in, each predicted from the others. Predictions that ship rest on all "
    "sets. At the rates of datasheets there are no intervals. Executed cells count by their quiet repeats, not at all "
    "where they have none."
)
_LABS = (
    "Steps in networks of this machine's own, whose links have set rates (`longstep lab`). Predictions know the host's "
    "kernels, what transfers took at one rate, and the rates. Where a sweep was repeated on a machine, the table "
    "counts the latest, and the earlier one stands below as it was. Errors in brackets are not judged: less than a "
    "third of the step is communication, or the machine changed during every repeat."
)
_POINTS = (
    "Each point of a profile is predicted from the others, but for the ends of series that have no tile model. Per "
    "kernel: median error (points), worst error. `longstep calibrate --published NAME` makes a profile anew from the "
    "tables of its sources, and prints the same."
)


def chapter(
    rows: Sequence[Sequence[str]],
    alone: Sequence[Sequence[str]],
    regimes: Sequence[Sequence[str]],
    evidence: Sequence[Evidence],
    records: Sequence[Kept[Record]],
    labs: Sequence[Kept[LabRecord]],
    profiles: Mapping[str, Sequence[Residual]],
    *,
    command: str,
    folder: Path,
) -> str:
    """Return the chapter of headlines, those of attention ``alone`` in a table of their own, regimes, case files,
    records, labs and profiles, written by ``command``, to lie in a folder.
    """
    parts = [
        _MARK,
        "# Evidence",
        _ABOUT,
        f"```text\n{command}\n```",
        _TERMS,
        markdown_table(HEADLINE_HEADS, rows),
    ]
    if alone:
        parts += [_ALONE, markdown_table(HEADLINE_HEADS, alone)]
    if regimes:
        parts += ["## Intervals", _REGIMES, markdown_table(REGIME_HEADS, regimes)]
    if records:
        parts += ["## Executed", *(part for kept in records for part in executed_section(kept, folder))]
    if labs:
        quiet = [one.row for one in headlines([], [], labs=[kept.record for kept in labs])]
        parts += ["## Links of set rates", _LABS, *([markdown_table(HEADLINE_HEADS, quiet)] if quiet else [])]
        parts += [part for kept in labs for part in lab_section(kept, folder)]
    if evidence:
        parts += ["## Published", *(part for one in evidence for part in _published_section(one))]
    if profiles:
        parts += ["## Profiles", _POINTS, _points(profiles)]
    return "\n\n".join(parts) + "\n"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines)


def on_front_page(text: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a page with the headlines in place of those that it shows; raises InputError where it shows none."""
    found = _HEADLINES.search(text)
    if not found:
        raise InputError(f"the front page has no table that begins with | {HEADLINE_HEADS[0]} |, to be replaced")
    return text[: found.start()] + front_table(rows) + "\n" + text[found.end() :]


def front_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the table of headlines that a front page shows: fewer columns than the chapter has, and no sets of few
    cases, of which a mean says little.
    """
    shown, cases = [HEADLINE_HEADS.index(head) for head in FRONT_HEADS], HEADLINE_HEADS.index("cases")
    large = [row for row in rows if int(row[cases]) >= SHOWN]
    return markdown_table([*FRONT_HEADS.values()], [[row[place] for place in shown] for row in large])


def executed_section(kept: Kept[Record], folder: Path) -> list[str]:
    """Return what a record says: where it comes from, its summary, its figure, its notes and all of its cells."""
    record, cells = kept.record, judged(kept.record)
    heads = ("P", "what", "S", "schedule", "predicted", "executed", "error", "target", "met")
    lines = [*provenance(record), _sha256(record.profile), *summary(record)]
    title = f"{record.title}: {len(cells)} cells on {record.profile.machine.gpu}"
    return _section(kept, title, lines, markdown_table(heads, [_cell(one) for one in cells]), folder)


def lab_section(kept: Kept[LabRecord], folder: Path) -> list[str]:
    """Return what a record of a lab says: where it comes from, what its cells say together, its figure, its cells."""
    record = kept.record
    lines = [f"sweep: begun {record.begun}, by: {record.command}", _sha256(record.profile), *lab_lines(record)]
    kinds = dict.fromkeys(name for one in record.results for name in (one.cell.network, one.cell.fault) if name)
    title = f"{record.title}, {', '.join(kinds)}: {len(record.results)} cells on {record.profile.machine.gpu}"
    return _section(kept, title, lines, markdown_table(LAB_HEADS, [lab_row(one) for one in record.results]), folder)


def _section(kept: Kept[Any], title: str, lines: Sequence[str], table: str, folder: Path) -> list[str]:
    """Return a record's section, with what lies beside it."""
    figure = [f"![Predicted against executed times]({_relative(kept.figure, folder)})"] if kept.figure else []
    return [
        f"### {_escaped(title)}",
        _list([f"record: [{kept.path.name}]({_relative(kept.path, folder)})", *map(_escaped, lines)]),
        *([kept.notes] if kept.notes else []),
        *figure,
        table,
    ]


def _cell(found: Judged) -> list[str]:
    """Return a cell's row: times and error of the median repeat, with the least and greatest error of all repeats."""
    return [
        str(found.cell.gpus),
        found.cell.what,
        found.cell.seq,
        found.cell.method,
        seconds(found.times.simulated_s),
        seconds(found.times.median_s),
        f"{percent(found.times.error)} [{percent(found.low)}, {percent(found.high)}]",
        f"{100 * found.cell.target:g} %",
        str(found.met),
    ]


def _published_section(evidence: Evidence) -> list[str]:
    """Return what a case file says: where it comes from, its notes, and the table of its groups."""
    file = evidence.file
    heads, rows = list(HEADS), judged_groups(evidence)
    blind = {group.name: group.blind for group in file.group} | {some.name: some.blind for some in file.together}
    if any(share is not None for share in blind.values()):
        after = heads.index("mean") + 1
        heads.insert(after, "blind")
        rows = [[*row[:after], _percent(blind.get(row[0])), *row[after:]] for row in rows]
    lines = [
        f"source: {file.source}",
        f"quality: {file.quality}",
        *software_of(file),
        *rests_on(file),
        *measured_on(file),
        *fitted_from(evidence),
    ]
    return [
        f"### {_escaped(file.title)}",
        _list(map(_escaped, lines)),
        *([file.notes.strip()] if file.notes else []),
        *([markdown_table(heads, rows)] if rows else []),
        *(markdown_table(heads, rows) for heads, rows in memory_tables(evidence.memory)),
    ]


def _sha256(profile: Profile) -> str:
    return f"profile sha256 {hashlib.sha256(encode_profile(profile)).hexdigest()[:16]}"


def _points(profiles: Mapping[str, Sequence[Residual]]) -> str:
    found = {
        (one.kernel, name): f"{_percent(one.median)} ({one.points}), {percent(one.worst)}"
        for name, residuals in profiles.items()
        for one in residuals
    }
    kernels = sorted({kernel for kernel, _ in found})
    rows = [[kernel, *(found.get((kernel, name), "") for name in profiles)] for kernel in kernels]
    return markdown_table(["kernel", *profiles], rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _text(file: BinaryIO) -> str:
    return file.read().decode(errors="replace")


def _escaped(text: str) -> str:
    """Return a text whose characters mean nothing to Markdown."""
    return re.sub(r"([\\*<|`])", r"\\\1", text)
