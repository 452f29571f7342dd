"""The critical path of a simulated step: what its end waited for, back to its start.

From the op that ends last to the last one that it waited for, and so on: an op of its rank, the host that issued it,
the peer that posted last, or the kernel behind which it waits for SMs. The spans follow each other without gaps, so
that they add up to the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sim.engine.play.facts import COLLECTIVE, EXCHANGE, HOST_COPY, HOST_KERNEL, HOST_SYNC, KERNEL, Array
from sim.engine.play.lowered import Lowered, lowered
from sim.engine.play.simulate import Simulation
from sim.engine.play.work import played, work_of
from sim.engine.traffic.collectives import link_traffic
from sim.schedule.derive.kernels import KernelUse
from sim.words.workload import FLOATS
from topology.cluster import Cluster

HOST, SMS, MEMORY = "host", "SMs", "hbm"


class Span(NamedTuple):
    """A part of the step, and what it went to."""

    begin_s: float
    end_s: float
    rank: int
    op: int
    """Number in the rank's program: what ran, what the host issued next, or what waited for SMs that transfers held."""
    on: str
    """compute, hbm, the kind of link that takes longest, host, or SMs: a wait for those that transfers hold."""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s


def critical_path(simulation: Simulation) -> list[Span]:
    """Return the spans of a step's critical path, in the order of time; none of a step that takes no time.

    Where a kernel or a transfer is slowed by others it is on the path for as long as it takes; kernels are those of
    compute or of memory by what takes longer at the datasheet's rates.
    """
    walk, trace = _Walk(simulation), simulation.trace
    if not trace.step_time_s:
        return []
    op, spans = int(np.argmax(trace.ended_s)), []
    end_s = trace.step_time_s
    while True:
        begun_s, members = float(trace.begun_s[op]), walk.members(op)
        poster = int(members[np.argmax(trace.posted_s[members])])
        posted_s, before = float(trace.posted_s[poster]), walk.held_by(members, begun_s)
        if posted_s == begun_s or before is None:
            before = walk.waited_for(poster)
            ready_s = 0.0 if before is None else float(trace.ended_s[before])
        else:
            ready_s = posted_s = begun_s
        parts = [(begun_s, end_s, op, walk.resource(op)), (ready_s, posted_s, poster, HOST)]
        if posted_s < begun_s:
            parts.insert(1, (posted_s, begun_s, *walk.behind(members, begun_s)))
        spans += [walk.span(*part) for part in parts if part[1] > part[0]]
        if before is None:
            return spans[::-1]
        op, end_s = before, ready_s


def shares(spans: Sequence[Span]) -> dict[str, float]:
    """Return which share of a critical path goes to what, the largest first."""
    total, found = sum(one.seconds for one in spans), dict.fromkeys((one.on for one in spans), 0.0)
    for one in spans:
        found[one.on] += one.seconds / total
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def strip(spans: Sequence[Span], cells: int) -> list[str]:
    """Return what takes most of each of so many equal parts of a step."""
    step_s = spans[-1].end_s
    found: list[dict[str, float]] = [{} for _ in range(cells)]
    for one in spans:
        first, last = (min(int(at_s / step_s * cells), cells - 1) for at_s in (one.begin_s, one.end_s))
        for cell in range(first, last + 1):
            inside_s = min(one.end_s, (cell + 1) * step_s / cells) - max(one.begin_s, cell * step_s / cells)
            found[cell][one.on] = found[cell].get(one.on, 0.0) + inside_s
    return [max(cell, key=lambda on: cell[on]) for cell in found]


