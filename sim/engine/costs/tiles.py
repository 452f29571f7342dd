"""Fused attention as blocks that are handed to SMs: one form for few heads, short chunks, causal masks and ring blocks.

    t = fixed_s + tiles * tile_s + pairs * pair_s

of the busiest SM, where a tile is 128 queries (keys in the backward pass) of one head, and a pair 128 x 128 scores.
What an SM does for a pair does not depend on the number of heads, so neither does the rate of long sequences. Where
kernels were measured, what they take over this is interpolated; beyond them the nearest one's share is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sim.engine.costs.series import BEYOND_RANGE
from sim.schedule.derive.kernels import TILE, KernelUse
from sim.words.profile import Point, TileModel

_ROUNDING = 1e-9
"""Of a logarithm."""


class Load(NamedTuple):
    """What the busiest SM does."""

    tiles: float
    pairs: float


def busiest(use: KernelUse, sms: float) -> Load:
    """Return what the busiest of so many SMs does, one block at a time, longest first.

    Blocks that are all alike run in whole waves; those of a mask, which are not, fill each other's gaps, but none is
    divided. Scores that the diagonal cuts are computed as whole pairs.
    """
    work = _work(use)
    if use.variant == "full" and not use.documents:
        waves = math.ceil(work.tiles / sms)
        return Load(waves, waves * work.longest)
    return Load(max(1.0, work.tiles / sms), max(work.longest, work.pairs / sms))


class _Work(NamedTuple):
    """What all SMs do, and the pairs of the longest tile."""

    tiles: int
    pairs: float
    longest: float


def _work(use: KernelUse) -> _Work:
    """Return the work of a kernel; of one with several documents the sum of theirs."""
    if use.documents:
        each = [(_work(one), count) for one, count in use.documents]
        return _Work(
            sum(one.tiles * count for one, count in each),
            sum(one.pairs * count for one, count in each),
            max(one.longest for one, _ in each),
        )
    batch, queries, keys, heads, _, head_dim = use.shape
    backward = use.kernel == "attention_backward"
    rows, columns = (-(-n // TILE) for n in ((keys, queries) if backward else (queries, keys)))
    tiles = batch * heads * rows
    if use.variant == "full":
        return _Work(tiles, tiles * columns, columns)
    per_pair = (10 if backward else 4) * head_dim * TILE * TILE
    pairs = use.flops / per_pair + tiles / 2
    return _Work(tiles, pairs, columns if use.variant == "causal" else min(columns, 2 * pairs / tiles + 1))


def tiled_s(model: TileModel, use: KernelUse, sms: float, scale: float = 1.0) -> float:
    """Return what a kernel takes; its work ``scale`` times as long as on the machine whose model it is."""
    load = busiest(use, sms)
    return model.fixed_s + (load.tiles * model.tile_s + load.pairs * model.pair_s) * scale


def use_of(point: Point) -> KernelUse:
    """Return the kernel that a point is of."""
    return KernelUse(point.kernel, point.variant, point.dtype, point.shape, point.flops, point.nbytes)


class Tiled(NamedTuple):
    """The time of a kernel by a tile model."""

    seconds: float
    note: str
    """Where another head dimension or mask had to serve, or the kernel lies beyond the points; else empty."""
    doublings: float
    """How many doublings it is longer than the longest point."""


class TiledAttention:
    """The attention kernels of one profile that have a tile model."""

    def __init__(self, models: Sequence[TileModel], points: Iterable[Point], sms: float) -> None:
        self._models = {(model.kernel, model.dtype, model.head_dim): model for model in models}
        self._sms = sms
        self._shares: dict[TileModel, dict[str, dict[float, dict[int, dict[float, float]]]]] = {
            model: {} for model in models
        }
        """By variant, queries over keys, heads, and position."""
        for point in points:
            model = self._models.get((point.kernel, point.dtype, point.shape[-1]))
            if model and point.condition == "idle":
                use = use_of(point)
                of_shape = self._shares[model].setdefault(point.variant, {}).setdefault(_aspect(use), {})
                shares = of_shape.setdefault(point.shape[0] * point.shape[3], {})
                shares[math.log(_length(use))] = point.median_s / tiled_s(model, use, sms)

    def seconds(self, use: KernelUse, sms: float, faster: float) -> Tiled | None:
        """Return the time of a kernel on a machine of so many SMs, each ``faster`` times as fast as those measured;
        None if no model fits.
        """
        near = [key for key in self._models if key[:2] == (use.kernel, use.dtype)]
        if not near:
            return None
        key = min(near, key=lambda key: (abs(math.log(key[2] / use.shape[-1])), key[2]))
        model, note = self._models[key], ""
        work = use
        if key[2] != use.shape[-1]:
            note = f"{use.kernel} of head dim {use.shape[-1]}: rate of head dim {key[2]}"
            work = use._replace(shape=(*use.shape[:-1], key[2]), flops=use.flops * key[2] // use.shape[-1])
        seconds = tiled_s(model, work, sms, use.shape[-1] / key[2] / faster)
        if not self._shares[model].get(use.variant) and self._shares[model]:
            note = note or f"{use.kernel} {use.variant}: over its tiles as {next(iter(self._shares[model]))}"
        share, doublings = self._share(model, work)
        if abs(doublings) > 1 + _ROUNDING:
            note = note or beyond_range(use, _length(use))
        return Tiled(seconds * share, note, max(doublings, 0.0))

    def _share(self, model: TileModel, use: KernelUse) -> tuple[float, float]:
        """Return measured over modelled time, between the points of this kernel that are nearest, and how many
        doublings of the length the kernel lies outside them, negative where it is shorter.

        Beyond the longest sequence measured that is the share of as many tiles at that length: the same waves. Numbers
        of heads that were only measured with shorter sequences say nothing of it.
        """
        variants = self._shares[model]
        if not variants:
            return 1.0, 0.0
        by_aspect = variants.get(use.variant) or next(iter(variants.values()))
        by_heads = by_aspect[min(by_aspect, key=lambda aspect: (abs(math.log(aspect / _aspect(use))), aspect))]
        longest = max(max(found) for found in by_heads.values())
        shortest = min(min(found) for found in by_heads.values())
        position, heads = math.log(_length(use)), math.log(use.shape[0] * use.shape[3])
        at = min(position, longest)
        outside = (max(position - longest, 0.0) + min(position - shortest, 0.0)) / math.log(2)
        shares = {math.log(heads): _between(found, at) for heads, found in by_heads.items() if max(found) >= at}
        return _between(shares, heads + position - at), outside


def _aspect(use: KernelUse) -> float:
    """Return how many queries there are to a key."""
    return use.shape[1] / use.shape[2]


def _length(use: KernelUse) -> float:
    """Return the mean length of queries and keys, by which kernels of as many heads are sorted."""
    return math.sqrt(use.shape[1] * use.shape[2])


def beyond_range(use: KernelUse, size: float) -> str:
    """Return the note for a size that lies more than a factor of two outside the measured ones."""
    return f"{' '.join(filter(None, (use.kernel, use.variant)))} of size {size:.0f}: {BEYOND_RANGE}"


def _between(values: dict[float, float], position: float) -> float:
    """Return the value at a position: linear between those that there are, constant outside."""
    places = sorted(values)
    return float(np.interp(position, places, [values[place] for place in places]))
