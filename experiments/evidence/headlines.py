"""The evidence in a few rows: one per machine that executed, one or a few per case file."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from experiments.evidence.executed.record import Judged, Record, judged, order
from experiments.evidence.links.lab import LabCell, LabRecord
from experiments.evidence.links.lab_verdict import TARGETS, lab_order, verdict
from experiments.evidence.papers import published
from experiments.evidence.papers.published import CasePrediction, Evidence, explained
from sim.base.units import percent


class Headline(NamedTuple):
    """How good the predictions of one source are."""

    what: str
    cases: int
    mean: float
    """Of the errors' sizes, as a share of the measured time; of executed cells the error is that of the median repeat.
    """
    bias: float
    """Mean of the errors themselves, as a share."""
    too_fast: int
    """Cases that are predicted to take less than they do."""
    worst: float
    r_squared: float
    """Of logarithms."""
    right: int
    """Pairs of schedules of which the faster one was predicted to be."""
    pairs: int
    """Pairs whose measured times are apart."""
    covered: float | None
    """Share of the measured times in the predicted 90 % interval; None where there are no intervals."""
    target: str
    met: str
    attention_alone: bool = False
    """Whether all cases are of attention, without the layers around it: these have a table of their own."""

    @property
    def row(self) -> list[str]:
        """Return it as the table of ``HEADLINE_HEADS`` shows it."""
        return [
            self.what,
            str(self.cases),
            f"{100 * self.mean:.1f} %",
            percent(self.bias),
            f"{self.too_fast} of {self.cases}",
            percent(self.worst),
            f"{self.r_squared:.3f}" if self.cases > 1 else "",
            f"{self.right} of {self.pairs}" if self.pairs else "",
            "" if self.covered is None else f"{100 * self.covered:.0f} %",
            self.target,
            self.met,
        ]


HEADLINE_HEADS = (
    "measured", "cases", "mean error", "bias", "too fast", "worst", "R² of log", "faster schedule right",
    "in the 90 % interval", "target", "met",
)  # fmt: skip
_CHAPTER_ONLY = {"too fast", "worst", "R² of log", "target"}
FRONT_HEADS = {head: head for head in HEADLINE_HEADS if head not in _CHAPTER_ONLY} | {"met": "target met"}
"""Of these, what a front page shows, and how it calls them."""


class _Errors(NamedTuple):
    """What is said of errors, in the order of a headline."""

    mean: float
    bias: float
    too_fast: int
    worst: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> _Errors:
        """Return it of some errors."""
        sizes, below = statistics.mean(map(abs, errors)), sum(error < 0 for error in errors)
        return cls(sizes, statistics.mean(errors), below, max(errors, key=abs))


def steps_on(record: Record) -> str:
    """Return what the steps of a record are called, as a set of cases."""
    return f"steps on {record.profile.machine.gpu}"


def headlines(
    evidence: Sequence[Evidence],
    records: Sequence[Record],
    anew: Sequence[Sequence[CasePrediction]] = (),
    labs: Sequence[LabRecord] = (),
) -> list[Headline]:
    """Return a row for every machine that executed records, then one for every machine of labs that were quiet, and of
    every case file. Where a machine's lab was repeated, its latest sweep of the same cells counts.

    ``anew`` is what this version predicts of each record; intervals are from there where the records have none.
    """
    by_machine: dict[str, list[int]] = {}
    for number, record in enumerate(records):
        by_machine.setdefault(steps_on(record), []).append(number)
    executed = [
        _executed(what, [records[n] for n in some], [one for n in some for one in (anew[n] if anew else [])])
        for what, some in by_machine.items()
    ]
    by_lab: dict[str, dict[frozenset[LabCell], LabRecord]] = {}
    for lab in sorted(labs, key=lambda lab: lab.begun):
        if verdict(lab.results).claims:
            latest = by_lab.setdefault(f"{lab.title}, links of set rates, {lab.profile.machine.gpu}", {})
            latest[frozenset(one.cell for one in lab.results)] = lab
    in_labs = [_in_lab(what, list(latest.values())) for what, latest in by_lab.items()]
    return [*executed, *in_labs, *(row for one in evidence for row in _published(one))]


def _executed(what: str, records: Sequence[Record], anew: Sequence[CasePrediction]) -> Headline:
    cells = [cell for record in records for cell in judged(record)]
    orders = [order(record) for record in records]
    errors = [cell.times.error for cell in cells]
    covered = _coverage(cells)
    return Headline(
        f"executed: {what}",
        len(cells),
        *_Errors.of(errors),
        explained([cell.times.median_s for cell in cells], errors),
        sum(right for right, _ in orders),
        sum(pairs for _, pairs in orders),
        published.coverage(anew) if covered is None else covered,
        "of each cell",
        f"{sum(not cell.met.missed for cell in cells)} of {len(cells)}",
    )


def _in_lab(what: str, records: Sequence[LabRecord]) -> Headline:
    results = [one for record in records for one in record.results]
    found, cells = verdict(results), [one.times for one in results if one.judged]
    orders = [lab_order(record.results) for record in records]
    errors = [times.error for times in cells]
    return Headline(
        f"executed: {what}",
        len(cells),
        *_Errors.of(errors),
        explained([times.median_s for times in cells], errors),
        sum(right for right, _ in orders),
        sum(pairs for _, pairs in orders),
        None,
        f"{100 * TARGETS[0]:g} %",
        "met" if found.met else "missed",
    )


def _coverage(cells: Sequence[Judged]) -> float | None:
    """Return the share of executed times, of quiet repeats, that lie in their intervals; None where none has one."""
    bounded = [(cell.when_quiet.median_s, cell.interval_s) for cell in cells if cell.interval_s and cell.when_quiet]
    return statistics.mean(low_s <= step_s <= high_s for step_s, (low_s, high_s) in bounded) if bounded else None


def _published(evidence: Evidence) -> Iterator[Headline]:
    """Yield the row of a case file; where some of its groups are judged together, one of these, and of each other; none
    where only memory is known, or ops were timed and no steps.
    """
    file, found = evidence.file, evidence.found
    if all(one.case.measure for one in found):
        return
    if not file.together:
        yield _headline(file.title, found, file.target)
        return
    joined = {name for together in file.together for name in together.of}
    rows = [(together.name, together.of, together.target) for together in file.together]
    rows += [(group.name, [group.name], group.target) for group in file.group if group.name not in joined]
    for name, of, target in rows:
        yield _headline(f"{file.title}: {name}", [one for one in found if one.case.group in of], target)


def _headline(what: str, found: Sequence[CasePrediction], target: float | None) -> Headline:
    errors = _Errors.of([one.error for one in found])
    return Headline(
        f"published: {what}",
        len(found),
        *errors,
        published.r_squared(found),
        *published.order(found),
        published.coverage(found),
        "" if target is None else f"{100 * target:g} %",
        "" if target is None else "missed" if errors.mean > target else "met",
        all(one.case.setup.scope == "attention" for one in found),
    )
