"""A profile's times, relative to the machine that it was measured on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from sim.base.errors import InputError
from sim.base.kept import kept
from sim.base.presets import converted
from sim.engine.costs.kernel_table import KernelTable
from sim.engine.costs.series import Figures
from sim.engine.costs.transfer_table import TransferTable
from sim.engine.traffic.collectives import slowest_of_kind, width_of
from sim.words.profile import TRANSFERS, Profile
from sim.words.workload import Dtype
from topology.cluster import Cluster
from topology.specs import ClusterSpec


@kept
def measured_cluster(profile: Profile) -> ClusterSpec:
    """Return the spec of the machine that a profile was measured on; raises InputError if it carries none."""
    return converted(
        profile.cluster, ClusterSpec, f"cluster of profile {profile.name!r}", "longstep calibrate makes a new one"
    )


@kept
def tables(profile: Profile) -> tuple[KernelTable, TransferTable | None]:
    """Return a profile's times as efficiencies relative to the machine that it was measured on."""
    name, spec = profile.name, measured_cluster(profile)

    def figures(dtype: Dtype) -> Figures:
        peaks = spec.gpu.peak_flops_per_s
        if dtype not in peaks:
            raise InputError(
                f"profile {name!r} is of a machine without a peak for {dtype}: its data types are "
                f"{', '.join(peaks)}; set `dtype`, or `profile` datasheet, or give the profile's cluster a "
                f"gpu.peak_flops_per_s.{dtype}"
            )
        return Figures(peaks[dtype], spec.hbm.bytes_per_s, sms=spec.gpu.sms)

    transfers = any(point.kernel in TRANSFERS for point in profile.points)
    kernels = KernelTable(profile, figures, spec.gpu.sms, spec.gpu.power_w)
    if not transfers:
        return kernels, None
    return kernels, TransferTable(profile, link_figures(Cluster(spec)), spec)


def link_figures(cluster: Cluster) -> Callable[[str], Figures]:
    """Return what gives the rate of some kind of link, and the latency of a route over it (empty: those of the route
    between neighbours).
    """
    routes = cluster.typical_routes()

    @cache
    def figures(link: str) -> Figures:
        for route in routes:
            load = route.load(1)
            if not link:
                return Figures(1.0, route.bytes_per_s, route.latency_s)
            if link in {cluster.resources[index].group for index in load}:
                slowest = slowest_of_kind(load, link, cluster)
                rate = cluster.resources[slowest].capacity / load[slowest] / width_of(link, cluster)
                rate = min(rate, route.bytes_per_s)
                return Figures(1.0, rate, route.latency_s)
        raise InputError(
            f"a profile has transfers over {link!r}, but its cluster {cluster.spec.name!r} has no such link"
        )

    return figures
