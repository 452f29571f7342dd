"""Predictions held against published measurements: case files in, one judged table out.

A case file names a profile and what its cases have in common as the command line would, then per case the rest of a
selection and the measured time. Those that ship lie in ``experiments/published``; a team adds its own runs as files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.selection import Selection, choose
from experiments.simulate import predict
from experiments.tables import percent
from sim.engine.simulate import simulate
from sim.errors import InputError, unknown
from sim.presets import load_toml, preset_names
from sim.profile import Bound, Profile, load_profile, profile_bytes

FOLDER = "experiments/published"
_APART = 0.02
"""Measured times that differ by no more are in no order."""
_SCHEDULE = ("schedule", "ulysses_degree", "ring_degree")
"""What cases may differ in to be compared with each other, beside overrides of the schedule."""
_KEYS = {"pass": "passes"} | {
    field.name: field.name for field in dataclasses.fields(Selection) if field.name not in {"passes", "profile"}
}


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cases that are judged together."""

    name: str
    cases: list[dict[str, Any]]
    """Each a selection, and ``measured_s``."""
    target: float | None = None
    """Largest mean error that counts as met."""
    set: tuple[str, ...] = ()


class CaseFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of others, or of one's own cluster."""

    title: str
    source: str
    quality: str
    """How the times were measured, and how far they can be trusted."""
    profile: str
    """Of the machine, as ``--profile`` takes it."""
    group: list[Group]
    select: dict[str, Any] = {}
    """What all cases have in common."""


class Case(NamedTuple):
    """One configuration, and how long it took."""

    group: str
    selection: Selection
    measured_s: float

    @property
    def options(self) -> str:
        """Return degrees and options of the schedule, as far as they are named."""
        selection = self.selection
        degrees = {"U": selection.ulysses_degree, "R": selection.ring_degree}
        named = [f"{name} {degree}" for name, degree in degrees.items() if degree]
        overrides = (key for key in selection.set if key.startswith("schedule."))
        return ", ".join([*named, *(key.removeprefix("schedule.") for key in overrides)])

    @property
    def rivals(self) -> tuple[object, ...]:
        """Return what is the same in cases of different schedules that can be compared."""
        fields = dataclasses.asdict(self.selection)
        overrides = tuple(key for key in fields.pop("set") if not key.startswith("schedule."))
        return (*(value for key, value in fields.items() if key not in _SCHEDULE), overrides)


class Prediction(NamedTuple):
    """What is predicted of a case."""

    case: Case
    step_s: float
    low_s: float
    high_s: float
    """Where nine of ten measurements should lie."""
    bound_by: str
    ranks: int

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.step_s / self.case.measured_s - 1

    @property
    def covered(self) -> bool:
        """Whether the measured time lies in the interval."""
        return self.low_s <= self.case.measured_s <= self.high_s


class Evidence(NamedTuple):
    """A case file, and what is predicted of it."""

    file: CaseFile
    found: list[Prediction]


def read_cases(name: str) -> tuple[CaseFile, list[Case]]:
    """Return a case file by name or path, and its cases; raises InputError that names what is wrong."""
    file = load_toml("case file", name, CaseFile, FOLDER, "--cases")
    if not file.group or not all(group.cases for group in file.group):
        raise InputError(f"case file {name!r}: a group holds no case; give each [[group]] its cases = [{{ … }}]")
    load_profile(file.profile)
    cases = [_case(file, group, case) for group in file.group for case in group.cases]
    for case in cases:
        try:
            chosen = choose(case.selection)
            chosen.entry.build(chosen.workload, chosen.parallel)
        except InputError as error:
            raise InputError(
                f"case file {name!r}, group {case.group!r}, measured_s {case.measured_s:g}: {error}"
            ) from error
    return file, cases


def _case(file: CaseFile, group: Group, case: dict[str, Any]) -> Case:
    fields = file.select | case
    measured_s = fields.pop("measured_s", None)
    if type(measured_s) not in {int, float} or not 0 < measured_s < math.inf:
        raise InputError(f"case file {file.title!r}, group {group.name!r}: {case} has no measured_s above 0")
    given = (file.select.get("set", []), case.get("set", []))
    if not all(isinstance(some, list) and all(isinstance(one, str) for one in some) for some in given):
        raise InputError(f'case file {file.title!r}, group {group.name!r}: set is a list such as ["model.num_heads=8"]')
    overrides = (*given[0], *group.set, *given[1])
    for key in fields:
        if key not in _KEYS:
            raise unknown("key", key, [*_KEYS, "measured_s"], f"case file {file.title!r}, group {group.name!r}")
    chosen = {_KEYS[key]: value for key, value in fields.items()} | {"set": overrides, "profile": file.profile}
    try:
        selection = msgspec.convert(chosen, Selection)
    except msgspec.ValidationError as error:
        raise InputError(f"case file {file.title!r}, group {group.name!r}: {case}: {error}") from error
    return Case(group.name, selection, float(measured_s))


