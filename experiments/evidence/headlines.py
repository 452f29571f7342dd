"""The evidence in a few rows: one per machine that executed, one per case file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from experiments.evidence import published
from experiments.evidence.published import Evidence
from experiments.evidence.record import Judged, Record, judged, order


class Headline(NamedTuple):
    """How good the predictions of one source are."""

    what: str
    cells: int
    median: float
    """Of the errors' sizes, as a share of the measured time; of executed cells the error is that of the median repeat.
    """
    mean: float
    right: int
    """Pairs of schedules of which the faster one was predicted to be."""
    pairs: int
    """Pairs whose measured times are apart."""
    covered: float | None
    """Share of the measured times in the predicted 90 % interval; None where there are no intervals."""

    @property
    def row(self) -> list[str]:
        """Return it as the table of ``HEADLINE_HEADS`` shows it."""
        right = f"{self.right} of {self.pairs}" if self.pairs else ""
        covered = "" if self.covered is None else f"{100 * self.covered:.0f} %"
        return [self.what, str(self.cells), f"{100 * self.median:.1f} %", f"{100 * self.mean:.1f} %", right, covered]


HEADLINE_HEADS = ("measured", "cells", "median error", "mean error", "faster schedule right", "in the 90 % interval")


def headline_rows(evidence: Sequence[Evidence], records: Sequence[Record]) -> list[list[str]]:
    """Return the rows of a table of ``HEADLINE_HEADS``; where nothing was executed on a GPU yet, one says so."""
    rows = [one.row for one in headlines(evidence, records)]
    if all(record.profile.machine.cores for record in records):  # which a GPU's profile has none of
        rows.append(["executed: steps on a GPU", "not yet", *[""] * (len(HEADLINE_HEADS) - 2)])
    return rows


def headlines(evidence: Sequence[Evidence], records: Sequence[Record]) -> list[Headline]:
    """Return a row for every machine that executed records, then one for every case file."""
    by_machine: dict[str, list[Record]] = {}
    for record in records:
        by_machine.setdefault(record.profile.machine.gpu, []).append(record)
    executed = [_executed(machine, some) for machine, some in by_machine.items()]
    return [*executed, *(_published(one) for one in evidence)]


def _executed(machine: str, records: Sequence[Record]) -> Headline:
    cells = [cell for record in records for cell in judged(record)]
    orders = [order(record) for record in records]
    return Headline(
        f"executed: steps on {machine}",
        len(cells),
        *_sizes([cell.times.error for cell in cells]),
        sum(right for right, _ in orders),
        sum(pairs for _, pairs in orders),
        _coverage(cells),
    )


def _coverage(cells: Sequence[Judged]) -> float | None:
    """Return the share of executed times that lie in their intervals; None where no prediction has one."""
    bounded = [(cell.times.median_s, cell.interval_s) for cell in cells if cell.interval_s]
    return statistics.mean(low_s <= step_s <= high_s for step_s, (low_s, high_s) in bounded) if bounded else None


def _published(evidence: Evidence) -> Headline:
    file, found = evidence.file, evidence.found
    return Headline(
        f"published: {file.title}",
        len(found),
        *_sizes([one.error for one in found]),
        *published.order(found),
        published.coverage(found),
    )


def _sizes(errors: Sequence[float]) -> tuple[float, float]:
    sizes = list(map(abs, errors))
    return statistics.median(sizes), statistics.mean(sizes)