class _Walk:
    """What the ops of a simulation waited for."""

    def __init__(self, simulation: Simulation) -> None:
        self._arrays: Lowered = lowered(simulation.fold.checked)
        self._cluster: Cluster = simulation.fold.cluster
        self._trace, self._numbers = simulation.trace, simulation.trace.numbers
        self._work = work_of(simulation.fold.checked)
        arrays, inline = self._arrays, not simulation.cost.cuda
        self._one_queue = simulation.cost.one_queue
        order, streams = arrays.stream_ops, arrays.ops["stream"]
        self._before = np.full(arrays.num_ops, -1)
        same = streams[order[1:]] == streams[order[:-1]]
        self._before[order[1:][same]] = order[:-1][same]
        holds = np.isin(arrays.ops["kind"], (HOST_SYNC, HOST_KERNEL, *([KERNEL] if inline else [])))
        last = np.maximum.accumulate(np.concatenate([[-1], np.where(holds, np.arange(arrays.num_ops), -1)]))[:-1]
        self._synced = np.where(last >= np.array(arrays.first[:-1])[arrays.op_rank], last, -1)
        kernels = np.flatnonzero(arrays.ops["kind"] == KERNEL)
        self._kernels = np.split(kernels, np.searchsorted(kernels, arrays.first[1:-1]))
        on_sms = np.flatnonzero(np.isin(arrays.ops["kind"], (KERNEL, EXCHANGE, COLLECTIVE))).tolist()
        ranks, ended_s = arrays.op_rank.tolist(), self._trace.ended_s.tolist()
        self._ended = {(ranks[op], ended_s[op]): op for op in on_sms}
        self._resources: dict[Any, str] = {}

    def span(self, begin_s: float, end_s: float, op: int, on: str) -> Span:
        rank = int(self._arrays.op_rank[op])
        return Span(begin_s, end_s, self._numbers[rank], op - self._arrays.first[rank], on)

    def members(self, op: int) -> Array:
        """Return the ops that an op begins with: itself and its peers."""
        arrays, row = self._arrays, self._arrays.ops[op]
        peers = np.array([op])
        if row["kind"] == EXCHANGE:
            some = arrays.transfers[arrays.transfers_of[row["transfers"] : row["transfers_end"]]]
            peers = np.concatenate([peers, some["source"], some["target"]])
        elif row["kind"] == COLLECTIVE:
            group = arrays.groups[row["group"]]
            peers = arrays.members[group["members"] : group["members_end"]]
        return peers

    def held_by(self, members: Array, begun_s: float) -> int | None:
        """Return the op on a rank of some members that ended as they began, and so let go of SMs, if there is one."""
        ranks = self._arrays.op_rank[members].tolist()
        return next((self._ended[key] for rank in ranks if (key := (rank, begun_s)) in self._ended), None)

    def behind(self, members: Array, at_s: float) -> tuple[int, str]:
        """Return the kernel under way on a rank of some members whose blocks hold SMs, and what it runs on."""
        for rank in self._arrays.op_rank[members].tolist():
            own = self._kernels[rank]
            place = int(np.searchsorted(self._trace.begun_s[own], at_s, side="right")) - 1
            if place >= 0 and self._trace.ended_s[own[place]] > at_s:
                return int(own[place]), self.resource(int(own[place]))
        return int(members[0]), SMS

    def waited_for(self, op: int) -> int | None:
        """Return the last op of its rank that ended before it could be posted; None where it waited for none."""
        posted_s = self._trace.posted_s[op]
        waited = np.concatenate([self._waits(one) for one in (op, *self._ahead(op))])
        ended_s = self._trace.ended_s[waited]
        waited, ended_s = waited[ended_s <= posted_s], ended_s[ended_s <= posted_s]
        return int(waited[np.argmax(ended_s)]) if len(waited) else None

    def _waits(self, op: int) -> Array:
        """Return what an op waits for by itself: what it needs, what is before it, and what the host waited for."""
        row = self._arrays.ops[op]
        others = np.array([row["behind"], self._before[op], self._synced[op]])
        return np.concatenate([self._arrays.waits[row["waits"] : row["waits_end"]], others[others >= 0]])

    def _ahead(self, op: int) -> list[int]:
        """Return the communication that a kernel waits behind in the one queue of launches, if there is one."""
        kinds, first = self._arrays.ops["kind"], self._arrays.first[self._arrays.op_rank[op]]
        found: list[int] = []
        while self._one_queue and kinds[op] == KERNEL and op - len(found) > first:
            if kinds[op - len(found) - 1] == KERNEL:
                break
            found.append(op - len(found) - 1)
        return [one for one in found if kinds[one] in {EXCHANGE, COLLECTIVE}]

    def resource(self, op: int) -> str:
        """Return what an op runs on: of several links the one that takes longest."""
        arrays, row = self._arrays, self._arrays.ops[op]
        if row["kind"] == KERNEL:
            rank = int(arrays.op_rank[op])
            return self._kept((rank, "kernel", int(arrays.op_use[op])), self._of_kernel, rank, arrays.op_use[op])
        if row["kind"] == EXCHANGE:
            some = arrays.transfers_of[row["transfers"] : row["transfers_end"]]
            messages = [arrays.messages[number] for number in set(arrays.transfer_message[some].tolist())]
            loads = [
                (nbytes.nbytes, link)
                for nbytes in messages
                for link in self._cluster.route(nbytes.source, nbytes.target).resources
            ]
            return self._slowest(loads)
        if row["kind"] == COLLECTIVE:
            call = int(arrays.group_call[row["group"]])
            return self._kept(("call", call), self._of_call, call)
        return {HOST_COPY: "pcie", HOST_KERNEL: "dram"}.get(int(row["kind"]), HOST)

    def _kept(self, key: Any, find: Any, *what: Any) -> str:
        if key not in self._resources:
            self._resources[key] = find(*what)
        return self._resources[key]

    def _of_kernel(self, rank: int, number: int) -> str:
        use: KernelUse = self._arrays.uses.found[number]
        if use.dtype not in FLOATS:
            return MEMORY
        compute_s = use.flops / self._cluster.peak_flops_per_s(rank, use.dtype)
        return "compute" if compute_s > use.hbm_bytes / self._cluster.spec.hbm.bytes_per_s else MEMORY

    def _of_call(self, number: int) -> str:
        key, op = self._arrays.calls[number]
        traffic = link_traffic(op.name, key.ranks, key.nbytes, self._cluster, played(key.ranks, self._work))
        return self._slowest([(nbytes, link) for link, nbytes in traffic.nbytes.items()])

    def _slowest(self, loads: list[tuple[float, int]]) -> str:
        if not loads:
            return HOST
        resources = self._cluster.resources
        _, link = max(loads, key=lambda load: load[0] / resources[load[1]].capacity)
        return resources[link].group
