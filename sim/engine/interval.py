"""The 90 % interval of a step: the step simulated again with all costs at their bounds."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from sim.breakdown import critical_rank, overlapped_s
from sim.engine.simulate import Simulation, simulate
from sim.kept import kept
from sim.profile import Bound, Profile
from sim.trace import Trace

_BOUNDS: tuple[Bound, Bound] = ("low", "high")


class Interval(NamedTuple):
    """Of a step time, in seconds."""

    low_s: float
    high_s: float


def interval(simulation: Simulation) -> Interval | None:
    """Return the interval of a simulated step; None where nothing is known of how far its costs may be off.

    Its ends are those of ``bounds``, and as far beyond as the fastest and the slowest seed are from the median; at the
    upper one kernels during communication take as much longer as ``profile.beside_communication`` says.
    """
    profile, traces = simulation.profile, bounds(simulation)
    if profile is None or traces is None:
        return None
    low, high = traces
    longer_s = (profile.beside_communication - 1) * overlapped_s(high, critical_rank(high))
    step_s, seeds_s = simulation.trace.step_time_s, simulation.step_times_s
    low_s, high_s = min(low.step_time_s, step_s), max(high.step_time_s + longer_s, step_s)
    return Interval(low_s - (step_s - seeds_s[0]), high_s + (seeds_s[-1] - step_s))


def bounds(simulation: Simulation) -> tuple[Trace, Trace] | None:
    """Return the step, simulated with all points at their lower and at their upper bounds; None as ``interval``.

    All points of a kernel move together, as they do where a table was made at another clock or by another version: to
    where one of twenty leave-one-out predictions lies beyond, and as far as sources disagree. At the lower bound
    kernels have the rates of short runs, at the upper one those under load. Attention longer than any that was measured
    moves by ``profile.beyond`` as well. The host takes as much less or more for each call and kernel as the profile
    says.
    """
    checked, cluster, profile, noise = simulation.checked, simulation.cluster, simulation.profile, simulation.noise
    if profile is None or not profile.residuals:
        return None
    low, high = (
        simulate(checked, cluster, bounded, noise, engine=simulation.engine).trace for bounded in _bounded(profile)
    )
    return low, high


@kept
def _bounded(profile: Profile) -> tuple[Profile, Profile]:
    """Return a profile with all points at their lower bounds, and at their upper ones."""
    low, high = (_scaled(profile, bound) for bound in _BOUNDS)
    return low, high


def _scaled(profile: Profile, bound: Bound) -> Profile:
    """Return a profile with points and host times at one of their bounds; kernels without points are not scaled."""
    factors = {kernel: getattr(spread, bound) for kernel, spread in profile.residuals.items()}
    return msgspec.structs.replace(
        profile,
        bound=bound,
        points=tuple(
            msgspec.structs.replace(point, median_s=point.median_s * factor, mean_s=point.mean_s * factor)
            for point in profile.points
            for factor in (factors.get(point.kernel, 1.0),)
        ),
        issue={
            name: msgspec.structs.replace(issue, host_s=issue.host_s * (getattr(profile.host, bound, 1.0)))
            for name, issue in profile.issue.items()
        },
    )
