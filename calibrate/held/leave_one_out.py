"""Leave-one-out residuals of a profile: each point predicted from the others."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import NamedTuple

import msgspec
import numpy as np

from calibrate.held.points import Predictor, measured_s, size_of
from calibrate.held.tiles import tile_models
from sim.engine.costs.kernel_table import drift, series_row
from sim.engine.costs.measured import measured_cluster
from sim.schedule.derive.kernels import ATTENTION_KERNELS
from sim.words.profile import TRANSFERS, Point, Profile, Spread
from topology.cluster import Cluster

_LEFT_OUT = (1, 2)
"""Doublings of the length by which the longest points are predicted from the others."""
_ROUNDING = 1 + 1e-6


class Residual(NamedTuple):
    """How well the points of one kernel predict each other, as shares of the measured time."""

    kernel: str
    points: int
    median: float
    worst: float


def leave_one_out(profile: Profile) -> list[Residual]:
    """Return per kernel how far each idle point is from what the others predict."""
    return [
        Residual(kernel, len(found), statistics.median(map(abs, found)), max(found, key=abs))
        for kernel, found in sorted(_errors(profile).items())
    ]


def with_residuals(profile: Profile) -> Profile:
    """Return a profile with what its 90 % intervals are made of."""
    return msgspec.structs.replace(profile, residuals=spreads(profile), beyond=beyond(profile))


def spreads(profile: Profile) -> dict[str, Spread]:
    """Return per kernel the 90 % range of measured over predicted time, widened by the disagreement of sources."""
    found = {}
    for kernel, errors in sorted(_errors(profile).items()):
        low, high = (float(x) for x in np.percentile([1 / (1 + error) for error in errors], [5, 95]))
        apart = profile.disagreement.get(kernel, 1.0)
        found[kernel] = Spread(low=round(min(low, 1.0) / apart, 4), high=round(max(high, 1.0) * apart, 4))
    return found


def beyond(profile: Profile) -> dict[str, float]:
    """Return the factor by which attention of twice the longest point's length may be off. Nine of ten points that are
    one or two doublings longer than all that are left of their mask and shape lie within what ``drift`` makes of it.
    """
    points = [point for point in profile.points if point.kernel in ATTENTION_KERNELS and point.condition == "idle"]
    measured = Cluster(measured_cluster(profile))
    found = {}
    for kernel in ATTENTION_KERNELS:
        errors = []
        for longest in _longest(points, kernel):
            for doublings in _LEFT_OUT:
                errors += _beyond(profile, points, longest, doublings, measured)
        if errors:
            found[kernel] = round(math.exp(float(np.percentile(errors, 90))), 4)
    return found


def _longest(points: list[Point], kernel: str) -> list[Point]:
    """Return the longest point of each mask and shape of attention."""
    found: dict[tuple[object, ...], Point] = {}
    for point in sorted((point for point in points if point.kernel == kernel), key=size_of):
        found[_alike(point)] = point
    return list(found.values())


def _alike(point: Point) -> tuple[object, ...]:
    """Return what points of attention have in common that lie along one curve, whatever their heads."""
    return point.kernel, point.variant, point.dtype, point.shape[-1], point.shape[1] / point.shape[2]


def _beyond(profile: Profile, points: list[Point], longest: Point, doublings: int, measured: Cluster) -> list[float]:
    """Return how far off each doubling beyond the points is where all that are less than so many doublings shorter than
    the longest one of a curve are left out, as logarithms.
    """
    curve = [point for point in points if _alike(point) == _alike(longest)]
    last = size_of(longest) / 2**doublings
    left_out = [point for point in curve if size_of(point) > last * _ROUNDING]
    kept = [point for point in points if point not in left_out]
    if len(left_out) == len(curve):
        return []
    rest = msgspec.structs.replace(profile, points=tuple(kept))
    if profile.tiles:
        rest = msgspec.structs.replace(rest, tiles=tile_models(kept, measured.spec.gpu.sms))
    predictor = Predictor(rest, measured=measured)
    reached = max(size_of(point) for point in curve if point not in left_out)
    errors = []
    for point in left_out:
        further = math.log2(size_of(point) / reached)
        if further * _ROUNDING >= 1:
            predicted = predictor.seconds(point)
            assert predicted is not None
            errors.append(abs(math.log(measured_s(point) / predicted)) / drift(further))
    return errors


def _errors(profile: Profile) -> dict[str, list[float]]:
    """Return predicted over measured time, minus 1, of each point but the ends of a series, since there it would be
    extrapolated.
    """
    idle = [point for point in profile.points if point.condition == "idle"]
    measured = Cluster(measured_cluster(profile))
    errors: dict[str, list[float]] = defaultdict(list)
    for point in idle:
        rest = _without(profile, idle, point, measured.spec.gpu.sms)
        if rest:
            found = Predictor(rest, measured=measured).seconds(point)
            assert found is not None
            errors[point.kernel].append(found / measured_s(point) - 1)
    return errors


def _without(profile: Profile, idle: list[Point], point: Point, sms: float) -> Profile | None:
    """Return what speaks of a point in a profile without it, of attention with a tile model the model too; None at the
    ends of a series.
    """
    kernels = ATTENTION_KERNELS if point.kernel in ATTENTION_KERNELS else (point.kernel,)
    others = [other for other in idle if other is not point and other.kernel in kernels]
    rest = msgspec.structs.replace(profile, points=tuple(others))
    if any((model.kernel, model.dtype) == (point.kernel, point.dtype) for model in profile.tiles):
        return msgspec.structs.replace(rest, tiles=tile_models(others, sms))
    sizes = [size_of(other) for other in others if _series(other) == _series(point)]
    return rest if sizes and min(sizes) < size_of(point) < max(sizes) else None


def _series(point: Point) -> tuple[object, ...]:
    """Return what points that are interpolated along their size have in common."""
    transfer = point.kernel in TRANSFERS
    row: tuple[float, ...] = point.shape[::2] if transfer else series_row(point.kernel, point.shape)
    return (point.kernel, point.variant, point.dtype, row)
