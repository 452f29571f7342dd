"""Lookup of measured times of communication: by kind, link and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from statistics import geometric_mean

from sim.engine.series import Curve, Figures, between
from sim.profile import TRANSFERS, Point, Profile


class TransferTable:
    """All measured points of communication of one profile, by kind, link and number of ranks."""

    def __init__(self, profile: Profile, figures: Callable[[str], Figures]) -> None:
        """``figures`` are those of a kind of link, or of the only one if that is empty."""
        self._series: dict[tuple[str, str], dict[int, Curve]] = {}
        grouped: dict[tuple[str, str], dict[int, dict[int, Point]]] = {}
        for point in profile.points:
            if point.kernel in TRANSFERS and point.condition == "idle":
                by_ranks = grouped.setdefault((point.kernel, point.variant), {})
                by_ranks.setdefault(point.shape[0], {})[point.nbytes] = point
        for (kernel, link), by_ranks in grouped.items():
            self._series[kernel, link] = {
                ranks: Curve([(nbytes, point.mean_s) for nbytes, point in points.items()], figures(link))
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
        below, above, share = between(sorted(by_ranks), ranks)
        times = []
        for count in (below, above):
            curve = by_ranks[count]
            times.append((curve.delay_s(now), curve.seconds(nbytes, now)))
        delay_s, total_s = (a + share * (b - a) for a, b in zip(*times, strict=True))
        beyond = by_ranks[below].extrapolates(nbytes) or not below / 2 <= ranks <= 2 * above
        note = f"{kernel} of {round(nbytes)} bytes among {ranks} ranks: beyond the measured range" if beyond else ""
        return min(delay_s, total_s), total_s, note

    def efficiency(self, link: str, nbytes: float) -> tuple[float, str]:
        """Return the share of a link's rate that a kind of communication gets which was not measured over it, and what
        to call that rate: the geometric mean of the kinds that were.
        """
        kinds = {kernel: by_ranks for (kernel, of), by_ranks in self._series.items() if of in {link, ""}}
        if not kinds:
            return 1.0, "datasheet rate"
        shares = [
            geometric_mean(curve.efficiency(nbytes) for curve in by_ranks.values()) for by_ranks in kinds.values()
        ]
        return min(geometric_mean(shares), 1.0), f"efficiency of {' and '.join(sorted(kinds))}"
