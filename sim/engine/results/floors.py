"""Times that no algorithm beats: of devices at their peak, and of links for the bytes that they have to carry."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from sim.engine.play.fold import Fold
from sim.engine.play.work import Work, of_routes, played, work_of
from sim.engine.traffic.least import Need, needs, rate
from topology.cluster import Cluster

Images = Mapping[int, Sequence[int]]
"""By a link of a GPU the same link of each GPU of its node that it is played for."""


def floors(folded: Fold) -> dict[str, float]:
    """Return lower bounds of the step that no algorithm beats: the most loaded device at its peak, and the link, or the
    links of a rank or node together, with most to carry, by their widest kind.
    """
    work, cluster = work_of(folded.checked), folded.cluster
    own: list[float] = []
    shared: dict[int, float] = {}
    for rank, of_rank in enumerate(work.flops):
        device = cluster.devices[rank]
        busy_s = sum(flops / cluster.peak_flops_per_s(rank, dtype) for dtype, flops in of_rank.items() if flops)
        at_once = max(cluster.resources[device.compute].capacity / device.compute_units, 1.0)
        own.append(busy_s)
        shared[device.compute] = shared.get(device.compute, 0.0) + busy_s / at_once
    lower = {"compute": max([*own, *shared.values()], default=0.0)} | link_floors(work, cluster, folded)
    return dict(sorted(lower.items()))


def link_floors(work: Work, cluster: Cluster, folded: Fold | None = None, of: range | None = None) -> dict[str, float]:
    """Return the seconds that the link, or the links of a rank or node together, with most to carry take at least, by
    their widest kind; of work that was ``folded`` with what members of groups ask that are not played. Of collectives
    only what the nodes of some ranks carry is looked at where it is asked ``of`` these.
    """
    together: dict[frozenset[int], float] = {}
    for links, nbytes in _needs(work, cluster, folded, of):
        together[links] = together.get(links, 0.0) + nbytes
    lower: dict[str, float] = {}
    for links, nbytes in _with_inner(together):
        kind = max((cluster.resources[link] for link in links), key=lambda one: (one.capacity, one.group)).group
        lower[kind] = max(lower.get(kind, 0.0), nbytes / rate(links, cluster))
    return lower


def _needs(work: Work, cluster: Cluster, folded: Fold | None, of: range | None) -> Iterator[Need]:
    """Yield what links carry at least: of messages and copies the links of their way, of collectives what any needs."""
    images = _images(folded) if folded and "tp" in folded.played else {}
    for more, times in of_routes(work, cluster):
        yield from _also_of(images, ((frozenset([link]), nbytes * times) for link, nbytes in more.items()))
    for (name, ranks, nbytes), count in work.collectives.items():
        near = played(ranks, work)
        some = of if near is None else range(near)
        found = ((links, least * count) for links, least in needs(name, ranks, nbytes, cluster, some))
        yield from _also_of(images, found) if images and folded and _is_of_one_member(ranks, folded) else found


def _also_of(images: Images, found: Iterator[Need]) -> Iterator[Need]:
    """Yield needs of one member, and the same of those that it is played for."""
    for links, nbytes in found:
        yield links, nbytes
        if all(link in images for link in links):
            yield from ((frozenset(some), nbytes) for some in zip(*(images[link] for link in links), strict=True))


def _images(folded: Fold) -> Images:
    """Return the links of members of groups that are not played."""
    schedule, cluster, found = folded.checked.schedule, folded.cluster, dict[int, list[int]]()
    for rank, others in enumerate(folded.members):
        own = cluster.links_of(rank)
        images = zip(*(cluster.links_of(schedule.place[other]) for other in others), strict=True)
        found |= zip(own, map(list, images), strict=False)
    return found


def _is_of_one_member(ranks: Sequence[int], folded: Fold) -> bool:
    schedule = folded.checked.schedule
    mesh = schedule.whole.header.mesh
    return len({mesh.place(schedule.order[rank])["tp"] for rank in ranks}) == 1


def _with_inner(found: dict[frozenset[int], float]) -> Iterator[Need]:
    """Yield sets of links with what they carry together: also what sets within them do."""
    by_first: dict[int, list[frozenset[int]]] = {}
    for links in found:
        by_first.setdefault(min(links), []).append(links)
    for links in found:
        inner = (some for first in links for some in by_first.get(first, ()) if some <= links)
        yield links, math.fsum(found[some] for some in inner)
