"""Fits the tile model of fused attention to measured kernels: fixed_s, tile_s and pair_s, by least squares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.engine.tiles import busiest
from sim.profile import Point, TileModel
from sim.schedule.kernels import KernelUse


def fitted_tiles(points: Sequence[Point], sms: float) -> TileModel:
    """Return the model of points of one kernel, data type and head dimension, whose relative errors are least.

    A term that would come out negative is left out: nothing takes less than no time.
    """
    first = points[0]
    loads = [busiest(use_of(point), sms) for point in points]
    seconds = np.array([point.median_s for point in points])
    columns = np.array([(1.0, load.tiles, load.pairs) for load in loads]) / seconds[:, None]
    used = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(columns[:, used], np.ones(len(points)), rcond=None)[0]
        if (found >= 0).all():
            break
        used.pop(int(np.argmin(found)))
    terms = {term: float(f"{value:.6g}") for term, value in zip(used, found, strict=True)}  # the same on every machine
    return TileModel(
        kernel=first.kernel,
        dtype=first.dtype,
        head_dim=first.shape[-1],
        fixed_s=terms.get(0, 0.0),
        tile_s=terms.get(1, 0.0),
        pair_s=terms[2],
    )


def use_of(point: Point) -> KernelUse:
    """Return the kernel that a point is of."""
    return KernelUse(point.kernel, point.variant, point.dtype, point.shape, point.flops, point.nbytes)
