"""How many times as long one step takes as another, and whether the two can be told apart."""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.engine.intervals.interval import bounds
from sim.engine.intervals.learned import Learned, shipped
from sim.engine.intervals.regime import regime
from sim.engine.play.simulate import Simulation


class Ratio(NamedTuple):
    """One time over another, with its 90 % interval."""

    expected: float
    low: float
    high: float

    @property
    def tied(self) -> bool:
        """Whether either may be the faster one."""
        return self.low <= 1 <= self.high


def difference(one: Simulation, other: Simulation, learned: Learned | None = None) -> Ratio | None:
    """Return one step time over another with the interval of the ratio; None where nothing is known of how far ratios
    are off, as without a profile.

    It reaches at least as far as ratios of measured steps were off that differ in their schedule alone: by default of
    the steps that ship, in the regime of the slower one. Both rest on the same costs, so that these are at the same end
    for both: what is off for both alike cancels.
    """
    if one.profile is None or other.profile is None:
        return None
    expected = math.log(one.trace.step_time_s / other.trace.step_time_s)
    apart = (learned or shipped()).apart(regime(one if expected > 0 else other))
    if apart is None:
        return None
    ends = zip(bounds(one, "sources"), bounds(other, "sources"), strict=True)
    logs = [math.log(mine.step_time_s / its.step_time_s) for mine, its in ends]
    logs += [expected - apart, expected + apart]
    return Ratio(math.exp(expected), math.exp(min(logs)), math.exp(max(logs)))
