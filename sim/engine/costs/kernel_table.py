"""Lookup of measured times of kernels: of the same shape, of the nearest one, or of attention's tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from sim.engine.costs.load import Load
from sim.engine.costs.series import Figures, Series, Work, between
from sim.engine.costs.tiles import TiledAttention, beyond_range
from sim.schedule.derive.kernels import ATTENTION_KERNELS, KernelUse
from sim.words.profile import TRANSFERS, Point, Profile
from sim.words.workload import Dtype

_Key = tuple[str, str, Dtype]
"""A kernel, its variant and data type."""


class KernelTable:
    """All measured points of the kernels of one profile."""

    def __init__(
        self, profile: Profile, figures: Callable[[Dtype], Figures], sms: float, power_w: float | None = None
    ) -> None:
        self._figures = figures
        self._forms, self._bound, self._beyond = profile.forms, profile.bound, profile.beyond
        self.load = Load(profile, power_w)
        self._nearest_row = cache(self._find_nearest_row)
        self._tiled = TiledAttention(profile.tiles, profile.points, sms)
        self._series, self._longest = cache(self._find_series), cache(self._find_longest)
        grouped: dict[_Key, dict[tuple[float, ...], dict[tuple[int, ...], Point]]] = {}
        for point in profile.points:
            if point.condition == "idle" and point.kernel not in TRANSFERS:
                rows = grouped.setdefault((point.kernel, point.variant, point.dtype), {})
                rows.setdefault(series_row(point.kernel, point.shape), {})[point.shape] = point
        self._points = grouped
        self._on = {dtype: figures(dtype) for _, _, dtype in grouped}

    def _find_series(self, key: _Key) -> dict[tuple[float, ...], Series]:
        """Return the series of a kernel that was measured."""
        return {
            row: Series(
                [(Work(p.flops, p.nbytes, series_size(p.kernel, p.shape)), p.median_s) for p in points.values()],
                self._on[key[2]],
            )
            for row, points in self._points[key].items()
        }

    def _find_longest(self, key: _Key) -> float:
        """Return the largest size that was measured of a kernel."""
        return max(series_size(key[0], shape) for points in self._points[key].values() for shape in points)

    def seconds(self, use: KernelUse, now: Figures, power_w: float | None = None) -> tuple[float, str] | None:
        """Return the time of a kernel on a GPU of a power limit, and a note where it was extrapolated (else ""); None
        if nothing like it was measured.
        """
        found = self._in_short_runs(use, now)
        if found is None or use.flops * now.bytes_per_s < use.hbm_bytes * now.flops_per_s:
            return found
        at_peak_s = use.flops / now.flops_per_s
        seconds = found[0] * self.load.longer(use, found[0], at_peak_s * self._formed(use), power_w)
        return max(seconds, at_peak_s), found[1]

    def _in_short_runs(self, use: KernelUse, now: Figures) -> tuple[float, str] | None:
        """Return the time of a kernel as in the runs that points are of. A causal block of more keys than queries is a
        block that all queries see, and a square.
        """
        if use.fused_attention:
            on = self._figures(use.dtype)
            faster = now.flops_per_s / now.sms / (on.flops_per_s / on.sms)
            tiled = self._tiled.seconds(use, now.sms, faster)
            if tiled:
                seconds = tiled.seconds * self._widened(use.kernel, tiled.doublings)
                return max(seconds, use.flops / now.flops_per_s, use.hbm_bytes / now.bytes_per_s), tiled.note
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
        rows = self._series(key)
        wanted, size = series_row(use.kernel, use.shape), series_size(use.kernel, use.shape)
        if use.kernel not in ATTENTION_KERNELS:
            row = self._nearest_row(key, wanted)
            if row != wanted and not note:
                note = f"{use.kernel} {'x'.join(map(str, wanted))}: efficiency of {'x'.join(map(str, row))}"
            series = rows[row]
            seconds = series.seconds(Work(use.flops, use.hbm_bytes, size), now) * self._formed(use)
            return seconds, note or _beyond(use, series, size)
        heads, head_dim, aspect = wanted
        dims = min((dim for _, dim, _ in rows), key=lambda dim: (abs(math.log(dim / head_dim)), dim))
        if dims != head_dim and not note:
            note = f"{use.kernel} of head dim {head_dim}: efficiency of head dim {dims}"
        like = min((ratio for _, dim, ratio in rows if dim == dims), key=lambda r: (abs(math.log(r / aspect)), r))
        measured = sorted(count for count, dim, ratio in rows if (dim, ratio) == (dims, like))
        below, above, share = between(measured, heads)
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
        seconds *= self._widened(use.kernel, math.log2(max(size / self._longest(key), 1.0)))
        return max(seconds, use.flops / now.flops_per_s), note

    def _formed(self, use: KernelUse) -> float:
        """Return how many times as long a kernel takes as the points that speak for it, where those are of another
        variant.
        """
        form = None if self._has_points(use) else self._forms.get(_form(use))
        if form is None:
            return 1.0
        bound = self._bound
        return form.low if bound == "low" else form.high if bound == "high" else form.longer

    def _has_points(self, use: KernelUse) -> bool:
        return (use.kernel, use.variant, use.dtype) in self._points

    def _widened(self, kernel: str, doublings: float) -> float:
        """Return the factor that bounds a kernel so many doublings longer than the longest point: 1 where no bound is
        asked for.
        """
        if self._bound is None:
            return 1.0
        factor = math.pow(self._beyond.get(kernel, 1.0), drift(doublings))
        return factor if self._bound == "high" else 1 / factor

    def _find_nearest_row(self, key: _Key, wanted: tuple[float, ...]) -> tuple[float, ...]:
        """Return which series of a kernel is closest to a wanted one."""
        return min(self._points[key], key=lambda row: (_distance(row, wanted), row))

    def _nearest(self, use: KernelUse) -> tuple[_Key | None, str]:
        """Return the measured kernel closest to this one, and a note if it is another variant or data type."""
        exact = (use.kernel, use.variant, use.dtype)
        if self._has_points(use):
            return exact, ""
        plain = (use.kernel, "", use.dtype)
        if plain in self._points and _form(use) in self._forms:
            return plain, ""
        like = sorted(key for key in self._points if key[0] == use.kernel)
        if not like:
            return None, ""
        key = min(like, key=lambda k: (k[2] != use.dtype, k[1] != use.variant, k))
        words = (use.kernel, use.variant, use.dtype), (use.kernel, *key[1:])
        return key, ": efficiency of ".join(" ".join(filter(None, some)) for some in words)


def drift(doublings: float) -> float:
    """Return how far off a length so many doublings beyond the longest point is, in units of the error at one.

    Each doubling adds half as much as the one before: what a kernel does besides its pairs of tiles becomes a share
    half as large. Points of H100 and A800 that are predicted over one, two and three doublings bear it out: 9, 17 and
    20 %, and 25, 37 and 40 %.
    """
    return 2 * (1 - math.pow(2, -doublings))


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


def _form(use: KernelUse) -> str:
    """Return what a kernel is called among the forms of a profile."""
    return f"{use.kernel} {use.variant}"


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
    return beyond_range(use, size) if series.extrapolates(size) else ""
