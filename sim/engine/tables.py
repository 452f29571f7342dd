"""Lookup of measured times: exact at a measured point, else interpolation of the efficiency between points.

    t = fixed_s + max(flops / (e_c * peak), bytes / (e_m * bandwidth))

A series holds the points of one kernel and variant; its efficiency is taken relative to the figures of the machine that
was measured, along log(size). ``fixed_s`` is the intercept of the two smallest points. Beyond a factor of two of the
measured sizes the last efficiency is kept and the lookup says "extrapolated".
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from functools import cache
from statistics import geometric_mean
from typing import NamedTuple, TypeVar

from sim.engine.tiles import TiledAttention
from sim.profile import TRANSFERS, Point, Profile
from sim.schedule.derive.kernels import ATTENTION_KERNELS, KernelUse
from sim.workload import Dtype

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


class Series:
    """Times over size, as efficiencies of the resource that bounds them."""

    def __init__(self, points: list[tuple[Work, float]], measured_on: Figures) -> None:
        ordered = sorted(points, key=lambda pair: pair[0].size)
        self._on = measured_on
        self._sizes = [math.log(work.size) for work, _ in ordered]
        self.fixed_s = _intercept(ordered, measured_on)
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

    def delay_s(self, now: Figures) -> float:
        """Return the part that does not grow with size; it scales with the latency of the machine, if that has one."""
        return self.fixed_s * (now.latency_s / self._on.latency_s if self._on.latency_s else 1.0)

    def efficiency(self, size: float) -> float:
        """Return the share of what bounds it that work of a size gets, without the part that does not grow."""
        return self._at(math.log(max(size, 1.0)))

    def extrapolates(self, size: float) -> bool:
        """Return whether a size lies more than a factor of two outside the measured ones."""
        at = math.log(size)
        return not self._sizes[0] - math.log(2) - 1e-9 <= at <= self._sizes[-1] + math.log(2) + 1e-9

    def _at(self, position: float) -> float:
        """Return the efficiency at log(size): linear between points, constant outside."""
        sizes, values = self._sizes, self._efficiency
        after = bisect.bisect_left(sizes, position)
        if after in {0, len(sizes)}:
            return values[min(after, len(sizes) - 1)]
        share = (position - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return values[after - 1] + share * (values[after] - values[after - 1])


def _ideal_s(work: Work, on: Figures) -> float:
    """Return the time at efficiency 1."""
    return max(work.flops / on.flops_per_s, work.nbytes / on.bytes_per_s)


def _intercept(ordered: list[tuple[Work, float]], on: Figures) -> float:
    """Return what the two smallest points would take at size zero, between 0 and nine tenths of the least time."""
    if len(ordered) < 2:
        return 0.0
    (small, t0), (large, t1) = ordered[0], ordered[1]
    x0, x1 = _ideal_s(small, on), _ideal_s(large, on)
    slope = (t1 - t0) / (x1 - x0) if x1 > x0 else 0.0
    return min(max(0.0, t0 - slope * x0), 0.9 * min(seconds for _, seconds in ordered))


class KernelTable:
    """All measured points of the kernels of one profile."""

    def __init__(self, profile: Profile, figures: Callable[[Dtype], Figures], sms: float) -> None:
        self._figures = figures
        self._nearest_row = cache(self._find_nearest_row)
        self._tiled = TiledAttention(profile.tiles, profile.points, sms)
        self._series: dict[tuple[str, str, Dtype], dict[tuple[float, ...], Series]] = {}
        grouped: dict[tuple[str, str, Dtype], dict[tuple[float, ...], dict[tuple[int, ...], Point]]] = {}
        for point in profile.points:
            if point.condition == "idle" and point.kernel not in TRANSFERS:
                rows = grouped.setdefault((point.kernel, point.variant, point.dtype), {})
                rows.setdefault(series_row(point.kernel, point.shape), {})[point.shape] = point
        for key, rows in grouped.items():
            self._series[key] = {
                row: Series(
                    [(Work(p.flops, p.nbytes, series_size(p.kernel, p.shape)), p.median_s) for p in points.values()],
                    figures(key[2]),
                )
                for row, points in rows.items()
            }

    def seconds(self, use: KernelUse, now: Figures) -> tuple[float, str] | None:
        """Return the time of a kernel and a note where it was extrapolated (else ""); None if nothing like it was
        measured. A causal block of more keys than queries is a block that all queries see, and a square.
        """
        if use.fused_attention:
            on = self._figures(use.dtype)
            faster = now.flops_per_s / now.sms / (on.flops_per_s / on.sms)
            tiled = self._tiled.seconds(use, now.sms, faster)
            if tiled:
                return max(tiled[0], use.flops / now.flops_per_s, use.hbm_bytes / now.bytes_per_s), tiled[1]
        pieces = [self._seconds(piece, now) for piece in _squared(use)]
        found = [piece for piece in pieces if piece is not None]
        if len(found) < len(pieces):
            return None
        return sum(seconds for seconds, _ in found), next((note for _, note in found if note), "")

    def _seconds(self, use: KernelUse, now: Figures) -> tuple[float, str] | None:
        """Return the time of a kernel that has points of its own shape, with a note as in ``seconds``."""
        key, note = self._nearest(use)
        if key is None:
            return None
        rows = self._series[key]
        wanted, size = series_row(use.kernel, use.shape), series_size(use.kernel, use.shape)
        if use.kernel not in ATTENTION_KERNELS:
            row = self._nearest_row(key, wanted)
            if row != wanted and not note:
                note = f"{use.kernel} {'x'.join(map(str, wanted))}: efficiency of {'x'.join(map(str, row))}"
            series = rows[row]
            return series.seconds(Work(use.flops, use.hbm_bytes, size), now), note or _beyond(use, series, size)
        heads, head_dim, aspect = wanted
        dims = min((dim for _, dim, _ in rows), key=lambda dim: (abs(math.log(dim / head_dim)), dim))
        if dims != head_dim and not note:
            note = f"{use.kernel} of head dim {head_dim}: efficiency of head dim {dims}"
        like = min((ratio for _, dim, ratio in rows if dim == dims), key=lambda r: (abs(math.log(r / aspect)), r))
        measured = sorted(count for count, dim, ratio in rows if (dim, ratio) == (dims, like))
        below, above, share = _between(measured, heads)
        if not measured[0] / 2 <= heads <= 2 * measured[-1]:
            note = note or f"{use.kernel} of {heads} heads: measured were {measured[0]} to {measured[-1]}"
        parts = []
        for count in (below, above):
            series = rows[count, dims, like]
            work = Work(round(use.flops * count / heads), round(use.hbm_bytes * count / heads), size)
            delay_s = series.delay_s(now)
            parts.append((delay_s, (series.seconds(work, now) - delay_s) / count))
            note = note or _beyond(use, series, size)
        delay_s, per_head_s = (a + share * (b - a) for a, b in zip(*parts, strict=True))
        seconds = delay_s + heads * per_head_s
        return max(seconds, use.flops / now.flops_per_s), note

    def _find_nearest_row(self, key: tuple[str, str, Dtype], wanted: tuple[float, ...]) -> tuple[float, ...]:
        """Return which series of a kernel is closest to a wanted one."""
        return min(self._series[key], key=lambda row: (_distance(row, wanted), row))

    def _nearest(self, use: KernelUse) -> tuple[tuple[str, str, Dtype] | None, str]:
        """Return the measured kernel closest to this one, and a note if it is another variant or data type."""
        exact = (use.kernel, use.variant, use.dtype)
        if exact in self._series:
            return exact, ""
        like = sorted(key for key in self._series if key[0] == use.kernel)
        if not like:
            return None, ""
        key = min(like, key=lambda k: (k[2] != use.dtype, k[1] != use.variant, k))
        words = (use.kernel, use.variant, use.dtype), (use.kernel, *key[1:])
        return key, ": efficiency of ".join(" ".join(filter(None, some)) for some in words)


def _squared(use: KernelUse) -> list[KernelUse]:
    """Return what a kernel consists of: of a causal block of more keys than queries the full and the square part."""
    if use.kernel not in ATTENTION_KERNELS or use.variant != "causal" or use.shape[1] == use.shape[2]:
        return [use]
    batch, queries, keys, *heads = use.shape
    full, square = queries * (keys - queries), queries * (queries + 1) // 2
    flops, nbytes = use.flops * full // (full + square), use.hbm_bytes * (keys - queries) // keys
    return [
        use._replace(variant="full", shape=(batch, queries, keys - queries, *heads), flops=flops, hbm_bytes=nbytes),
        use._replace(
            shape=(batch, queries, queries, *heads), flops=use.flops - flops, hbm_bytes=use.hbm_bytes - nbytes
        ),
    ]


class TransferTable:
    """All measured points of communication of one profile, by kind, link and number of ranks."""

    def __init__(self, profile: Profile, figures: Callable[[str], Figures]) -> None:
        """``figures`` are those of a kind of link, or of the only one if that is empty."""
        self._series: dict[tuple[str, str], dict[int, Series]] = {}
        grouped: dict[tuple[str, str], dict[int, dict[int, Point]]] = {}
        for point in profile.points:
            if point.kernel in TRANSFERS and point.condition == "idle":
                by_ranks = grouped.setdefault((point.kernel, point.variant), {})
                by_ranks.setdefault(point.shape[0], {})[point.nbytes] = point
        for (kernel, link), by_ranks in grouped.items():
            self._series[kernel, link] = {
                ranks: Series([(Work(0, n, float(n)), p.mean_s) for n, p in points.items()], figures(link))
                for ranks, points in by_ranks.items()
            }

    def seconds(
        self, kernel: str, link: str, ranks: int, nbytes: float, now: Figures
    ) -> tuple[float, float, str] | None:
        """Return (latency part, whole time, note) of a transfer that puts ``nbytes`` on its slowest link, between the
        measured numbers of ranks in proportion to the logarithm; None if nothing like it was measured.
        """
        by_ranks = self._series.get((kernel, link), self._series.get((kernel, "")))
        if by_ranks is None:
            return None
        below, above, share = _between(sorted(by_ranks), ranks)
        work = Work(0, round(nbytes), max(nbytes, 1.0))
        times = []
        for count in (below, above):
            series = by_ranks[count]
            times.append((series.delay_s(now), series.seconds(work, now)))
        delay_s, total_s = (a + share * (b - a) for a, b in zip(*times, strict=True))
        beyond = by_ranks[below].extrapolates(work.size) or not below / 2 <= ranks <= 2 * above
        note = f"{kernel} of {work.nbytes} bytes among {ranks} ranks: beyond the measured range" if beyond else ""
        return min(delay_s, total_s), total_s, note

    def efficiency(self, link: str, nbytes: float) -> tuple[float, str]:
        """Return the share of a link's rate that a kind of communication gets which was not measured over it, and what
        to call that rate: the geometric mean of the kinds that were.
        """
        kinds = {kernel: by_ranks for (kernel, of), by_ranks in self._series.items() if of in {link, ""}}
        if not kinds:
            return 1.0, "datasheet rate"
        shares = [
            geometric_mean(series.efficiency(nbytes) for series in by_ranks.values()) for by_ranks in kinds.values()
        ]
        return min(geometric_mean(shares), 1.0), f"efficiency of {' and '.join(sorted(kinds))}"


def _between(measured: list[Count], wanted: float) -> tuple[Count, Count, float]:
    """Return the measured counts below and above a wanted one (its nearest twice outside), and how far up it is."""
    above = min(bisect.bisect_left(measured, wanted), len(measured) - 1)
    below = above if measured[above] <= wanted else max(above - 1, 0)
    if below == above:
        return measured[below], measured[above], 0.0
    share = math.log(wanted / measured[below]) / math.log(measured[above] / measured[below])
    return measured[below], measured[above], min(max(share, 0.0), 1.0)


def series_row(kernel: str, shape: tuple[int, ...]) -> tuple[float, ...]:
    """Return what selects a series among the points of a kernel: attention (batch x heads, head dim, queries over
    keys), gemm (fan in, fan out).
    """
    if kernel in ATTENTION_KERNELS:
        return (shape[0] * shape[3], shape[5], shape[1] / shape[2])
    return shape[1:] if kernel == "gemm" else ()


def _distance(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Return how far two rows are apart, in factors."""
    return sum(abs(math.log(x / y)) for x, y in zip(a, b, strict=True))


def series_size(kernel: str, shape: tuple[int, ...]) -> float:
    """Return the size along which a series runs: attention the mean length of queries and keys, gemm tokens, others
    elements.
    """
    return math.sqrt(shape[1] * shape[2]) if kernel in ATTENTION_KERNELS else float(shape[0])


def _beyond(use: KernelUse, series: Series, size: float) -> str:
    """Return the note for a size that was not measured, empty if it was."""
    return (
        f"{' '.join(filter(None, (use.kernel, use.variant)))} of size {size:.0f}: beyond the measured range"
        if series.extrapolates(size)
        else ""
    )
