"""What a sweep in a lab says of predictions: how far they are off where communication shows, where schedules change
order, and whether the machine was quiet enough to claim it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import msgspec

from experiments.evidence.executed.comparison import Measured
from experiments.evidence.links.lab import MBIT, STEADY, LabCell, LabRecord, LabResult
from sim.base.units import percent, seconds

MOST_VOID = 1 / 3
"""Share of the repeats that may be void: if more are, nothing is claimed."""
TARGETS = (0.08, 0.20, 0.30)
"""Of the error of such cells: the mean, what 95 % of them stay below, and the worst."""
COST = 0.15
"""How far what a fault costs may be off."""
CLOSE = 1.5
"""Factor of bandwidth by which the place where two schedules change order may be off."""

ALIKE = 0.01
"""Below that difference no placement is predicted to be faster, as on a network of one switch."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What all cells say together."""

    void: int
    repeats: int
    cells: int
    """Of which communication is enough of the step, and a repeat counts."""
    mean: float
    """Error of these: mean, what 95 % stay below, worst, each without sign."""
    most: float
    worst: float

    @property
    def quiet(self) -> bool:
        """Whether the machine was quiet enough to claim anything."""
        return self.void <= MOST_VOID * self.repeats

    @property
    def claims(self) -> bool:
        """Whether anything may be said of errors."""
        return self.quiet and self.cells > 0

    @property
    def met(self) -> bool:
        """Whether the errors meet their targets on a quiet machine."""
        errors = (self.mean, self.most, self.worst)
        return self.claims and all(error <= target for error, target in zip(errors, TARGETS, strict=True))


def verdict(results: Iterable[LabResult]) -> Verdict:
    """Return how far predictions were off, and whether that may be claimed."""
    some = list(results)
    repeats = [repeat for one in some for repeat in one.repeats]
    errors = sorted(abs(one.times.error) for one in some if one.judged)
    return Verdict(
        void=sum(repeat.void for repeat in repeats),
        repeats=len(repeats),
        cells=len(errors),
        mean=statistics.fmean(errors) if errors else 0.0,
        most=errors[math.ceil(0.95 * len(errors)) - 1] if errors else 0.0,
        worst=errors[-1] if errors else 0.0,
    )


class Crossover(NamedTuple):
    """The rate at which two schedules change order, bytes a second; None where they do not within the rates."""

    network: str
    seq: str
    predicted: float | None
    measured: float | None

    @property
    def right(self) -> bool:
        """Whether both are none, or within one step of each other."""
        if self.predicted is None or self.measured is None:
            return self.predicted == self.measured
        return 1 / CLOSE <= self.predicted / self.measured <= CLOSE


def crossovers(results: Iterable[LabResult], one: str, other: str) -> list[Crossover]:
    """Return where two schedules change order, by network and length, where each was measured at two rates or more."""
    times: dict[tuple[str, str], dict[str, dict[float, Measured]]] = {}
    for found in results:
        if found.cell.fault:
            continue
        by_method = times.setdefault((found.cell.network, found.cell.seq), {})
        by_method.setdefault(found.cell.method, {})[found.cell.bytes_per_s] = found.times
    rows = []
    for (network, seq), methods in times.items():
        rates = sorted(methods.get(one, {}).keys() & methods.get(other, {}).keys())
        if len(rates) > 1:
            pairs = [(methods[one][rate], methods[other][rate]) for rate in rates]
            predicted = _crossing(rates, [a.simulated_s / b.simulated_s for a, b in pairs])
            rows.append(
                Crossover(network, seq, predicted, _crossing(rates, [a.median_s / b.median_s for a, b in pairs]))
            )
    return rows


def _crossing(rates: Sequence[float], ratios: Sequence[float]) -> float | None:
    """Return the rate at which a ratio passes 1, on logarithmic scales."""
    points = [(math.log(rate), math.log(ratio)) for rate, ratio in zip(rates, ratios, strict=True)]
    for (x, here), (y, there) in pairwise(points):
        if here * there < 0:
            return math.exp(x + (y - x) * here / (here - there))
    return None


def lab_order(results: Iterable[LabResult]) -> tuple[int, int]:
    """Return how often the faster of two schedules in one network was predicted right, and among how many pairs. Pairs
    count whose steps do not overlap.
    """
    rivals: dict[tuple[object, ...], list[Measured]] = {}
    for one in results:
        if one.valid:
            rivals.setdefault((*one.cell.place, one.cell.seq), []).append(one.times)
    pairs = [pair for some in rivals.values() for pair in combinations(some, 2)]
    clear = [(one, other) for one, other in pairs if one.high_s < other.low_s or other.high_s < one.low_s]
    right = sum((one.simulated_s < other.simulated_s) == (one.median_s < other.median_s) for one, other in clear)
    return right, len(clear)


