"""Predictions held against published measurements: case files in, rows of judged groups out."""

from __future__ import annotations

import hashlib
import itertools
import math
import multiprocessing
import os
import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from experiments.evidence.cases import FOLDER, Case, CaseFile, HostFigures, fit_cases, read_cases
from experiments.evidence.units import percent
from sim.engine.interval import bounds
from sim.presets import preset_names
from sim.profile import load_profile, profile_bytes
from sim.setup.names import DATASHEET

_APART = 0.02
"""Measured times that differ by no more are in no order."""


class CasePrediction(NamedTuple):
    """What is predicted of a case."""

    case: Case
    predicted_s: float
    low_s: float
    high_s: float
    """Where nine of ten measurements should lie."""
    bound_by: str
    """What most of the step goes to; empty for a part of one."""
    ranks: int

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_s / self.case.measured_s - 1

    @property
    def bounded(self) -> bool:
        """Whether anything is known of how far it may be off."""
        return self.low_s < self.high_s

    @property
    def covered(self) -> bool:
        """Whether the measured time lies in the interval."""
        return self.low_s <= self.case.measured_s <= self.high_s

    @property
    def what(self) -> str:
        """Return one line that names the case, and what bounds it."""
        case = self.case
        how = " ".join(filter(None, (case.mask, case.passes)))
        named = ", ".join(filter(None, (case.name, case.options, f"{self.ranks} GPUs", case.extent, how)))
        return f"{named}: {self.bound_by}" if self.bound_by else named


class Evidence(NamedTuple):
    """A case file, and what is predicted of it."""

    file: CaseFile
    found: list[CasePrediction]
    fitted: HostFigures | None = None
    """Of the host, where the file names cases that give them."""
    with_fit: Sequence[CasePrediction] = ()
    """What is then predicted, without intervals."""


def predicted(cases: Sequence[Case]) -> Iterator[CasePrediction]:
    """Yield what is predicted of each case, on all cores."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent) as pool:
        yield from pool.map(_predicted, cases)


def _end_with_parent() -> None:
    """Let this worker end when its parent does, which a signal may end before it can say so."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _predicted(case: Case) -> CasePrediction:
    found = case.played.predicted()
    step_s, trace, ranks = found.step_time_s, found.trace, found.checked.schedule.num_ranks
    if not case.measure:
        interval = None if case.host else found.interval
        return CasePrediction(case, step_s, *(interval or (step_s, step_s)), found.bound_by, ranks)
    op_s, low_s, high_s = map(case.seconds, (trace, *(bounds(found.simulation) or (trace, trace))))
    return CasePrediction(case, op_s, low_s, high_s, "", ranks)


def profile_sha256(name: str) -> str:
    """Return the SHA-256 of a profile's file."""
    return hashlib.sha256(profile_bytes(name)).hexdigest()


def read_all(names: Sequence[str]) -> list[tuple[CaseFile, list[Case]]]:
    """Return the case files that are named, each once, and their cases; all: those that ship."""
    given = (own for name in names for own in (preset_names(FOLDER) if name == "all" else [name]))
    return [read_cases(name) for name in dict.fromkeys(given)]


def provenance(file: CaseFile) -> list[str]:
    """Return what cases are of, where they come from, and what predictions of them rest on."""
    return [file.title, f"  {file.source}; {file.quality}", *(f"  {line}" for line in rests_on(file))]


def rests_on(file: CaseFile) -> list[str]:
    """Return which profile predictions of a file's cases rest on, and whether it is another one by now."""
    if file.profile == DATASHEET:
        return ["rates of datasheets"]
    sha256 = profile_sha256(file.profile)
    lines = [f"profile {Path(file.profile).name!r}, sha256 {sha256[:16]}"]
    if not sha256.startswith(file.profile_sha256):
        lines.append(f"not the profile that the cases were written with: that was sha256 {file.profile_sha256[:16]}")
    return lines


