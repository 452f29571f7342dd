"""Predictions held against published measurements: case files in, rows of judged groups out."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.evidence.papers.cases import FOLDER, Case, CaseFile, HostFigures, fit_cases, read_cases
from experiments.evidence.papers.memory_cases import MemoryFound
from experiments.evidence.workers import called
from sim.base.presets import preset_names
from sim.base.units import percent
from sim.engine.intervals.interval import reach
from sim.engine.intervals.learned import Learned, Reach, shipped
from sim.engine.intervals.regime import Regime, regime
from sim.engine.play.simulate import Simulation, simulate
from sim.engine.results.sensitivity import bound
from sim.plan.search.steps import steps_of
from sim.schedule.ir.ops import KINDS
from sim.setup.names import DATASHEET
from sim.software.software import load_software
from sim.words.profile import load_profile, profile_bytes

_APART = 0.02
"""Measured times that differ by no more are in no order."""


class Reaches(NamedTuple):
    """How far off a prediction may be, whatever steps have taught."""

    regime: Regime
    sources: Reach
    points: Reach | None
    """Of profiles whose points were predicted from each other."""

    def within(self, learned: Learned) -> Reach | None:
        """Return how far it may be off, as ``interval`` has it."""
        steps = learned.reach(self.regime)
        return self.points if steps is None else self.sources.at_least(steps)


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
    reaches: Reaches | None = None
    """None at the rates of datasheets, and where the host was fitted."""

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
    def half_width(self) -> float:
        """Half of the span of errors that a measured time within the interval can show."""
        return (self.predicted_s / self.low_s - self.predicted_s / self.high_s) / 2

    def within(self, learned: Learned) -> CasePrediction:
        """Return it with the interval that some sets of steps give it."""
        found = self.reaches.within(learned) if self.reaches else None
        low_s, high_s = found.around(self.predicted_s) if found else (self.predicted_s, self.predicted_s)
        return self._replace(low_s=low_s, high_s=high_s)

    def taking(self, taken_s: float) -> CasePrediction:
        """Return it with all layers and micro-batches, where it was played with fewer."""
        return self._replace(predicted_s=taken_s, low_s=taken_s, high_s=taken_s)

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
    memory: Sequence[MemoryFound] = ()
    """What is predicted of the memory of steps, where the file has some."""


def case_rows(evidence: Evidence) -> Iterator[dict[str, Any]]:
    """Yield what is predicted of each case of a file as plain data; without an interval where nothing is known."""
    for one in evidence.found:
        low_s, high_s = (one.low_s, one.high_s) if one.bounded else (None, None)
        yield {
            "cases": evidence.file.title, "group": one.case.group, "case": one.what, "measured_s": one.case.measured_s,
            "predicted_s": one.predicted_s, "low_s": low_s, "high_s": high_s, "error": one.error,
        }  # fmt: skip


def predicted(cases: Sequence[Case], title: str = "") -> Iterator[CasePrediction]:
    """Yield what is predicted of each case, on all cores; none of the set called ``title`` says how wide intervals
    are.
    """
    return (found for found, _ in predicted_twice(cases, title, None))


def predicted_twice(
    cases: Sequence[Case], title: str, host: HostFigures | None
) -> Iterator[tuple[CasePrediction, CasePrediction | None]]:
    """Yield what ``predicted`` does and, where there are other figures of the host, what is predicted with these."""
    learned = shipped().without(title)
    for found, fitted in called(partial(_predicted, host=host), cases, lambda case: f"case {case.name}, {case.extent}"):
        yield found.within(learned), fitted


def _predicted(case: Case, host: HostFigures | None) -> tuple[CasePrediction, CasePrediction | None]:
    if case.extend:
        return _extended(case), None
    few = case.told_by
    *before, found = [setup.predicted() for setup in few.setups]
    reaches = None if case.host or found.profile is None else _reaches(case, found.simulation)
    if host is None:
        told = _read_off(case, found.simulation, reaches)
        return told.taking(few.told(case.seconds(before[0].trace), told.predicted_s)) if before else told, None
    fitted, simulation = case._replace(host=host), found.simulation
    profile = fitted.played.resolved().profile
    again = simulate(found.checked, found.cluster, profile, simulation.jitter, engine=simulation.engine)
    return _read_off(case, simulation, reaches), _read_off(fitted, again, None)


def _extended(case: Case) -> CasePrediction:
    """Return what is predicted of a step by few of its layers and micro-batches."""
    steps = steps_of(case.played)
    reaches = None if steps.last.profile is None else _reaches(case, steps.last)
    return _read_off(case, steps.last, reaches).taking(steps.step_s)


def _read_off(case: Case, simulation: Simulation, reaches: Reaches | None) -> CasePrediction:
    """Return what a simulation says of a case, without an interval."""
    taken_s = case.seconds(simulation.trace)
    bound_by = "" if case.measure else bound(simulation).by
    return CasePrediction(case, taken_s, taken_s, taken_s, bound_by, simulation.checked.schedule.num_ranks, reaches)


def _reaches(case: Case, simulation: Simulation) -> Reaches:
    """Return how far off the step may be, or the op that was timed."""
    seconds = case.seconds if case.measure else None
    computes = case.measure and KINDS[case.measure].meta.activity == "compute"
    bounds = regime(simulation) if not case.measure else "kernels" if computes else "links"
    known = simulation.profile is not None and simulation.profile.residuals
    points = reach(simulation, "points", seconds) if known else None
    return Reaches(bounds, reach(simulation, "sources", seconds), points)


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


def software_of(file: CaseFile) -> list[str]:
    """Return which software was timed, where the file says it."""
    cases = (case for group in file.group for case in group.cases)
    named = dict.fromkeys(str(one["software"]) for one in (file.select, *cases) if "software" in one)
    said = ", ".join(f"{load_software(name).said} ({name})" for name in named)
    return [f"software: {said}"] if said else []


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


def rivals(found: Sequence[CasePrediction]) -> Iterator[tuple[CasePrediction, CasePrediction]]:
    """Yield all pairs of predictions that differ in their schedule alone."""
    alike: dict[tuple[object, ...], list[CasePrediction]] = {}
    for one in found:
        alike.setdefault(one.case.rivals, []).append(one)
    for some in alike.values():
        yield from itertools.combinations(some, 2)


def order(found: Sequence[CasePrediction]) -> tuple[int, int]:
    """Return how often the faster of two schedules was predicted right, and of how many whose times are apart."""
    pairs = [
        (one, other)
        for one, other in rivals(found)
        if abs(math.log(one.case.measured_s / other.case.measured_s)) > _APART
    ]
    right = sum((a.predicted_s < b.predicted_s) == (a.case.measured_s < b.case.measured_s) for a, b in pairs)
    return right, len(pairs)


def r_squared(found: Sequence[CasePrediction]) -> float:
    """Return the share of the variance of log time that predictions explain."""
    return explained([one.case.measured_s for one in found], [one.error for one in found])


def explained(measured_s: Sequence[float], errors: Sequence[float]) -> float:
    """Return the share of the variance of log time that predictions with such errors explain."""
    logs = list(map(math.log, measured_s))
    missed = math.fsum(math.log1p(error) ** 2 for error in errors)
    mean = statistics.mean(logs)
    total = math.fsum((value - mean) ** 2 for value in logs)
    return 1 - missed / total if total else math.nan
