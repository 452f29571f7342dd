"""What seconds of load make of kernel times: a GPU at its power limit lowers its clock. Points are of short runs.

A short run of short kernels ends before that; one of long kernels does not. So the factor fades in between kernels too
small to reach the limit and those that do, and fades out towards those that lower the clock themselves. Few points are
of kernels so long: under load they get no more than the rate held, whatever shorter points of their shape say. What
another power limit makes of a kernel fades in alike.
"""

from __future__ import annotations

import math

from sim.schedule.derive.kernels import KernelUse
from sim.words.profile import Profile, Sustained


class Load:
    """The rates of one profile under load; ``measured_w`` is the power limit of its machine, where that is known."""

    def __init__(self, profile: Profile, measured_w: float | None) -> None:
        self._sustained, self._power, self._bound = profile.sustained, profile.power, profile.bound
        self._of_sustained = profile.rates == "sustained"
        self._measured_w = measured_w

    def longer(self, use: KernelUse, seconds: float, at_peak_s: float, power_w: float | None) -> float:
        """Return how many times as long a kernel that FLOPs bound takes on a GPU of a power limit as in a short run on
        the machine that was measured, where it takes so many seconds, and would take ``at_peak_s`` of them at the peak.
        """
        known = self._sustained.get(use.kernel)
        if known is None:
            return 1.0
        reaches = _share(seconds, *known.rises_s)
        fresh = 1 - _share(seconds, *known.falls_s)
        sustained = self._of_sustained
        bound, longer = self._bound, known.longer
        if bound == "low":
            sustained = False  # waits and other kernels may rest the GPU so much that it keeps its clock
        elif bound == "high":
            sustained, longer = True, known.high
        clock = max(self._slower(power_w), 1 / known.longer)  # no faster than in short runs
        if sustained:
            factor = math.pow(longer, fresh) * math.pow(self._held(known, at_peak_s / seconds), 1 - fresh) * clock
        else:
            factor = math.pow(clock, 1 - fresh)
        return math.pow(factor, reaches)

    def _held(self, known: Sustained, share: float) -> float:
        """Return how many times as long a kernel takes at the rate held as at a share of the peak, 1 at least."""
        if known.held is None:
            return 1.0
        most = {"low": known.held.high, "high": known.held.low, None: known.held.share}[self._bound]
        return max(share / most, 1.0)

    def limited(self, use: KernelUse, seconds: float) -> float:
        """Return how far a kernel of so many seconds in a short run reaches the power limit, from 0 to 1; 0 where rates
        are those of short runs.
        """
        known = self._sustained.get(use.kernel)
        loaded = {"low": False, "high": True, None: self._of_sustained}[self._bound]
        return _share(seconds, *known.rises_s) if loaded and known is not None and known.longer > 1 else 0.0

    def note(self, power_w: float | None) -> str:
        """Return what has to be said of another power limit than the measured one; empty where it is that."""
        law, measured_w = self._power, self._measured_w
        if power_w is None or measured_w is None or power_w == measured_w:
            return ""
        limit = f"gpu.power_w {power_w:g}, measured at {measured_w:g} W"
        if law is None:
            return f"{limit}: the profile does not say how rates follow it, they stay"
        how = f"rates follow its power of {law.exponent:g} ({law.low:g} to {law.high:g})"
        if law.from_w <= power_w <= law.to_w:
            return f"{limit}: {how}"
        return f"{limit}: {how}, which sources show for {law.from_w:g} to {law.to_w:g} W only"

    def _slower(self, power_w: float | None) -> float:
        """Return how many times as long a kernel at the power limit takes as on the measured machine."""
        law, measured_w = self._power, self._measured_w
        if law is None or power_w is None or measured_w is None:
            return 1.0
        exponents = (law.low, law.exponent, law.high)
        if self._bound is None:
            exponent = law.exponent
        else:
            of_time = [math.pow(measured_w / power_w, exponent) for exponent in exponents]
            return min(of_time) if self._bound == "low" else max(of_time)
        return math.pow(measured_w / power_w, exponent)


def _share(seconds: float, none_s: float, all_s: float) -> float:
    """Return how far a time lies between two, on a logarithmic scale: 0 up to the first, 1 from the second on."""
    return min(max(math.log(seconds / none_s) / math.log(all_s / none_s), 0.0), 1.0)
