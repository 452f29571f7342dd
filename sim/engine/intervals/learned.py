"""How far steps that were measured lay from their predictions: the least width of 90 % intervals.

Split conformal prediction (arXiv:1604.04173) of the logarithm of measured over predicted time, by regime, with a
twentieth of all steps left out at each end. Cases of one set, of one machine and one code, are alike; another set is
what the next user brings. So every set counts as much as any other, however many cases it has (arXiv:1809.07441, pooled
distributions). Predictions themselves never change by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

import msgspec

from sim.base.presets import from_json
from sim.engine.intervals.regime import Regime

BEYOND = 0.05
"""Share of measured steps that may lie beyond each end."""
LEAST = 20
"""Cases of a set in a regime, below which they are too few to be heard."""
STEP_ERRORS = "step_errors.json"
"""What ships, in the package ``sim``."""


class Reach(NamedTuple):
    """How far below and above the expected time another may lie, as logarithms from 0 on."""

    below: float
    above: float

    def around(self, seconds: float) -> tuple[float, float]:
        """Return the ends around a time."""
        return seconds * math.exp(-self.below), seconds * math.exp(self.above)

    def at_least(self, other: Reach) -> Reach:
        """Return it with ends no nearer than those of another."""
        return Reach(max(self.below, other.below), max(self.above, other.above))


class StepErrors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps that were measured on one machine."""

    title: str
    of: dict[Regime, list[float]]
    """By regime, of each case the logarithm of measured over predicted time, sorted."""
    apart: dict[Regime, list[float]] = {}
    """Of each pair of cases that differ in their schedule alone, how far these logarithms are apart, sorted; by the
    regime of the slower one."""


class Learned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What sets of measured steps taught."""

    created: str
    """Date, ISO 8601."""
    command: str
    sets: list[StepErrors]

    def without(self, title: str) -> Learned:
        """Return it without the set that is to be judged."""
        return msgspec.structs.replace(self, sets=[one for one in self.sets if one.title != title])

    def about(self, regime: Regime) -> list[list[float]]:
        """Return the errors of each set that has enough of a regime."""
        return [one.of[regime] for one in self.sets if len(one.of.get(regime, ())) >= LEAST]

    def reach(self, regime: Regime) -> Reach | None:
        """Return how far nineteen of twenty steps lie at most below and above; None where no set has enough.

        >>> halves = StepErrors(title="a", of={"host": [-0.1] * 10 + [0.5] * 10})
        >>> tenths = StepErrors(title="b", of={"host": [-0.2] * 8 + [0.1] * 80 + [0.7] * 12})
        >>> Learned(created="", command="", sets=[halves, tenths]).reach("host")
        Reach(below=0.1, above=0.7)
        """
        sets = self.about(regime)
        if not sets:
            return None
        below, above = (_quantile([[sign * error for error in some] for some in sets], BEYOND) for sign in (-1, 1))
        return Reach(max(below, 0.0), max(above, 0.0))

    def within(self, regime: Regime) -> float | None:
        """Return how far, as a logarithm, nine of ten steps lie at most from their predictions, on either side; None
        where no set has enough.

        >>> tenths = StepErrors(title="a", of={"host": [-0.2] + [0.1] * 19})
        >>> Learned(created="", command="", sets=[tenths]).within("host")
        0.1
        """
        sets = self.about(regime)
        return _quantile([[abs(error) for error in some] for some in sets], 2 * BEYOND) if sets else None

    def apart(self, regime: Regime) -> float | None:
        """Return how far, as a logarithm, the ratio of nine of ten pairs of steps that differ in their schedule alone
        was off at most; None where no set has enough of them.

        >>> tenths = StepErrors(title="a", of={}, apart={"host": [0.1] * 18 + [0.3, 0.4]})
        >>> Learned(created="", command="", sets=[tenths]).apart("host")
        0.1
        """
        sets = [one.apart[regime] for one in self.sets if len(one.apart.get(regime, ())) >= LEAST]
        return _quantile(sets, 2 * BEYOND) if sets else None


def _quantile(sets: Sequence[Sequence[float]], beyond: float) -> float:
    """Return the least value that all but a share of the weights do not exceed; every set weighs as much."""
    weighed = [(value, 1 / len(some)) for some in sets for value in some]
    total = math.fsum(weight for _, weight in weighed)
    reached = 0.0
    for value, weight in sorted(weighed):
        reached += weight
        if reached >= (1 - beyond) * total * (1 - 1e-9):
            return value
    raise AssertionError("weights above 0 reach their sum")


NOTHING = Learned(created="", command="", sets=[])


@cache
def shipped() -> Learned:
    """Return what ships."""
    data = resources.files("sim").joinpath(STEP_ERRORS).read_bytes()
    return from_json(data, Learned, STEP_ERRORS, "make evidence writes it anew")