def predicted(cases: Sequence[Case], console: Console) -> Iterator[Prediction]:
    """Yield what is predicted of each case, on all cores."""
    with Progress(console=type(console)(stderr=True), transient=True) as progress, ProcessPoolExecutor() as pool:
        yield from progress.track(pool.map(_predicted, cases), len(cases), description="predicting")


def _predicted(case: Case) -> Prediction:
    chosen = choose(case.selection)
    checked, simulation, report = predict(chosen)
    assert chosen.profile is not None
    low_s, high_s = (
        simulate(checked, simulation.cluster, scaled(chosen.profile, bound), chosen.jitter).trace.step_time_s
        for bound in ("low", "high")
    )
    step_s, ranks = simulation.trace.step_time_s, checked.schedule.num_ranks
    return Prediction(case, step_s, low_s, high_s, report.bound_by, ranks)


def scaled(profile: Profile, bound: Bound) -> Profile:
    """Return a profile in which every point takes as long as nineteen of twenty of its kind do, at most or at least.

    Kernels without points are not scaled.
    """
    factors = {kernel: getattr(spread, bound) for kernel, spread in profile.residuals.items()}

    return msgspec.structs.replace(
        profile,
        points=tuple(
            msgspec.structs.replace(point, median_s=point.median_s * factor, mean_s=point.mean_s * factor)
            for point in profile.points
            for factor in (factors.get(point.kernel, 1.0),)
        ),
    )


def profile_hash(name: str) -> str:
    """Return the beginning of the SHA-256 of a profile's file."""
    return hashlib.sha256(profile_bytes(name)).hexdigest()[:16]


def show_evidence(names: Sequence[str], console: Console) -> list[Evidence]:
    """Predict all cases of the files that are named (all: those that ship), and print how far off they are."""
    given = (own for name in names for own in (preset_names(FOLDER) if name == "all" else [name]))
    read = [read_cases(name) for name in dict.fromkeys(given)]
    shown = []
    for file, cases in read:
        shown.append(Evidence(file, list(predicted(cases, console))))
        for line in provenance(file):
            console.print(line, markup=False)
        table = Table(*HEADS)
        for row in judged(shown[-1]):
            table.add_row(*row)
        console.print(table)
    return shown


def provenance(file: CaseFile) -> list[str]:
    """Return what cases are of, where they come from, and what predictions of them rest on."""
    profile = f"profile {file.profile!r}, sha256 {profile_hash(file.profile)}"
    return [file.title, f"  {file.source}; {file.quality}", f"  {profile}"]


HEADS = ("group", "cases", "mean", "worst", "bias", "R² of log", "order", "in 90 %", "target", "worst is")
"""Of the table of all groups of a file."""


def judged(evidence: Evidence) -> list[list[str]]:
    """Return the rows of a file's table: every group, and all together."""
    file, found = evidence
    rows = [
        [group.name, *_judged([one for one in found if one.case.group == group.name], group.target)]
        for group in file.group
    ]
    return [*rows, ["all", *_judged(found, None)]] if len(rows) > 1 else rows


def _judged(found: Sequence[Prediction], target: float | None) -> list[str]:
    """Return what a table says of some predictions."""
    errors = [one.error for one in found]
    mean = statistics.mean(map(abs, errors))
    worst = max(found, key=lambda one: abs(one.error))
    right, pairs = order(found)
    met = "" if target is None else f"{100 * target:g} %" + (": missed" if mean > target else "")
    s = worst.case.selection
    return [
        str(len(found)),
        f"{100 * mean:.1f} %",
        percent(worst.error),
        percent(statistics.mean(errors)),
        f"{r_squared(found):.3f}" if len(found) > 1 else "",
        f"{right} of {pairs}",
        f"{100 * statistics.mean(one.covered for one in found):.0f} %",
        met,
        f"{s.schedule}, {worst.ranks} GPUs, {s.seq}, {s.mask} {s.passes}: {worst.bound_by}",
    ]


def order(found: Sequence[Prediction]) -> tuple[int, int]:
    """Return how often the faster of two schedules was predicted right, and of how many whose times are apart."""
    by_rivals: dict[tuple[object, ...], list[Prediction]] = {}
    for one in found:
        by_rivals.setdefault(one.case.rivals, []).append(one)
    pairs = [
        (one, other)
        for rivals in by_rivals.values()
        for one, other in itertools.combinations(rivals, 2)
        if abs(math.log(one.case.measured_s / other.case.measured_s)) > _APART
    ]
    right = sum((a.step_s < b.step_s) == (a.case.measured_s < b.case.measured_s) for a, b in pairs)
    return right, len(pairs)


def r_squared(found: Sequence[Prediction]) -> float:
    """Return the share of the variance of log time that predictions explain."""
    logs = [math.log(one.case.measured_s) for one in found]
    missed = sum(math.log1p(one.error) ** 2 for one in found)
    mean = statistics.mean(logs)
    total = sum((value - mean) ** 2 for value in logs)
    return 1 - missed / total if total else math.nan
