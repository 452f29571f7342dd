"""Times communication between GPUs: every kind of it by size and by number of GPUs, over the links that it takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple, get_args

from calibrate.measure.kernels import sample
from calibrate.measure.links import LinkCase, LinkKernel, Played, play
from runtime.processes.launch import Session
from sim.engine.traffic.collectives import link_name, width_of, wire_bytes
from sim.words.profile import Point
from sim.words.workload import Dtype, ModelSpec
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
    counts = sorted({2**n for n in range(1, gpus.bit_length())} | {gpus}) if gpus > 1 else []
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
    ranks = tuple(range(session.ranks))
    if case.kernel != "exchange":
        nbytes, link = wire_bytes(case.kernel, ranks, played.nbytes, cluster)
        return [_point(case.kernel, link, dtype, nbytes, _placed(ranks, link, cluster), _times(played, ranks))]
    by_link: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_link[exchanged_over(rank, session.ranks, cluster)].append(rank)
    return [
        _point(
            case.kernel, link, dtype, played.nbytes // width_of(link, cluster), _placed(ranks, link, cluster),
            _times(played, some),
        )
        for link, some in sorted(by_link.items())
    ]  # fmt: skip


def _times(played: Played, ranks: Sequence[int]) -> list[float]:
    """Return the seconds of every run, from when the last of some ranks was there. That is the shortest of their own
    times, because clocks of GPUs agree only about.
    """
    found = []
    for step in played.steps:
        by_op: dict[int, list[float]] = defaultdict(list)
        for row in step:
            if row.stream == "link" and row.rank in ranks:
                by_op[row.op].append(row.end_s - row.posted_s)
        found += [min(times) for times in by_op.values()]
    return found


def exchanged_over(rank: int, ranks: int, cluster: Cluster) -> str:
    """Return the kind of link that a rank waits for when it sends to the next one and receives from the one before."""
    routes = [cluster.route(rank, (rank + 1) % ranks), cluster.route((rank - 1) % ranks, rank)]
    return link_name(min(routes, key=lambda route: route.bytes_per_s).load(1), cluster)


def _placed(ranks: Sequence[int], link: str, cluster: Cluster) -> tuple[int, ...]:
    """Return how many ranks communicate over a link and, over NICs, on how many nodes; inside nodes those of one."""
    nodes = Counter(cluster.devices[rank].node for rank in ranks)
    return (len(ranks), len(nodes)) if link == "nic" else (max(nodes.values()),)


def _point(kernel: str, link: str, dtype: Dtype, nbytes: int, placed: tuple[int, ...], seconds: list[float]) -> Point:
    shape = (placed[0], nbytes, *placed[1:])
    times = sample(seconds)
    return Point(
        kernel=kernel, variant=link, dtype=dtype, shape=shape, condition="idle", nbytes=nbytes, **times._asdict()
    )
