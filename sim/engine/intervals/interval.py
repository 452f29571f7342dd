"""The 90 % interval of a step: as far as sources allow its costs to be, and no less than measured steps were off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import msgspec

from sim.accounts.breakdown import critical_rank, overlapped_s
from sim.accounts.trace import Trace
from sim.base.kept import kept
from sim.engine.costs.measured import measured_cluster
from sim.engine.intervals.learned import Learned, Reach, shipped
from sim.engine.intervals.regime import regime
from sim.engine.play.simulate import Simulation, simulate
from sim.words.profile import Bound, Profile

_BOUNDS: tuple[Bound, Bound] = ("low", "high")

By = Literal["sources", "points"]
"""How far apart sources are; or also how far points are from what the others of their profile predict."""


class Interval(NamedTuple):
    """Of a step time, in seconds."""

    low_s: float
    high_s: float


def interval(simulation: Simulation, learned: Learned | None = None) -> Interval | None:
    """Return the interval of a simulated step; None where nothing is known of how far its costs may be off.

    It reaches as far as sources allow, and at least as far as measured steps of the same regime were off: by default
    those that ship. Where too few of that regime were measured, how far a profile's points are from each other stands
    in.
    """
    profile, expected_s = simulation.profile, simulation.trace.step_time_s
    if profile is None:
        return None
    steps = (learned or shipped()).reach(regime(simulation))
    if steps is not None:
        return Interval(*reach(simulation, "sources").at_least(steps).around(expected_s))
    return Interval(*reach(simulation, "points").around(expected_s)) if profile.residuals else None


def reach(simulation: Simulation, by: By, seconds: Callable[[Trace], float] | None = None) -> Reach:
    """Return how far a step, or what else ``seconds`` reads off a trace, lies from where ``bounds`` puts it.

    A step reaches as far beyond as the fastest and the slowest seed are from the median. By points, kernels during
    communication take at the upper end as much longer as ``profile.beside_communication`` says; measured steps have
    that in them.
    """
    ends = bounds(simulation, by)
    if seconds:
        expected_s, low_s, high_s = map(seconds, (simulation.trace, *ends))
        return Reach(_log(expected_s, low_s), _log(high_s, expected_s))
    expected_s, seeds_s = simulation.trace.step_time_s, simulation.step_times_s
    longer = simulation.profile.beside_communication - 1 if simulation.profile and by == "points" else 0.0
    low_s = min(next(ends).step_time_s, expected_s) - (expected_s - seeds_s[0])
    high = next(ends)
    beside_s = longer * overlapped_s(high, critical_rank(high)) if longer else 0.0
    high_s = max(high.step_time_s + beside_s, expected_s)
    return Reach(_log(expected_s, low_s), _log(high_s + seeds_s[-1] - expected_s, expected_s))


def _log(larger_s: float, smaller_s: float) -> float:
    """Return the logarithm of a ratio, from 0 on."""
    return max(math.log(larger_s / smaller_s), 0.0) if smaller_s > 0 and larger_s > 0 else 0.0


def bounds(simulation: Simulation, by: By) -> Iterator[Trace]:
    """Yield the step, simulated with all costs at their lower and at their upper bounds.

    All points of a kernel move together, as they do where a table was made at another clock or by another version: as
    far as sources disagree, and ``by`` points to where one of twenty leave-one-out predictions lies beyond. At the
    lower bound kernels have the rates of short runs, at the upper one those under load. Attention longer than any that
    was measured moves by ``profile.beyond`` as well. The host takes as much less or more for each call and kernel as
    the profile says: from that of the faster source, idle, to that of the slower one, busy.
    """
    checked, cluster, profile, noise = simulation.checked, simulation.cluster, simulation.profile, simulation.noise
    assert profile is not None
    ends = _by_sources(profile) if by == "sources" else _by_points(profile)
    return (simulate(checked, cluster, end, noise, engine=simulation.engine).trace for end in ends)


@kept
def _by_sources(profile: Profile) -> tuple[Profile, Profile]:
    apart = profile.disagreement
    return (
        _scaled(profile, "low", {kernel: 1 / factor for kernel, factor in apart.items()}),
        _scaled(profile, "high", apart),
    )


@kept
def _by_points(profile: Profile) -> tuple[Profile, Profile]:
    low, high = (
        _scaled(profile, bound, {kernel: getattr(spread, bound) for kernel, spread in profile.residuals.items()})
        for bound in _BOUNDS
    )
    return low, high


def _scaled(profile: Profile, bound: Bound, factors: dict[str, float]) -> Profile:
    """Return a profile with points and host times at one of their bounds; kernels without points are not scaled. The
    host's bounds are of all that it does for an op, its launch included.
    """
    longer, launch_s = getattr(profile.host, bound, 1.0), measured_cluster(profile).gpu.launch_s
    return msgspec.structs.replace(
        profile,
        bound=bound,
        points=tuple(
            msgspec.structs.replace(point, median_s=point.median_s * factor, mean_s=point.mean_s * factor)
            for point in profile.points
            for factor in (factors.get(point.kernel, 1.0),)
        ),
        issue={
            name: msgspec.structs.replace(
                issue, host_s=max(issue.host_s * longer + issue.launches * launch_s * (longer - 1), 0.0)
            )
            for name, issue in profile.issue.items()
        },
        eager=profile.eager and profile.eager.times(longer),
        check_s=profile.check_s * longer,
        replayed_s=profile.replayed_s and profile.replayed_s * getattr(profile.replayed, bound, 1.0),
    )
