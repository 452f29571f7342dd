"""The figures of a machine: what a what-if scales, each by itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from sim.schedule.derive.kernels import ATTENTION_KERNELS
from sim.words.profile import Profile
from topology.specs import ClusterSpec


class Figure(NamedTuple):
    """Something that hardware is bought by, or software made faster in."""

    name: str
    """As answers call it."""
    tables: tuple[str, ...]
    """Of a cluster; what they have of the fields is scaled together. ``host calls`` are in a profile's ``issue``."""
    fields: tuple[str, ...]
    rate: bool = True
    """Whether it is so much a second, of which more is faster, or a time."""
    kernels: bool = False
    """Whether kernels depend on it."""
    moves: bool = False
    """Whether messages, collectives, copies and kernels of the host do."""
    resource: str = ""
    """The kind of link without which nothing depends on it; empty: of no link."""

    def factor(self, times: float) -> float:
        """Return what it is multiplied by to be so many times as good."""
        return times if self.rate else 1 / times


COMPUTE = Figure("compute", ("gpu",), ("peak_flops_per_s",), kernels=True)
HBM = Figure("hbm", ("hbm",), ("bytes_per_s",), kernels=True, moves=True)
HOST_CALLS = Figure("host calls", (), ("host_s",), rate=False)
"""What the host takes for calls of torch.distributed and eager kernels, without launches: ``issue`` of a profile."""
LAUNCHES = Figure("launches", ("gpu",), ("launch_s",), rate=False)
HOST = (
    Figure("wake-ups", ("host",), ("wakeup_s",), rate=False, moves=True),
    Figure("handoffs", ("host",), ("handoff_s",), rate=False),
    LAUNCHES,
    HOST_CALLS,
)
"""What a faster host makes shorter."""
_RATES = ("bytes_per_s", "both_ways_bytes_per_s", "write_bytes_per_s")


def _link(name: str, *tables: str, resource: str = "") -> tuple[Figure, Figure]:
    resource = resource or name
    return (
        Figure(name, tables, _RATES, moves=True, resource=resource),
        Figure(f"{name} latency", tables, ("latency_s",), rate=False, moves=True, resource=resource),
    )


FIGURES: tuple[Figure, ...] = (
    COMPUTE,
    HBM,
    *_link("nvlink", "nvlink"),
    *_link("nic", "nic"),
    *_link("pcie", "pcie", "pcie.uplink"),
    *_link("socket link", "socket.link", resource="socket"),
    *_link("loopback", "loopback"),
    Figure("dram", ("socket.dram",), _RATES, moves=True, resource="dram"),
    *_link("cxl", "socket.cxl"),
    *HOST,
)
"""In the order of answers. Links are called as their resources are."""


def figures_of(spec: ClusterSpec, profile: Profile | None) -> list[Figure]:
    """Return the figures that a machine has, and that are not zero."""
    calls = profile is not None and any(issue.host_s for issue in profile.issue.values())
    return [one for one in FIGURES if (calls if one is HOST_CALLS else any(_held(spec, one)))]


def scaled(spec: ClusterSpec, figure: Figure, factor: float) -> ClusterSpec:
    """Return a cluster with so many times a figure."""
    for table, values in _held(spec, figure):
        spec = _replaced(spec, table.split("."), {name: _times(value, factor) for name, value in values.items()})
    return spec


def with_calls(profile: Profile | None, factor: float) -> Profile | None:
    """Return a profile with so many times the host's calls."""
    if profile is None:
        return None
    issue = {kind: msgspec.structs.replace(one, host_s=one.host_s * factor) for kind, one in profile.issue.items()}
    eager = profile.eager and profile.eager.times(factor)
    return msgspec.structs.replace(profile, issue=issue, eager=eager, check_s=profile.check_s * factor)


def with_attention(profile: Profile, factor: float) -> Profile:
    """Return a profile whose attention kernels take so many times as long."""
    points = [
        msgspec.structs.replace(one, **{name: getattr(one, name) * factor for name in _POINT_TIMES})
        if one.kernel in ATTENTION_KERNELS
        else one
        for one in profile.points
    ]
    tiles = [
        msgspec.structs.replace(one, **{name: getattr(one, name) * factor for name in _TILE_TIMES})
        for one in profile.tiles
    ]
    return msgspec.structs.replace(profile, points=tuple(points), tiles=tuple(tiles))


_POINT_TIMES = ("median_s", "mean_s", "low_s", "high_s")
_TILE_TIMES = ("fixed_s", "tile_s", "pair_s")


def _held(spec: ClusterSpec, figure: Figure) -> list[tuple[str, dict[str, Any]]]:
    """Return what a cluster's tables have of a figure, of those that have any."""
    found = []
    for table in figure.tables:
        at: Any = spec
        for part in table.split("."):
            at = at and getattr(at, part)
        values = {name: value for name in figure.fields if (value := getattr(at, name, None))}
        if values:
            found.append((table, values))
    return found


def _times(value: Any, factor: float) -> Any:
    """Return so many times a number, or all that are in a table."""
    return {key: one * factor for key, one in value.items()} if isinstance(value, dict) else value * factor


def _replaced(at: Any, table: list[str], values: dict[str, Any]) -> Any:
    """Return a spec with other values in one of its tables, all at once, since they have to fit each other."""
    if not table:
        return msgspec.structs.replace(at, **values)
    first, *rest = table
    return msgspec.structs.replace(at, **{first: _replaced(getattr(at, first), rest, values)})
