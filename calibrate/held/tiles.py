"""Fits the tile model of fused attention to measured kernels: fixed_s, tile_s and pair_s, by least squares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from sim.engine.costs.tiles import busiest, use_of
from sim.schedule.derive.kernels import ATTENTION_KERNELS
from sim.words.profile import Point, TileModel
from sim.words.workload import Dtype

_BACKWARD_KERNELS = 3
"""Kernels of a backward pass: delta, the grid, and the rounding of dq (flash_attn csrc/flash_attn/flash_api.cpp)."""


def tile_models(points: Iterable[Point], sms: float) -> tuple[TileModel, ...]:
    """Return a model of every attention kernel, data type and head dimension among some points.

    A backward pass without short points has at most the fixed time of as many forward ones as it has kernels.
    """
    grouped: dict[tuple[str, Dtype, int], list[Point]] = {}
    for point in points:
        if point.kernel in ATTENTION_KERNELS:
            grouped.setdefault((point.kernel, point.dtype, point.shape[-1]), []).append(point)
    models: dict[tuple[str, Dtype, int], TileModel] = {}
    for key in sorted(grouped, reverse=True):  # forward passes first
        forward = models.get(("attention_forward", *key[1:]))
        most_s = _BACKWARD_KERNELS * forward.fixed_s if forward else math.inf
        models[key] = fitted_tiles(grouped[key], sms, most_s)
    return tuple(models.values())


def fitted_tiles(points: Sequence[Point], sms: float, most_fixed_s: float = math.inf) -> TileModel:
    """Return the model of points of one kernel, data type and head dimension, whose relative errors are least.

    A term that would come out negative is left out: nothing takes less than no time. ``most_fixed_s`` bounds the time
    of a kernel that has nothing to do, where no point is short enough to show it.
    """
    first = points[0]
    loads = [busiest(use_of(point), sms) for point in points]
    seconds = np.array([point.median_s for point in points])
    columns = np.array([(1.0, load.tiles, load.pairs) for load in loads]) / seconds[:, None]
    used, known = [0, 1, 2], np.zeros(len(points))
    terms: dict[int, float] = {}
    while True:
        found = np.linalg.lstsq(columns[:, used], 1 - known, rcond=None)[0]
        if len(used) > 1 and not (found >= 0).all():
            used.pop(int(np.argmin(found[:-1])))  # never the pairs, which long sequences are made of
        elif 0 in used and found[0] > most_fixed_s:
            terms[0], known = most_fixed_s, columns[:, 0] * most_fixed_s
            used.remove(0)
        else:
            break
    terms |= {term: float(f"{value:.6g}") for term, value in zip(used, found, strict=True)}  # the same on every machine
    return TileModel(
        kernel=first.kernel,
        dtype=first.dtype,
        head_dim=first.shape[-1],
        fixed_s=terms.get(0, 0.0),
        tile_s=terms.get(1, 0.0),
        pair_s=terms[2],
    )
