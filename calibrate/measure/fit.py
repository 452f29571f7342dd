"""From measured points to the figures of this machine: what its cores, memory and loopback can do."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from calibrate.measure.links import LinkTimes
from sim.schedule.derive.kernels import ATTENTION_KERNELS
from sim.words.profile import Point, Slowdown
from topology.specs import ClusterSpec, HostSpec, LinkSpec

_LARGE_BYTES = 2**22
"""Transfers from here on are bound by bandwidth, not latency."""
_COLD_BYTES = 2**25
"""Kernels from here on do not fit into a cache."""
COMPUTE_BOUND = (*ATTENTION_KERNELS, "gemm")


class Together(NamedTuple):
    """A memory-bound kernel out of the caches, on one rank and on several at once."""

    kernel: str
    ranks: int
    bytes_per_s: float
    """Of one rank alone; of the bytes that none could avoid."""
    slowdown: float
    at_least: float
    """First quartile of the slowdown."""


def fitted_spec(
    nominal: ClusterSpec,
    kernels: list[Point],
    links: list[LinkTimes],
    together: list[Together],
    launch_s: float,
    ranks: int,
    when: str,
) -> ClusterSpec:
    """Return the nominal spec of a host with the figures that the measurements give; each says so in ``sources``.

    Of ``links`` only those among at most ``ranks`` ranks count, which is also how many kernels were busy at once.
    """
    assert nominal.host is not None
    assert nominal.loopback is not None
    links = [link for link in links if link.point.shape[0] <= ranks]
    points = [link.point for link in links]
    cores = max(nominal.host.cores, ranks) / _slowdown(kernels)
    loopback = LinkSpec(
        bytes_per_s=max((p.nbytes / p.median_s for p in points), default=nominal.loopback.bytes_per_s),
        latency_s=min((p.median_s for p in points if p.condition == "idle"), default=nominal.loopback.latency_s),
    )
    host = HostSpec(
        cores=cores,
        wakeup_s=_wakeup_s(points),
        handoff_s=_median([gap for link in links for gap in link.handoff_s]),
        transfer_cores=_transfer_cores(links),
    )
    peaks = dict(nominal.gpu.peak_flops_per_s)
    for point in kernels:
        if point.flops:
            peaks[point.dtype] = max(peaks.get(point.dtype, 0.0), point.flops / point.median_s)
    measured = f"measured by longstep calibrate, {when}: "
    sources = {
        "gpu.launch_s": measured + "time from the end of one small kernel to the start of the next",
        "hbm.bytes_per_s": measured + "fastest kernel that fits into no cache, by all cores together",
        "loopback.bytes_per_s": measured + "fastest transfer of any size and kind",
        "loopback.latency_s": measured + "smallest transfer",
        "host.cores": measured + "cores of the machine over the slowdown of attention when all are busy",
        "host.wakeup_s": measured + "what a small transfer takes longer while all cores compute",
        "host.handoff_s": measured + "time from the end of a transfer to the begin of the kernel that waits for it",
        "host.transfer_cores": measured + "what attention loses during a large transfer, per second of it",
        "gpu.peak_flops_per_s": "the nominal peak, or the fastest kernel that was measured if that was faster",
    }
    return msgspec.structs.replace(
        nominal,
        gpu=msgspec.structs.replace(nominal.gpu, launch_s=launch_s, peak_flops_per_s=peaks),
        hbm=msgspec.structs.replace(nominal.hbm, bytes_per_s=_memory_bytes_per_s(nominal, together)),
        loopback=loopback,
        host=host,
        sources=nominal.sources | sources,
    )


def _slowdown(kernels: list[Point]) -> float:
    """Return how much longer attention takes when every core runs it; at least 1."""
    ratios = [busy.median_s / idle.median_s for idle, busy in _pairs(kernels) if idle.kernel in ATTENTION_KERNELS]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def _pairs(points: list[Point]) -> Iterable[tuple[Point, Point]]:
    """Yield what was measured both idle and busy."""
    idle = {(p.kernel, p.variant, p.dtype, p.shape): p for p in points if p.condition == "idle"}
    for point in points:
        key = (point.kernel, point.variant, point.dtype, point.shape)
        if point.condition == "busy" and key in idle:
            yield idle[key], point


def together_of(kernels: list[Point], interference: Iterable[Slowdown], ranks: int) -> list[Together]:
    """Return what memory-bound kernels show of the memory: measured by turns, or else by idle and busy points."""
    found = [
        Together(one.kernel, one.ranks, one.nbytes / one.alone_s, one.median, one.low)
        for one in interference
        if one.beside == "ranks" and one.clock == "thread" and one.kernel not in COMPUTE_BOUND
    ]
    return found or [
        Together(
            idle.kernel, ranks, idle.nbytes / idle.median_s, busy.median_s / idle.median_s, busy.low_s / idle.high_s
        )
        for idle, busy in _pairs(kernels)
        if idle.kernel not in COMPUTE_BOUND and idle.nbytes >= _COLD_BYTES
    ]


def _memory_bytes_per_s(nominal: ClusterSpec, together: list[Together]) -> float:
    """Return the bandwidth of kernels that fit into no cache, of all cores together where that is more."""
    rates = [one.bytes_per_s * max(1.0, one.ranks / one.slowdown) for one in together]
    return max(rates, default=nominal.hbm.bytes_per_s)


def traffic_of(together: list[Together], memory_bytes_per_s: float) -> dict[str, float]:
    """Return the bytes that kernels move over the least that they need to move, of kernels that slow each
    other.

    n at once that take s times as long share the bandwidth, so each one demands s / n of it when alone. Where they do
    not slow each other, what they demand beyond the least does not show, and does not matter.
    """
    factors: dict[str, list[float]] = {}
    for one in together:
        if one.at_least > 1.0 and one.ranks == max(other.ranks for other in together):
            demand = one.slowdown / one.ranks * memory_bytes_per_s
            factors.setdefault(one.kernel, []).append(max(1.0, demand / one.bytes_per_s))
    return {kernel: statistics.median(found) for kernel, found in sorted(factors.items())}


def _wakeup_s(points: list[Point]) -> float:
    """Return what the smallest transfers take longer while all cores compute."""
    pairs = [(idle, busy) for idle, busy in _pairs(points) if busy.nbytes < _LARGE_BYTES]
    return _median([busy.median_s - idle.median_s for idle, busy in pairs])


def _transfer_cores(links: list[LinkTimes]) -> float:
    """Return the cores that one rank's part in a large transfer takes from concurrent kernels."""
    idle = {(p.kernel, p.shape): p.median_s for p in (link.point for link in links) if p.condition == "idle"}
    return _median(
        [
            statistics.median(link.lost_s) / idle[link.point.kernel, link.point.shape]
            for link in links
            if link.lost_s and (link.point.kernel, link.point.shape) in idle and link.point.nbytes >= _LARGE_BYTES
        ]
    )


def _median(values: list[float]) -> float:
    """Return the median of quantities that cannot be negative but for noise; 0 if there are none."""
    return max(0.0, statistics.median(values)) if values else 0.0