class Order(NamedTuple):
    """The faster of two placements of one schedule, predicted and measured."""

    cell: LabCell
    predicted: str
    measured: str


def placements(results: Iterable[LabResult]) -> list[Order]:
    """Return which placement is faster, wherever both were measured and one is predicted to be."""
    grouped: dict[tuple[str, str, str], list[LabResult]] = {}
    for one in results:
        if one.cell.placement:
            cell = one.cell
            grouped.setdefault((cell.where, cell.schedule, cell.seq), []).append(one)
    return [
        Order(
            some[0].cell,
            min(some, key=lambda one: one.predicted_s).cell.placement,
            min(some, key=lambda one: one.times.median_s).cell.placement,
        )
        for some in grouped.values()
        if max(one.predicted_s for one in some) > (1 + ALIKE) * min(one.predicted_s for one in some)
    ]


class Cost(NamedTuple):
    """How many times as long a step takes with a fault as without it."""

    cell: LabCell
    predicted: float
    measured: float

    @property
    def right(self) -> bool:
        """Whether both are within the target of each other."""
        return abs(self.predicted / self.measured - 1) <= COST


def costs(results: Iterable[LabResult]) -> list[Cost]:
    """Return what faults cost, of every cell that was measured with and without."""
    found = {one.cell: one for one in results}
    pairs = [(one, found.get(msgspec.structs.replace(cell, fault=""))) for cell, one in found.items() if cell.fault]
    return [
        Cost(one.cell, one.predicted_s / other.predicted_s, one.times.median_s / other.times.median_s)
        for one, other in pairs
        if other
    ]


LAB_HEADS = ("network", "Mbit/s", "S", "schedule", "communicating", "predicted", "measured", "error", "void")


def lab_row(one: LabResult) -> list[str]:
    """Return a cell as tables show it; an error that is not judged stands in brackets."""
    cell, void = one.cell, sum(repeat.void for repeat in one.repeats)
    error = percent(one.times.error)
    return [
        f"{cell.network} {cell.fault}".strip(),
        f"{cell.bytes_per_s / MBIT:g}",
        cell.seq,
        cell.method,
        f"{100 * one.share:.0f} %",
        seconds(one.predicted_s),
        seconds(one.times.median_s),
        error if one.judged else f"({error})",
        f"{void} of {len(one.repeats)}",
    ]


def lab_lines(record: LabRecord) -> list[str]:
    """Return what a sweep says beside its table, in sentences."""
    found = verdict(record.results)
    void = f"{found.void} of {found.repeats} repeats void (checks before and after apart by over {100 * STEADY:g} %)"
    lines = [f"large messages got {100 * record.goodput:.1f} % of what headers leave of a link", void]
    lines += [f"left out: {one}" for one in record.left_out]
    if not found.quiet:
        return [*lines, "the machine was not quiet: more than a third are void, so nothing is claimed"]
    if found.cells:
        off = f"mean {100 * found.mean:.1f} %, 95 % within {100 * found.most:.1f} %, worst {100 * found.worst:.1f} %"
        targets = ", ".join(f"{100 * target:g}" for target in TARGETS)
        lines.append(
            f"{found.cells} cells of which communication is a third or more: {off} (targets {targets}: "
            f"{'met' if found.met else 'missed'})"
        )
    for one in crossovers(record.results, "ring", "ulysses"):
        said = " and ".join(
            f"{what} {_rate(rate)}" for what, rate in (("predicted", one.predicted), ("measured", one.measured))
        )
        lines.append(f"ring and ulysses change order on {one.network}, S {one.seq}: {said}: {_right(one.right)}")
    for order in placements(record.results):
        said = f"{order.predicted} predicted faster, {order.measured} measured"
        right = _right(order.predicted == order.measured)
        lines.append(f"{order.cell.schedule} on {order.cell.where}, S {order.cell.seq}: {said}: {right}")
    for cost in costs(record.results):
        said = f"{cost.predicted:.3g} times as long as without predicted, {cost.measured:.3g} measured"
        lines.append(f"{cost.cell.name}: {said}: {_right(cost.right)}")
    return lines


def _rate(bytes_per_s: float | None) -> str:
    return "nowhere within the rates" if bytes_per_s is None else f"at {bytes_per_s / MBIT:.3g} Mbit/s"


def _right(right: bool) -> str:
    return "right" if right else "wrong"
