"""Times communication between GPUs: every kind of it by size and by number of GPUs, over the links that it takes."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple, get_args

from calibrate.kernels import sample
from calibrate.links import LinkCase, LinkKernel, play
from runtime.launch import Session
from sim.engine.collectives import link_name, wire_bytes
from sim.profile import Point
from sim.trace import Row
from sim.workload import Dtype, ModelSpec
from topology.cluster import Cluster

_SIZES = tuple(2**n for n in (12, 15, 18, 20, 22, 24, 26, 28, 30))
"""Bytes; from what latency bounds to the keys of a long sequence."""


class BetweenCase(NamedTuple):
    """One kind of communication at one size, among the first so many GPUs."""

    link: LinkCase
    ranks: int

    @property
    def label(self) -> str:
        """What a progress bar shows."""
        return f"{self.link.label}, {self.ranks} GPUs"


def between_cases(gpus: int, *, quick: bool) -> list[BetweenCase]:
    """Return what is to be timed on so many GPUs, by numbers of them; exchanges, which only neighbours take part in,
    once around all.
    """
    counts = sorted({2**n for n in range(1, gpus.bit_length()) if 2**n <= gpus} | {gpus}) if gpus > 1 else []
    return [
        BetweenCase(LinkCase(kind, nbytes, "idle"), ranks)
        for ranks in counts
        for kind in get_args(LinkKernel)
        for nbytes in (_SIZES[::3] if quick else _SIZES)
        if kind != "exchange" or ranks == gpus
    ]


def time_between(session: Session, case: LinkCase, model: ModelSpec, dtype: Dtype, cluster: Cluster) -> list[Point]:
    """Return the times of a communication op among all ranks of a session; of an exchange, whose neighbours may be on
    the same node or not, one point for every kind of link.
    """
    played = play(session, case, model, dtype, ahead=True)
    rows = [row for row in played.rows if row.stream == "link"]
    if case.kernel != "exchange":
        nbytes, link = wire_bytes(case.kernel, tuple(range(session.ranks)), played.nbytes, cluster)
        return [_point(case.kernel, link, dtype, (session.ranks, nbytes), rows)]
    by_link: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_link[exchanged_over(row.rank, session.ranks, cluster)].append(row)
    return [_point(case.kernel, link, dtype, (2, played.nbytes), found) for link, found in sorted(by_link.items())]


def exchanged_over(rank: int, ranks: int, cluster: Cluster) -> str:
    """Return the kind of link that a rank waits for when it sends to the next one and receives from the one before."""
    routes = [cluster.route(rank, (rank + 1) % ranks), cluster.route((rank - 1) % ranks, rank)]
    return link_name(min(routes, key=lambda route: route.bytes_per_s).load(1), cluster)


def _point(kernel: str, link: str, dtype: Dtype, shape: tuple[int, int], rows: list[Row]) -> Point:
    times = sample([row.busy_s for row in rows])
    return Point(
        kernel=kernel, variant=link, dtype=dtype, shape=shape, condition="idle", nbytes=shape[1], **times._asdict()
    )
