"""Lookup of measured times: exact at a measured point, else interpolation of the efficiency between points.

    t = fixed_s + max(flops / (e_c * peak), bytes / (e_m * bandwidth))

A series holds the points of one kernel and variant; its efficiency is taken relative to the figures of the machine that
was measured, along log(size). ``fixed_s`` is the intercept of the two smallest points. Beyond a factor of two of the
measured sizes the last efficiency is kept and the lookup says "extrapolated". A curve is that of transfers, which have
no FLOPs and whose time never falls as bytes grow.
"""

from __future__ import annotations

import bisect
import math
from statistics import median
from typing import NamedTuple, TypeVar

BEYOND_RANGE = "beyond the measured range"
"""How a note ends that says of a cost that it is extrapolated."""

Count = TypeVar("Count", bound=float)


class Figures(NamedTuple):
    """What limits a kernel or a transfer on one machine."""

    flops_per_s: float
    bytes_per_s: float
    latency_s: float = 0.0
    sms: float = 1.0


class Work(NamedTuple):
    """What is to be done, and the size by which its series is sorted."""

    flops: int
    nbytes: int
    size: float


class _Measured:
    """The sizes that were measured, and the part of the times that does not grow with them."""

    def __init__(self, sizes: list[float], fixed_s: float, measured_on: Figures) -> None:
        self._sizes = [math.log(size) for size in sizes]
        self._on = measured_on
        self.fixed_s = fixed_s

    def delay_s(self, now: Figures) -> float:
        """Return the part that does not grow with size; it scales with the latency of the machine, if that has one."""
        return self.fixed_s * (now.latency_s / self._on.latency_s if self._on.latency_s else 1.0)

    def extrapolates(self, size: float) -> bool:
        """Return whether a size lies more than a factor of two outside the measured ones."""
        at, octave = math.log(max(size, 1.0)), math.log(2) + 1e-9
        return not self._sizes[0] - octave <= at <= self._sizes[-1] + octave


class Series(_Measured):
    """Times over size, as efficiencies of the resource that bounds them."""

    def __init__(self, points: list[tuple[Work, float]], measured_on: Figures) -> None:
        ordered = sorted(points, key=lambda pair: pair[0].size)
        super().__init__([work.size for work, _ in ordered], _intercept(ordered, measured_on), measured_on)
        self._efficiency = [_ideal_s(work, measured_on) / (seconds - self.fixed_s) for work, seconds in ordered]

    def seconds(self, work: Work, now: Figures) -> float:
        """Return the time on a machine with the figures ``now``; never less than its FLOPs take at the peak.

        The term that bounds on the measured machine carries the measured efficiency, the other one has efficiency 1: so
        a measured point comes back exactly, and a figure that is scaled far enough takes over as the bound.
        """
        efficiency = self.efficiency(work.size)
        compute_s, memory_s = work.flops / now.flops_per_s, work.nbytes / now.bytes_per_s
        if work.flops * self._on.bytes_per_s >= work.nbytes * self._on.flops_per_s:
            bound_s = max(compute_s / efficiency, memory_s)
        else:
            bound_s = max(compute_s, memory_s / efficiency)
        return max(self.delay_s(now) + bound_s, compute_s)

    def efficiency(self, size: float) -> float:
        """Return the share of what bounds it that work of a size gets, without the part that does not grow."""
        return _linear(self._sizes, self._efficiency, math.log(max(size, 1.0)))


def _linear(sizes: list[float], values: list[float], at: float) -> float:
    """Return a value at log(size): linear between points, constant outside."""
    after = bisect.bisect_left(sizes, at)
    if after in {0, len(sizes)}:
        return values[min(after, len(sizes) - 1)]
    share = (at - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def _ideal_s(work: Work, on: Figures) -> float:
    """Return the time at efficiency 1."""
    return max(work.flops / on.flops_per_s, work.nbytes / on.bytes_per_s)


def _intercept(ordered: list[tuple[Work, float]], on: Figures) -> float:
    """Return what the two smallest points would take at size zero, and so much that no point takes less than it and
    its work at full rate: else that point would not come back. 0 if the second point takes no longer than the first.
    """
    if len(ordered) < 2:
        return 0.0
    (small, t0), (large, t1) = ordered[0], ordered[1]
    x0, x1 = _ideal_s(small, on), _ideal_s(large, on)
    if x1 <= x0 or t1 <= t0:
        return 0.0
    most_s = min(min(seconds - _ideal_s(work, on), 0.9 * seconds) for work, seconds in ordered)
    return max(0.0, min(t0 - (t1 - t0) / (x1 - x0) * x0, most_s))


class Curve(_Measured):
    """Times of transfers over their bytes: latency, and bytes at a share of the link's rate.

    The share is interpolated as a power of the bytes, so time grows between points as it does from one to the next.
    Below the least size the latency is kept, and the share.
    """

    def __init__(self, points: list[tuple[int, float]], measured_on: Figures, hop_s: float) -> None:
        """``measured_on`` has the latency that the part without bytes scales with, ``hop_s`` is that of one hop."""
        ordered = grown(points)
        super().__init__([nbytes for nbytes, _ in ordered], _latency_s(ordered, hop_s), measured_on)
        self._shares = [
            math.log(nbytes / measured_on.bytes_per_s / (seconds - self.fixed_s)) for nbytes, seconds in ordered
        ]

    def seconds(self, nbytes: float, now: Figures) -> float:
        """Return the time on a machine with the figures ``now``."""
        return self.delay_s(now) + nbytes / (now.bytes_per_s * self.efficiency(nbytes))

    @property
    def sizes(self) -> list[float]:
        """The bytes that were measured."""
        return [math.exp(size) for size in self._sizes]

    def bytes_per_s(self, nbytes: float) -> float:
        """Return the measured rate of so many bytes, without the latency."""
        return self._on.bytes_per_s * self.efficiency(nbytes)

    def efficiency(self, nbytes: float) -> float:
        """Return the share of the link's rate that so many bytes get, without the latency."""
        return math.exp(_linear(self._sizes, self._shares, math.log(max(nbytes, 1.0))))


def grown(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return points by bytes with times that never fall: where a larger transfer took less, the median of all that
    stand in each other's way (isotonic regression by pooling adjacent violators).
    """
    blocks: list[list[float]] = []
    ordered = sorted(points)
    for _, seconds in ordered:
        blocks.append([seconds])
        while len(blocks) > 1 and median(blocks[-2]) > median(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    times = (median(block) for block in blocks for _ in block)
    return [(nbytes, seconds) for (nbytes, _), seconds in zip(ordered, times, strict=True)]


def _latency_s(ordered: list[tuple[int, float]], hop_s: float) -> float:
    """Return what the two smallest transfers would take without bytes: one hop at least, and nine tenths of the least
    time at most, as where the second takes no longer than the first.
    """
    (small, t0), (large, t1) = ordered[0], ordered[min(1, len(ordered) - 1)]
    at_zero_s = t0 - (t1 - t0) * small / (large - small) if large > small else 0.0
    return min(max(at_zero_s, hop_s), 0.9 * t0)


def between(measured: list[Count], wanted: float) -> tuple[Count, Count, float]:
    """Return the measured counts below and above a wanted one (its nearest twice outside), and how far up it is."""
    above = min(bisect.bisect_left(measured, wanted), len(measured) - 1)
    below = above if measured[above] <= wanted else max(above - 1, 0)
    if below == above:
        return measured[below], measured[above], 0.0
    share = math.log(wanted / measured[below]) / math.log(measured[above] / measured[below])
    return measured[below], measured[above], min(max(share, 0.0), 1.0)