def fitted_from(evidence: Evidence) -> list[str]:
    """Return which cases gave the figures of the host, and these; nothing where a file names none."""
    host = evidence.fitted
    if host is None:
        return []
    named = (
        f"{one.name}, {one.setup.gpus} GPUs, {one.extent}, {one.mask} {one.passes}" for one in fit_cases(evidence.file)
    )
    figures = f"{1e6 * host.call_s:.3g} us a call, {1e6 * host.kernel_s:.3g} us a kernel"
    return [f"host fitted: {figures}, from cases that are in no row: {'; '.join(named)}"]


def measured_on(file: CaseFile) -> list[str]:
    """Return of which machine and when the profile of a case file is, and by which command."""
    if file.profile == DATASHEET:
        return []
    profile = load_profile(file.profile)
    return [f"that profile: {profile.machine.gpu}, {len(profile.points)} points, {profile.created}, {profile.command}"]


HEADS = ("group", "cases", "mean", "worst", "bias", "R² of log", "order", "in 90 %", "target", "worst is")
"""Of the table of all groups of a file."""


def judged_groups(evidence: Evidence) -> list[list[str]]:
    """Return the rows of a file's table: every group, groups together, and all together."""
    file, found = evidence.file, evidence.found
    groups = [(group.name, {group.name}, group.target) for group in file.group]
    groups += [(together.name, set(together.of), together.target) for together in file.together]
    rows = [[name, *_judged([one for one in found if one.case.group in of], target)] for name, of, target in groups]
    rows += [["all", *_judged(found, None)]] if len(groups) > 1 else []
    fitted = [[one for one in evidence.with_fit if one.case.group in of] for _, of, _ in groups]
    rows += [
        [f"{name}, host fitted", *_judged(some, None)]
        for (name, _, _), some in zip(groups, fitted, strict=True)
        if some
    ]
    rows += [["all, host fitted", *_judged(evidence.with_fit, None)]] if evidence.with_fit and len(groups) > 1 else []
    return rows


def _judged(found: Sequence[CasePrediction], target: float | None) -> list[str]:
    """Return what a table says of some predictions."""
    errors = [one.error for one in found]
    mean = statistics.mean(map(abs, errors))
    worst = max(found, key=lambda one: abs(one.error))
    right, pairs = order(found)
    inside = coverage(found)
    met = "" if target is None else f"{100 * target:g} %" + (": missed" if mean > target else "")
    return [
        str(len(found)),
        f"{100 * mean:.1f} %",
        percent(worst.error),
        percent(statistics.mean(errors)),
        f"{r_squared(found):.3f}" if len(found) > 1 else "",
        f"{right} of {pairs}",
        "" if inside is None else f"{100 * inside:.0f} %",
        met,
        worst.what,
    ]


def coverage(found: Sequence[CasePrediction]) -> float | None:
    """Return the share of measured times that lie in their intervals; None where no prediction has one."""
    return statistics.mean(one.covered for one in found) if any(one.bounded for one in found) else None


def order(found: Sequence[CasePrediction]) -> tuple[int, int]:
    """Return how often the faster of two schedules was predicted right, and of how many whose times are apart."""
    by_rivals: dict[tuple[object, ...], list[CasePrediction]] = {}
    for one in found:
        by_rivals.setdefault(one.case.rivals, []).append(one)
    pairs = [
        (one, other)
        for rivals in by_rivals.values()
        for one, other in itertools.combinations(rivals, 2)
        if abs(math.log(one.case.measured_s / other.case.measured_s)) > _APART
    ]
    right = sum((a.predicted_s < b.predicted_s) == (a.case.measured_s < b.case.measured_s) for a, b in pairs)
    return right, len(pairs)


def r_squared(found: Sequence[CasePrediction]) -> float:
    """Return the share of the variance of log time that predictions explain."""
    logs = [math.log(one.case.measured_s) for one in found]
    missed = sum(math.log1p(one.error) ** 2 for one in found)
    mean = statistics.mean(logs)
    total = sum((value - mean) ** 2 for value in logs)
    return 1 - missed / total if total else math.nan
