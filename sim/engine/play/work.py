"""What a schedule asks of a machine, in all: FLOPs per rank, bytes on every link, and how long these are busy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sim.base.kept import kept
from sim.engine.costs.on_host import host_bytes
from sim.engine.play.lowered import lowered
from sim.engine.traffic.collectives import link_traffic
from sim.schedule.ir.ops import OFFLOAD, CollectiveName, HostCopy
from sim.schedule.proof.check import Checked
from sim.words.workload import Dtype
from topology.cluster import Cluster


class Work(NamedTuple):
    """What a schedule asks of any machine, in all."""

    flops: list[Counter[Dtype]]
    """Per rank."""
    sent_bytes: Counter[tuple[int, int]]
    """Of messages, by source and target."""
    collectives: Counter[tuple[CollectiveName, tuple[int, ...], int]]
    """How many there are over some ranks of some bytes, as ``link_traffic`` takes them."""
    host_bytes: Counter[tuple[int, bool]]
    """Of copies, by rank and whether they go to its host."""
    dram_bytes: Counter[tuple[int, int, int]]
    """How many kernels of a rank's host read and write so many bytes."""


@kept
def work_of(checked: Checked) -> Work:
    """Return what a schedule asks; kept as long as it is."""
    arrays = lowered(checked)
    found = Work([Counter() for _ in checked.schedule.programs], Counter(), Counter(), Counter(), Counter())
    uses = arrays.uses.found
    of_ranks = np.bincount((arrays.op_rank * len(uses) + arrays.op_use)[arrays.op_use >= 0])
    for number in np.flatnonzero(of_ranks).tolist():
        rank, use = divmod(number, len(uses))
        found.flops[rank][uses[use].dtype] += uses[use].flops * int(of_ranks[number])
    for message, count in zip(arrays.messages, np.bincount(arrays.transfer_message).tolist(), strict=True):
        found.sent_bytes[message.source, message.target] += message.nbytes * count
    for (call, op), count in zip(arrays.calls, np.bincount(arrays.group_call).tolist(), strict=True):
        found.collectives[op.name, call.ranks, call.nbytes] += count
    copies = np.bincount(arrays.op_copy[arrays.op_copy >= 0]).tolist()
    for (program, op), count in zip(arrays.copies.found, copies, strict=True):
        if isinstance(op, HostCopy):
            found.host_bytes[program.rank, op.stream == OFFLOAD] += program.nbytes(op.source) * count
        else:
            found.dram_bytes[program.rank, *host_bytes(op, program)] += count
    return found


def links_s(checked: Checked, cluster: Cluster) -> dict[str, float]:
    """Return how long the most loaded link of each kind is busy, as the algorithms of collectives load it."""
    load: dict[int, float] = {}
    work = work_of(checked)
    for more, times in _loads(work, cluster):
        for link, nbytes in more.items():
            load[link] = load.get(link, 0.0) + nbytes * times
    found: dict[str, float] = {}
    for link, nbytes in load.items():
        resource = cluster.resources[link]
        found[resource.group] = max(found.get(resource.group, 0.0), nbytes / resource.capacity)
    return dict(sorted(found.items()))


def _loads(work: Work, cluster: Cluster) -> Iterator[tuple[dict[int, float], int]]:
    """Yield bytes per link, and how many times they pass it."""
    yield from of_routes(work, cluster)
    for (name, ranks, nbytes), count in work.collectives.items():
        yield link_traffic(name, ranks, nbytes, cluster, played(ranks, work)).nbytes, count


def played(ranks: tuple[int, ...], work: Work) -> int | None:
    """Return the number below which ranks are played, None where all of a group are."""
    return len(work.flops) if max(ranks) >= len(work.flops) else None


def of_routes(work: Work, cluster: Cluster) -> Iterator[tuple[dict[int, float], int]]:
    """Yield bytes per link, and how many times they pass it, of what takes a route of its own."""
    for pair, nbytes in work.sent_bytes.items():
        yield cluster.route(*pair).load(nbytes), 1
    if cluster.spec.gpu.kind == "cuda":
        for (rank, to_host), nbytes in work.host_bytes.items():
            yield cluster.host_route(rank, to_host=to_host).load(nbytes), 1
        for (rank, read, written), count in work.dram_bytes.items():
            yield cluster.dram_load(rank, read, written), count
