"""What a sweep found: its record, which a file keeps, and how its cells are judged."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from experiments.evidence.executed.cells import Cell
from experiments.evidence.executed.comparison import Comparison, Measured, Peak, calibrated, measured
from experiments.evidence.executed.diagnosis import DRIFT
from experiments.evidence.kept import Kept, kept_in
from experiments.evidence.provenance import command_line
from sim.base.errors import InputError
from sim.base.files import Kind, Output, decoded_by
from sim.base.presets import from_json, read_bytes
from sim.base.units import percent
from sim.engine.intervals.interval import Interval
from sim.setup.configuration import Configuration
from sim.setup.machine import equipped
from sim.setup.setup import Setup
from sim.words.profile import Profile

ENOUGH = 0.8
"""Share of the repeats that has to meet the target."""


CLOSE = 0.02
"""How far a simulated peak may be from what an allocator gave."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All comparisons of a sweep, with the profile that they rest on."""

    profile: Profile
    title: str
    """What all cells have in common: model, passes, data type, mask."""
    begun: str
    """Date and time, UTC, ISO 8601."""
    command: str
    software: dict[str, str]
    """Versions of what ran."""
    select: dict[str, Any]
    """What all cells have in common, as a case file says it."""
    comparisons: list[tuple[Cell, list[Comparison]]]


def begun(setup: Setup, select: dict[str, Any]) -> Record:
    """Return the record of a sweep that has found nothing yet; ``setup`` is that of one cell.

    Its profile is the one that was calibrated, not at the rates of that cell: others may be of another scope.
    """
    from calibrate.plan import software

    _, profile = equipped(setup.cluster, setup.profile)
    return Record(
        profile=calibrated(profile),
        title=_title(setup.resolved()),
        begun=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(),
        software=software(),
        select=select,
        comparisons=[],
    )


def _title(found: Configuration) -> str:
    """Return what all cells of a sweep have in common, in words."""
    w = found.workload
    passes = "forward and backward" if w.passes == "both" else w.passes
    batch = f", B {w.batch}" if w.batch > 1 else ""
    where = ", all ranks on one device" if found.one_device else ""
    return f"{w.model.name}, {passes}, {w.dtype}, {w.mask}{batch}{where}"


def save_record(record: Record, output: Output) -> None:
    """Write a record; a reader sees the old file or the whole new one."""
    output.write(msgspec.json.encode(record, enc_hook=str))  # the name of a schedule of the user's own


RECORD_FILE = Kind("a record", decoded_by(msgspec.json.Decoder(Record).decode))


def read_record(path: str) -> Record:
    """Return the record in a file; raises InputError if it is none."""
    data = read_bytes("record", path, "`record`")
    record = from_json(data, Record, f"record {path!r}", "longstep validate --out writes one")
    if not any(found for _, found in record.comparisons):
        raise InputError(f"record {path!r} holds no comparison; longstep validate --out writes one")
    return record


def kept_records(path: str) -> list[Kept[Record]]:
    """Return the record in a file, or all that lie in a folder; raises InputError if one is damaged, or none there."""
    if not Path(path).is_dir():
        return [Kept(Path(path), read_record(path))]
    found = kept_in(path, "comparisons", read_record)
    if not found:
        raise InputError(f"`record` {path}: that folder holds no record; longstep validate --out writes one")
    return found


def joined(records: Sequence[Record]) -> Record:
    """Return the records as one, cells that occur twice with the repeats of both; raises InputError if they do not rest
    on the same calibration, or are not of the same workload.
    """
    first = records[0]
    for other in records[1:]:
        if (other.profile, other.title, other.select) != (first.profile, first.title, first.select):
            raise InputError(
                "`record`: these rest on different profiles or workloads, which make no common plot; give each its own"
            )
    found: dict[Cell, list[Comparison]] = {}
    for record in records:
        for cell, comparisons in record.comparisons:
            found.setdefault(cell, []).extend(comparisons)
    for cell, comparisons in found.items():
        if len({result.step.simulated_s for result in comparisons}) > 1:
            raise InputError(f"`record`: these simulate {cell.name} differently, so they come from different versions")
    commands = "; ".join(dict.fromkeys(record.command for record in records if record.command))
    return msgspec.structs.replace(first, command=commands, comparisons=list(found.items()))


class Tally(NamedTuple):
    """How many of some repeats met their target."""

    met: int
    of: int

    @property
    def missed(self) -> bool:
        """Whether these are too few."""
        return self.met < ENOUGH * self.of

    def __str__(self) -> str:
        """Return it as tables show it."""
        return f"{self.met} of {self.of}" if self.of else "none"


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A cell, and what its repeats say."""

    cell: Cell
    times: Measured
    """Of the step; the interval is that of the repeats' medians."""
    errors: list[float]
    """Of each repeat, as it came."""
    quiet: list[bool]
    """Whether the machine was, before and after each repeat, the one that was calibrated."""
    when_quiet: Measured | None
    """Of the quiet repeats alone; None where there is none."""
    memory: Peak
    """Of the repeat whose allocator gave most."""
    interval_s: Interval | None = None
    """Where nine of ten executed times should lie."""

    @property
    def low(self) -> float:
        """Least error of a repeat."""
        return min(self.errors)

    @property
    def high(self) -> float:
        """Largest error of a repeat."""
        return max(self.errors)

    @property
    def met(self) -> Tally:
        """How many repeats met the target."""
        return Tally(sum(abs(error) <= self.cell.target for error in self.errors), len(self.errors))

    @property
    def quiet_errors(self) -> list[float]:
        """Of each quiet repeat."""
        return [error for error, quiet in zip(self.errors, self.quiet, strict=True) if quiet]

    @property
    def met_when_quiet(self) -> Tally:
        """How many of the quiet repeats met the target."""
        return Tally(sum(abs(error) <= self.cell.target for error in self.quiet_errors), len(self.quiet_errors))


