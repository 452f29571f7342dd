"""Points of profiles: the measured time, its size, and the time that this or another profile predicts."""

from __future__ import annotations

from functools import cached_property

from sim.engine.channels import peer_of
from sim.engine.costs.cost import CostModel
from sim.engine.costs.kernel_table import series_size
from sim.engine.costs.measured import link_figures, measured_cluster
from sim.engine.costs.tiles import use_of
from sim.engine.costs.transfer_table import TransferTable, spread_of
from sim.words.profile import HOST_COPIES, TRANSFERS, Point, Profile
from topology.cluster import Cluster
from topology.specs import ClusterSpec

_ONE_STEP = ("exchange", *HOST_COPIES)
"""Transfers whose time without points follows from rate and latency of their link alone."""


def measured_s(point: Point) -> float:
    """Return what a point is predicted by, in seconds."""
    return point.mean_s if point.kernel in TRANSFERS else point.median_s


def size_of(point: Point) -> float:
    """Return the size along which a point is interpolated."""
    return float(point.nbytes) if point.kernel in TRANSFERS else series_size(point.kernel, point.shape)


class Predictor:
    """What one profile says of points of a machine: by default of the one that it was measured on.

    Who asks many profiles of one machine builds that machine once, and gives it as ``measured``.
    """

    def __init__(self, profile: Profile, spec: ClusterSpec | None = None, measured: Cluster | None = None) -> None:
        self._profile = profile
        self._measured = measured or Cluster(measured_cluster(profile))
        self._cluster = Cluster(spec) if spec else self._measured

    def seconds(self, point: Point) -> float | None:
        """Return the predicted time of a point, None if the profile has none; raises InputError where the machine has
        no such link or data type.
        """
        if point.kernel not in TRANSFERS:
            return self._cost.kernel_seconds(0, use_of(point))[0]
        link, figures = point.variant, link_figures(self._cluster)
        now, spread = figures(link), spread_of(point, self._measured.spec.gpus_per_node)
        peer = peer_of(self._cluster.spec, spread.nodes, spread.ranks) if point.kernel == "exchange" else None
        found = self._transfers.seconds(point.kernel, link, spread, point.nbytes, figures, peer)
        if found:
            return found[1]
        if point.kernel not in _ONE_STEP:
            return None
        efficiency, _ = self._transfers.efficiency(link, point.nbytes)
        return now.latency_s + point.nbytes / (efficiency * now.bytes_per_s)

    @cached_property
    def _cost(self) -> CostModel:
        return CostModel(self._cluster, self._profile)

    @cached_property
    def _transfers(self) -> TransferTable:
        return TransferTable(self._profile, link_figures(self._measured), self._measured.spec)
