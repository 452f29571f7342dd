"""Lookup of measured times of communication: by kind, link, number of nodes and of ranks a node; messages also by the
channels that NCCL gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from statistics import geometric_mean
from typing import NamedTuple

from sim.engine.channels import Peer, peer_of
from sim.engine.costs.series import BEYOND_RANGE, Curve, Figures, between
from sim.words.profile import TRANSFERS, Point, Profile
from topology.specs import ClusterSpec


class Spread(NamedTuple):
    """How the ranks of a communicator are spread over nodes."""

    nodes: int
    per_node: float
    """Ranks of each, on average."""

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return round(self.nodes * self.per_node)


def waits_s(points: Sequence[Point], cores: float) -> dict[str, float]:
    """Return by kind of communication what its smallest that was measured both ways takes longer beside kernels of all
    ranks, for each whole round of these ranks on the cores: what the threads of its steps wait for their turns.
    """
    idle = {(point.kernel, point.shape): point for point in points if point.condition == "idle"}
    found = {}
    for busy in sorted(points, key=lambda one: -one.nbytes):
        alone = idle.get((busy.kernel, busy.shape))
        if busy.condition == "busy" and busy.kernel in TRANSFERS and alone:
            rounds = max(busy.shape[0] // cores, 1.0)
            found[busy.kernel] = max(busy.mean_s - alone.mean_s, 0.0) / rounds
    return found


_Curves = dict[float, dict[int, Curve]]
"""By ranks a node and by nodes."""


class TransferTable:
    """All measured points of communication of one profile, by kind and link, ranks a node and nodes."""

    def __init__(self, profile: Profile, figures: Callable[[str], Figures], spec: ClusterSpec) -> None:
        """``figures`` are those of a kind of link, or of the only one if that is empty; ``spec`` is of the machine that
        was measured.
        """
        self._figures = figures
        self._peer = cache(lambda spread: peer_of(spec, spread.nodes, spread.ranks))
        grouped: dict[tuple[str, str], dict[float, dict[int, dict[int, Point]]]] = {}
        for point in profile.points:
            if point.kernel in TRANSFERS and point.condition == "idle":
                nodes, per_node = spread_of(point, spec.gpus_per_node)
                by_nodes = grouped.setdefault((point.kernel, point.variant), {}).setdefault(per_node, {})
                by_nodes.setdefault(nodes, {})[point.nbytes] = point
        self._points = grouped
        self._hops_s = {link: figures(link).latency_s for _, link in grouped}
        self._curves = cache(self._find_curves)

    def _find_curves(self, kernel: str, link: str) -> _Curves:
        """Return the curves of a kind over a link that was measured."""
        return {
            per_node: {
                nodes: Curve(
                    [(nbytes, point.mean_s) for nbytes, point in points.items()],
                    latencies(kernel, link, Spread(nodes, per_node), self._figures),
                    self._hops_s[link],
                )
                for nodes, points in by_nodes.items()
            }
            for per_node, by_nodes in self._points[kernel, link].items()
        }

    def seconds(
        self,
        kernel: str,
        link: str,
        spread: Spread,
        nbytes: float,
        figures: Callable[[str], Figures],
        peer: Peer | None = None,
    ) -> tuple[float, float, str] | None:
        """Return (latency part, whole time, note) of a transfer that puts ``nbytes`` on the busiest link of its kind,
        on a machine with such ``figures``: between what was measured, by the logarithms of ranks a node and of nodes;
        None if nothing like it was.

        Of messages only measured ones with as many channels to a ``peer`` count, or nearly as many; where these had
        more, it is no faster than its busiest channel at the best rate that one was measured to have.
        """
        over = next((one for one in (link, "") if (kernel, one) in self._points), None)
        if over is None:
            return None
        curves, measured = self._curves(kernel, over), peer
        if peer:
            curves, measured = self._nearest(curves, peer)
        now = latencies(kernel, link, spread, figures)
        below, above, share = between(sorted(curves), spread.per_node)
        beyond = kernel != "exchange" and not below / 2 <= spread.per_node <= 2 * above  # which only two take part in
        times = []
        for per_node in (below, above):
            few, many, up = between(sorted(curves[per_node]), spread.nodes)
            beyond = beyond or not few / 2 <= spread.nodes <= 2 * many
            beyond = beyond or curves[per_node][few].extrapolates(nbytes)
            one, other = curves[per_node][few], curves[per_node][many]
            ends = [(curve.delay_s(now), curve.seconds(nbytes, now)) for curve in (one, other)]
            times.append(_mixed(ends[0], ends[1], up))
        delay_s, total_s = _mixed(times[0], times[1], share)
        if peer and measured and peer.has_fewer(measured):
            total_s = max(total_s, delay_s + peer.busiest(nbytes) / self._bytes_per_s_of_a_channel)
        note = f"{kernel} of {round(nbytes)} bytes among {spread.ranks} ranks: {BEYOND_RANGE}" if beyond else ""
        return min(delay_s, total_s), total_s, note

    def _nearest(self, curves: _Curves, peer: Peer) -> tuple[_Curves, Peer]:
        """Return the curves whose messages had the channels of a peer, or nearly so; and the channels of these."""
        found: dict[Peer, _Curves] = {}
        for per_node, by_nodes in curves.items():
            for nodes, curve in by_nodes.items():
                measured = self._peer(Spread(nodes, per_node)) or peer
                found.setdefault(measured, {}).setdefault(per_node, {})[nodes] = curve
        nearest = min(found, key=peer.apart)
        return found[nearest], nearest

    @cached_property
    def _bytes_per_s_of_a_channel(self) -> float:
        """The best rate of one channel that messages were measured to have which fill a channel, infinite without any.
        Its block of threads copies as fast over any link, so what one link has shown holds for all.
        """
        rates = (
            curve.bytes_per_s(nbytes) / peer.channels(nbytes)
            for kernel, link in self._points
            if kernel == "exchange"
            for per_node, by_nodes in self._curves(kernel, link).items()
            for nodes, curve in by_nodes.items()
            if (peer := self._peer(Spread(nodes, per_node)))
            for nbytes in curve.sizes
            if nbytes >= peer.largest
        )
        return max(rates, default=math.inf)

    def efficiency(self, link: str, nbytes: float) -> tuple[float, str]:
        """Return the share of a link's rate that a kind of communication gets which was not measured over it, and what
        to call that rate: the geometric mean of the kinds that were.
        """
        kinds = {kernel: self._curves(kernel, of) for kernel, of in self._points if of in {link, ""}}
        if not kinds:
            return 1.0, "datasheet rate"
        shares = [
            geometric_mean(curve.efficiency(nbytes) for by_nodes in curves.values() for curve in by_nodes.values())
            for curves in kinds.values()
        ]
        return min(geometric_mean(shares), 1.0), f"efficiency of {' and '.join(sorted(kinds))}"


def spread_of(point: Point, gpus_per_node: int) -> Spread:
    """Return on how many nodes the ranks of a measured transfer were."""
    ranks = point.shape[0]
    if point.variant != "nic":
        return Spread(1, float(ranks))
    nodes = point.shape[2] if len(point.shape) == 3 else max(2, -(-ranks // gpus_per_node))
    return Spread(nodes, ranks / nodes)


def latencies(kernel: str, link: str, spread: Spread, figures: Callable[[str], Figures]) -> Figures:
    """Return a link's rate, and the latency that what a transfer takes without bytes is in proportion to: of rings that
    of all steps, of sums over nodes that of trees, else of one hop. NCCL's own latencies of 2 to 32 nodes grow so.
    """
    hop = figures(link)
    if link != "nic":
        steps = spread.per_node - 1 if kernel in {"all_gather", "reduce_scatter"} else 1
        return hop._replace(latency_s=hop.latency_s * max(steps, 1))
    nodes, per_node = spread
    near_s = figures("").latency_s if per_node > 1 else 0.0
    if kernel in {"all_gather", "reduce_scatter"}:
        mean_s = ((per_node - 1) * near_s + hop.latency_s) / per_node
        return hop._replace(latency_s=mean_s * (nodes * per_node - 1))
    if kernel == "all_reduce":
        return hop._replace(latency_s=2 * ((per_node - 1) * near_s + math.log2(nodes) * hop.latency_s))
    return hop


def _mixed(one: tuple[float, float], other: tuple[float, float], share: float) -> tuple[float, float]:
    """Return what lies between two pairs."""
    (a, b), (c, d) = one, other
    return a + share * (c - a), b + share * (d - b)