def judged(record: Record) -> list[Judged]:
    """Return the cells of a record that were compared at all."""
    return [_judge(cell, found) for cell, found in record.comparisons if found]


def _judge(cell: Cell, found: list[Comparison]) -> Judged:
    (simulated,) = {result.step.simulated_s for result in found}
    quiet = [all(abs(drift) <= DRIFT for drift in result.drift) for result in found]
    steps_s = [result.step.median_s for result, counts in zip(found, quiet, strict=True) if counts]
    return Judged(
        cell=cell,
        times=measured(simulated, [result.step.median_s for result in found]),
        errors=[result.step.error for result in found],
        quiet=quiet,
        when_quiet=measured(simulated, steps_s) if steps_s else None,
        memory=max((result.peak_bytes for result in found), key=lambda peak: peak.allocated),
        interval_s=found[0].report.interval_s,
    )


def quiet_repeats(cells: Sequence[Judged]) -> str:
    """Return how many repeats of all cells were quiet."""
    return f"{sum(sum(cell.quiet) for cell in cells)} of {sum(len(cell.quiet) for cell in cells)}"


def summary(record: Record) -> list[str]:
    """Return what all cells say together."""
    cells = judged(record)
    met = sum(not cell.met.missed for cell in cells)
    middle = statistics.median(abs(cell.times.error) for cell in cells)
    verdict = f"{met} of {len(cells)} cells met their target in {100 * ENOUGH:g} % of their repeats"
    right, clear = order(record)
    said = [f"the faster of two schedules: predicted right in {right} of {clear} clear cases"] if clear else []
    off = f"{verdict}; the median cell is off by {100 * middle:.1f} %"
    return [off, steadiness(record), *said, *_memory(cells), *_attention(record)]


def _memory(cells: Sequence[Judged]) -> list[str]:
    """Return how far simulated peaks are from those of allocators, where there are some."""
    errors = [one.memory.error for one in cells if one.memory.allocated]
    if not errors:
        return []
    close = Tally(sum(abs(error) <= CLOSE for error in errors), len(errors))
    off = f"{percent(min(errors))} to {percent(max(errors))} beside what the allocator gave"
    return [f"peak memory: {off}; {close} cells within {percent(CLOSE)[1:]}"]


def _attention(record: Record) -> list[str]:
    """Return which implementations of attention ran, where the record says so."""
    names = dict.fromkeys(result.attention for _, found in record.comparisons for result in found if result.attention)
    return [f"attention kernel: {' or '.join(names)}"] if names else []


def steadiness(record: Record) -> str:
    """Return how far the machine was, over all of a sweep, from the one that was calibrated."""
    drifts = [drift for _, found in record.comparisons for result in found for drift in result.drift]
    drift = f"beside its calibration, kernels took {percent(min(drifts))} to {percent(max(drifts))} over all of this"
    cells = judged(record)
    quiet = f"{quiet_repeats(cells)} repeats were quiet: within {percent(DRIFT)[1:]} before and after"
    errors = [error for cell in cells for error in cell.quiet_errors]
    off = f", off by {100 * statistics.mean(map(abs, errors)):.1f} % in the mean" if errors else ""
    return f"{drift}; {quiet}{off}"


def order(record: Record) -> tuple[int, int]:
    """Return how often the faster of two schedules was predicted right, and among how many pairs. Pairs count whose
    executed steps do not overlap.
    """
    steps: dict[tuple[int, str, int, str], list[list[Measured]]] = {}
    for cell, found in record.comparisons:
        steps.setdefault(cell.workload, []).append([result.step for result in found])
    pairs = [
        (one, other)
        for schedules in steps.values()
        for first, second in itertools.combinations(schedules, 2)
        for one, other in zip(first, second, strict=False)  # an interrupted sweep has fewer repeats of the later ones
    ]
    clear = [(one, other) for one, other in pairs if one.high_s < other.low_s or other.high_s < one.low_s]
    right = sum((one.simulated_s < other.simulated_s) == (one.median_s < other.median_s) for one, other in clear)
    return right, len(clear)


def provenance(record: Record) -> list[str]:
    """Return where the figures come from: the machine, the versions, the profile and the commands."""
    profile, machine = record.profile, record.profile.machine
    versions = ", ".join(f"{name} {version}" for name, version in (record.software or machine.software).items())
    state = "" if profile.complete else ", not complete"
    lines = [
        f"machine: {machine.gpu} ({versions})",
        f"profile: {profile.name!r} of {profile.created}, {len(profile.points)} points{state}, by: {profile.command}",
    ]
    return [*lines, f"sweep: begun {record.begun}, by: {record.command}"] if record.command else lines
