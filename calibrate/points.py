"""Points of profiles: what was measured, how large that is, what a profile, which may be another, says of it, and the
figures that come of the points.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import Literal, NamedTuple

from sim.engine.cost import CostModel, link_figures, measured_cluster
from sim.engine.tables import TransferTable, series_size
from sim.engine.tiles import use_of
from sim.profile import HOST_COPIES, TRANSFERS, Issue, Point, Profile
from topology.cluster import Cluster
from topology.specs import ClusterSpec

Basis = Literal["measured", "interpolated", "borrowed", "extrapolated", "roofline"]
"""What a prediction of a point is made of: the same point; its neighbours; what is like it but of another variant, data
type or shape; sizes of which it is less than half or more than twice; or no point of its kernel.
"""
_ONE_STEP = ("exchange", *HOST_COPIES)
"""Transfers whose time without points follows from rate and latency of their link alone."""


class Predicted(NamedTuple):
    """What a profile says of a point."""

    seconds: float
    basis: Basis


def measured_s(point: Point) -> float:
    """Return what a point is predicted by, in seconds."""
    return point.mean_s if point.kernel in TRANSFERS else point.median_s


def size_of(point: Point) -> float:
    """Return the size along which a point is interpolated."""
    return float(point.nbytes) if point.kernel in TRANSFERS else series_size(point.kernel, point.shape)


class Predictor:
    """What one profile says of points of a machine: by default of the one that it was measured on."""

    def __init__(self, profile: Profile, spec: ClusterSpec | None = None) -> None:
        self._profile = profile
        self._cluster = Cluster(spec or measured_cluster(profile))

    def predicted(self, point: Point) -> Predicted | None:
        """Return what the profile says of a point, None where that is nothing; raises InputError where the machine has
        no such link or data type.
        """
        found = self._transfer(point) if point.kernel in TRANSFERS else self._kernel(point)
        return Predicted(found[0], self._basis(point, found[1])) if found else None

    def _kernel(self, point: Point) -> tuple[float, str]:
        return self._cost.kernel_seconds(0, use_of(point))

    def _transfer(self, point: Point) -> tuple[float, str] | None:
        link, now = point.variant, link_figures(self._cluster)(point.variant)
        found = self._transfers.seconds(point.kernel, link, point.shape[0], point.nbytes, now)
        if found:
            return found[1:]
        if point.kernel not in _ONE_STEP:
            return None
        efficiency, whose = self._transfers.efficiency(link, point.nbytes)
        return now.latency_s + point.nbytes / (efficiency * now.bytes_per_s), whose

    def _basis(self, point: Point, note: str) -> Basis:
        """Return what a prediction is made of, which the lookup has this to say of."""
        of_kernel = self._known[point.kernel]
        like = [one for one in of_kernel if (one.variant, one.dtype) == (point.variant, point.dtype)]
        sizes = [size_of(one) for one in like or of_kernel]
        if not sizes:
            return "borrowed" if self._has_tiles(point) else "roofline"
        if any(one.shape == point.shape for one in like):
            return "measured"
        if not min(sizes) / 2 <= size_of(point) <= 2 * max(sizes):
            return "extrapolated"
        return "borrowed" if note or not like else "interpolated"

    def _has_tiles(self, point: Point) -> bool:
        return any((one.kernel, one.dtype) == (point.kernel, point.dtype) for one in self._profile.tiles)

    @cached_property
    def _known(self) -> defaultdict[str, list[Point]]:
        found: defaultdict[str, list[Point]] = defaultdict(list)
        for point in self._profile.points:
            if point.condition == "idle":
                found[point.kernel].append(point)
        return found

    @cached_property
    def _cost(self) -> CostModel:
        return CostModel(self._cluster, self._profile)

    @cached_property
    def _transfers(self) -> TransferTable:
        return TransferTable(self._profile, link_figures(Cluster(measured_cluster(self._profile))))


class Rate(NamedTuple):
    """What the largest point of a kernel gets."""

    point: Point
    share: float
    """Of the peak."""


def largest_rate(profile: Profile, kernel: str, variant: str | None = None) -> Rate | None:
    """Return the share of the peak that the point of a kernel (of all its variants, or one) with most FLOPs gets; None
    if there is no such point, or no peak for its data type.
    """
    idle = [one for one in profile.points if one.kernel == kernel and one.condition == "idle" and one.flops]
    point = max((one for one in idle if variant in {None, one.variant}), key=lambda one: one.flops, default=None)
    peaks = measured_cluster(profile).gpu.peak_flops_per_s
    if point is None or point.dtype not in peaks:
        return None
    return Rate(point, point.flops / measured_s(point) / peaks[point.dtype])


def issue_s(profile: Profile, kernel: str) -> float:
    """Return what issuing an op costs the host, in seconds."""
    issue = profile.issue.get(kernel, Issue(host_s=0.0))
    return issue.host_s + issue.launches * measured_cluster(profile).gpu.launch_s
