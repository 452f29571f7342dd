"""Leave-one-out residuals of a profile: each point predicted from the others."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import NamedTuple

import msgspec
import numpy as np

from calibrate.points import Predictor, measured_s, size_of
from calibrate.tiles import tile_models
from sim.engine.cost import measured_cluster
from sim.engine.kernel_table import series_row
from sim.profile import TRANSFERS, Point, Profile, Spread
from sim.schedule.derive.kernels import ATTENTION_KERNELS
from topology.cluster import Cluster


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


def spreads(profile: Profile) -> dict[str, Spread]:
    """Return per kernel the 90 % range of measured over predicted time, widened by the disagreement of sources."""
    found = {}
    for kernel, errors in sorted(_errors(profile).items()):
        low, high = (float(x) for x in np.percentile([1 / (1 + error) for error in errors], [5, 95]))
        apart = profile.disagreement.get(kernel, 1.0)
        found[kernel] = Spread(low=round(min(low, 1.0) / apart, 4), high=round(max(high, 1.0) * apart, 4))
    return found


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
