"""Whether 90 % intervals hold nine of ten measured steps: by regime, and what these steps teach of their width."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, get_args

import msgspec

from experiments.evidence.papers.published import CasePrediction, coverage, rivals
from sim.base.files import Kind, decoded_by
from sim.engine.intervals.learned import LEAST, Learned, StepErrors
from sim.engine.intervals.regime import Regime

COVERED = (0.8, 0.97)
"""Share of the measured times that intervals of a regime should hold."""
WIDEST = 2.5
"""Most that half of an interval should be of the error, both in the median: of errors that are normally distributed,
nine of ten lie within 2.44 times their median."""
REGIME_HEADS = (
    "bound by", "measured", "cases", "in the 90 % interval", "median error", "half-width", "half-width / error",
    "reach from", "80 to 97 %", "at most 2.5",
)  # fmt: skip


class StepSet(NamedTuple):
    """Measured steps of one machine, as predicted."""

    title: str
    found: Sequence[CasePrediction]

    def of(self, regime: Regime) -> list[CasePrediction]:
        """Return those of a regime that have an interval."""
        return [one for one in self.found if one.bounded and one.reaches and one.reaches.regime == regime]


def learned_from(sets: Sequence[StepSet], command: str) -> Learned:
    """Return what sets of steps teach; those at the rates of datasheets have no intervals, and teach nothing."""
    created = datetime.now(UTC).date().isoformat()
    return Learned(created=created, command=command, sets=[one for one in map(_errors, sets) if one.of])


def _errors(steps: StepSet) -> StepErrors:
    whole = [one for one in steps.found if one.reaches and not one.case.measure]
    errors = ((one, _error_of(one)) for one in whole)
    apart = (
        (max(pair, key=lambda one: one.predicted_s), abs(_error_of(pair[0]) - _error_of(pair[1])))
        for pair in rivals(whole)
    )
    return StepErrors(title=steps.title, of=_by_regime(errors), apart=_by_regime(apart))


def _error_of(one: CasePrediction) -> float:
    """Return the logarithm of measured over predicted time."""
    return -math.log1p(one.error)


def _by_regime(found: Iterable[tuple[CasePrediction, float]]) -> dict[Regime, list[float]]:
    by_regime: dict[Regime, list[float]] = {}
    for one, value in found:
        assert one.reaches is not None
        by_regime.setdefault(one.reaches.regime, []).append(round(value, 4))
    return {regime: sorted(some) for regime, some in sorted(by_regime.items())}


STEP_ERRORS_FILE = Kind("errors of steps", decoded_by(msgspec.json.Decoder(Learned).decode))


def encoded(learned: Learned) -> bytes:
    """Return what the file of step errors holds."""
    return msgspec.json.format(msgspec.json.encode(learned), indent=1) + b"\n"


def regime_rows(sets: Sequence[StepSet], learned: Learned) -> list[list[str]]:
    """Return the rows of a table of ``REGIME_HEADS``: of each regime every set, then all together."""
    return [row for regime in get_args(Regime) for row in _rows(regime, sets, learned)]


def _rows(regime: Regime, sets: Sequence[StepSet], learned: Learned) -> Iterator[list[str]]:
    some = [(one.title, one.of(regime)) for one in sets if one.of(regime)]
    for title, found in some:
        yield [regime, title, *_figures(found), _from(regime, learned.without(title)), "", ""]
    together = [one for _, found in some for one in found]
    if together:
        yield [regime, "all", *_figures(together), "", *_judged(together)]


def _figures(found: Sequence[CasePrediction]) -> list[str]:
    covered, error, half = coverage(found) or 0.0, _error(found), statistics.median(one.half_width for one in found)
    shares = (f"{100 * covered:.0f} %", f"{100 * error:.1f} %", f"{100 * half:.1f} %")
    return [str(len(found)), *shares, f"{half / error:.1f}"]


def _error(found: Sequence[CasePrediction]) -> float:
    return statistics.median(abs(one.error) for one in found)


def _from(regime: Regime, learned: Learned) -> str:
    """Return what gave the width of a regime's intervals."""
    sets = learned.about(regime)
    if not sets:
        return "points of the profile"
    return f"{sum(map(len, sets))} steps of {len(sets)} other set" + "s" * (len(sets) > 1)


def _judged(found: Sequence[CasePrediction]) -> list[str]:
    """Return whether as many steps are in their intervals as should be, and whether these are no wider than that."""
    if len(found) < LEAST:
        return ["too few"] * 2
    low, high = COVERED
    held = low <= (coverage(found) or 0.0) <= high
    narrow = statistics.median(one.half_width for one in found) <= WIDEST * _error(found)
    return ["met" if held else "missed", "met" if narrow else "missed"]
