"""What a simulation says: one object with the figures that ``longstep simulate --json`` prints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from sim.breakdown import PartName, breakdown, critical_rank
from sim.engine.collectives import link_traffic
from sim.engine.interval import Interval, interval
from sim.engine.least import Need, needs, rate
from sim.engine.lowered import lowered
from sim.engine.races import races
from sim.engine.simulate import Simulation
from sim.kept import kept
from sim.memory import MemoryWalk, walks
from sim.profile import Rates
from sim.schedule.ir.ops import OFFLOAD, CollectiveName
from sim.schedule.model.layer import gemm_flops
from sim.schedule.proof.check import Checked
from sim.schedule.write.attention import attention_flops
from sim.workload import Dtype
from topology.cluster import Cluster
from topology.fabrics import socket_of


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a prediction rests on."""

    profile: str
    measured_on: str
    created: str
    complete: bool
    rates: Rates | Literal[""] = ""
    """Of kernels: those of short runs or those under load; empty at the rates of datasheets, and on CPUs. The default
    is for records that ship and are older than this field.
    """
    notes: list[str]
    """What was extrapolated or came from elsewhere."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated step. Times in seconds, sizes in bytes."""

    step_time_s: float
    interval_s: Interval | None
    """The 90 % interval; None where it was not asked for, or the profile has no residuals."""
    step_times_s: tuple[float, ...] = ()
    """Of each seed of noise that was played, in order; the step time is their median. The default is for records that
    ship and are older than this field.
    """
    tokens_per_s_per_gpu: float
    mfu: float | None
    """Model FLOPs of the scope over the peak: under the mask, backward twice the forward pass, nothing recomputed."""
    peak_hbm_bytes: int
    peak_host_bytes: int
    """Of the rank that needs most of its host's memory."""
    fits: bool | None
    """False if buffers alone exceed a GPU's memory, or its host's; else None, not known: below the scope of a whole
    step parameters and optimiser are not part of it."""
    memory: dict[str, int]
    """At the peak of the rank that needs most, by category."""
    breakdown: dict[PartName, float]
    """Of the critical rank: the one that waits least."""
    critical_rank: int
    bound_by: str
    floors: dict[str, float]
    """Times that nothing can beat: by FLOPs at the peak, and by bytes on each kind of link."""
    schedule_hash: str
    evidence: Evidence


def report(simulation: Simulation, *, with_interval: bool = False) -> Report:
    """Return the figures of a simulated schedule; its interval takes two more simulations."""
    (checked, cluster, *_), trace = simulation.fold, simulation.trace
    schedule = simulation.checked.schedule
    workload, ranks, replicas = schedule.header.workload, schedule.num_ranks, schedule.header.mesh.dp
    step_s = trace.step_time_s
    critical = critical_rank(trace)
    parts = breakdown(trace, critical)
    walked = walks(checked)
    most = max(walked, key=lambda found: found.peak_bytes)
    beyond_dram = _beyond_dram(walked, cluster)
    lower = floors(checked, cluster)
    peak = math.fsum(cluster.peak_flops_per_s(rank, workload.dtype) for rank in range(ranks))
    return Report(
        step_time_s=step_s,
        interval_s=interval(simulation) if with_interval else None,
        step_times_s=simulation.step_times_s,
        tokens_per_s_per_gpu=replicas * workload.batch * workload.real_seq / ranks / step_s if step_s else 0.0,
        mfu=replicas * _model_flops(checked) / (peak * step_s) if step_s else None,
        peak_hbm_bytes=most.peak_bytes,
        peak_host_bytes=max(found.host_peak_bytes for found in walked),
        fits=False if beyond_dram or _beyond_hbm(walked, cluster) else None,
        memory={str(name): size for name, size in sorted(most.by_category.items()) if size},
        breakdown=parts,
        critical_rank=trace.numbers[critical],
        bound_by=bound_by(parts, links_s(checked, cluster)),
        floors=lower,
        schedule_hash=trace.schedule_hash,
        evidence=evidence(simulation, beyond_dram),
    )


def _beyond_hbm(walked: list[MemoryWalk], cluster: Cluster) -> bool:
    """Return whether some memory is too small for what is in it: a GPU has its own, the ranks of a host share one."""
    peaks = [found.peak_bytes for found in walked]
    held = sum(peaks) if cluster.spec.gpu.kind == "cpu" else max(peaks)
    return held > cluster.spec.hbm.capacity_bytes


def _beyond_dram(walked: list[MemoryWalk], cluster: Cluster) -> list[str]:
    """Return a note for each socket whose memory is less than what its ranks keep there."""
    spec = cluster.spec
    if spec.socket is None:
        return []
    held: dict[int, int] = {}
    for device, found in zip(cluster.devices, walked, strict=False):
        socket = socket_of(spec, device.number)
        held[socket] = held.get(socket, 0) + found.host_peak_bytes
    room = spec.socket.dram.capacity_bytes
    return [
        f"socket {number} is given {nbytes / 1e9:.4g} GB to keep and has {room / 1e9:.4g} GB of memory"
        for number, nbytes in held.items()
        if nbytes > room
    ]


def _model_flops(checked: Checked) -> float:
    """Return the FLOPs that the model asks for in one replica. A backward pass needs four matmuls; the fifth, which the
    kernels do and ``attention_flops`` counts, recomputes the scores.
    """
    workload = checked.schedule.header.workload
    forward = msgspec.structs.replace(workload, passes="forward", seq=workload.real_seq, padding=0)
    flops = workload.layers * attention_flops(forward) + gemm_flops(forward)
    return flops * (workload.forward + 2 * workload.backward)


class _Work(NamedTuple):
    """What a schedule asks of any machine, in all."""

    flops: list[Counter[Dtype]]
    """Per rank."""
    sent_bytes: Counter[tuple[int, int]]
    """Of messages, by source and target."""
    collectives: Counter[tuple[CollectiveName, tuple[int, ...], int]]
    """How many there are over some ranks of some bytes, as ``link_traffic`` takes them."""
    host_bytes: Counter[tuple[int, bool]]
    """Of copies, by rank and whether they go to its host."""


@kept
def _work(checked: Checked) -> _Work:
    arrays = lowered(checked)
    found = _Work([Counter() for _ in checked.kernels], Counter(), Counter(), Counter())
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
        found.host_bytes[program.rank, op.stream == OFFLOAD] += program.nbytes(op.source) * count
    return found


def floors(checked: Checked, cluster: Cluster) -> dict[str, float]:
    """Return lower bounds of the step that no algorithm beats: the most loaded device at its peak, and the link, or the
    links of a rank or node together, with most to carry, by their widest kind.
    """
    work = _work(checked)
    own: list[float] = []
    shared: dict[int, float] = {}
    for rank, of_rank in enumerate(work.flops):
        device = cluster.devices[rank]
        busy_s = sum(flops / cluster.peak_flops_per_s(rank, dtype) for dtype, flops in of_rank.items())
        at_once = max(cluster.resources[device.compute].capacity / device.compute_units, 1.0)
        own.append(busy_s)
        shared[device.compute] = shared.get(device.compute, 0.0) + busy_s / at_once
    lower = {"compute": max([*own, *shared.values()], default=0.0)}
    together: dict[frozenset[int], float] = {}
    for links, nbytes in _needs(work, cluster):
        together[links] = together.get(links, 0.0) + nbytes
    for links, nbytes in _with_inner(together):
        kind = max((cluster.resources[link] for link in links), key=lambda one: (one.capacity, one.group)).group
        lower[kind] = max(lower.get(kind, 0.0), nbytes / rate(links, cluster))
    return dict(sorted(lower.items()))


def links_s(checked: Checked, cluster: Cluster) -> dict[str, float]:
    """Return how long the most loaded link of each kind is busy, as the algorithms of collectives load it."""
    load: dict[int, float] = {}
    work = _work(checked)
    for more, times in _loads(work, cluster):
        for link, nbytes in more.items():
            load[link] = load.get(link, 0.0) + nbytes * times
    found: dict[str, float] = {}
    for link, nbytes in load.items():
        resource = cluster.resources[link]
        found[resource.group] = max(found.get(resource.group, 0.0), nbytes / resource.capacity)
    return dict(sorted(found.items()))


def _needs(work: _Work, cluster: Cluster) -> Iterator[Need]:
    """Yield what links carry at least: of messages and copies the links of their way, of collectives what any needs."""
    for more, times in _of_routes(work, cluster):
        yield from ((frozenset([link]), nbytes * times) for link, nbytes in more.items())
    for (name, ranks, nbytes), count in work.collectives.items():
        for links, least in needs(name, ranks, nbytes, cluster, _played(ranks, work)):
            yield links, least * count


def _with_inner(found: dict[frozenset[int], float]) -> Iterator[Need]:
    """Yield sets of links with what they carry together: also what sets within them do."""
    by_first: dict[int, list[frozenset[int]]] = {}
    for links in found:
        by_first.setdefault(min(links), []).append(links)
    for links in found:
        inner = (some for first in links for some in by_first.get(first, ()) if some <= links)
        yield links, math.fsum(found[some] for some in inner)


def _loads(work: _Work, cluster: Cluster) -> Iterator[tuple[dict[int, float], int]]:
    """Yield bytes per link, and how many times they pass it."""
    yield from _of_routes(work, cluster)
    for (name, ranks, nbytes), count in work.collectives.items():
        yield link_traffic(name, ranks, nbytes, cluster, _played(ranks, work)).nbytes, count


def _played(ranks: tuple[int, ...], work: _Work) -> int | None:
    """Return how many ranks of a group are played, None for all."""
    own = sum(rank < len(work.flops) for rank in ranks)
    return own if own < len(ranks) else None


def _of_routes(work: _Work, cluster: Cluster) -> Iterator[tuple[dict[int, float], int]]:
    """Yield bytes per link, and how many times they pass it, of what takes a route of its own."""
    for pair, nbytes in work.sent_bytes.items():
        yield cluster.route(*pair).load(nbytes), 1
    if cluster.spec.gpu.kind == "cuda":
        for (rank, to_host), nbytes in work.host_bytes.items():
            yield cluster.host_route(rank, to_host=to_host).load(nbytes), 1


def bound_by(parts: dict[PartName, float], busy: dict[str, float]) -> str:
    """Return what most of the step goes to: compute, copy, imbalance, host, or the kind of link with most to do."""
    largest = max(parts, key=lambda name: parts[name])
    if largest == "communication":
        return max(busy, key=lambda name: busy[name], default="communication")
    return {"synchronisation": "imbalance", "idle": "host"}.get(largest, largest)


def evidence(simulation: Simulation, more: list[str]) -> Evidence:
    """Return what a simulation rests on; ``more`` is what else has to be said."""
    model = simulation.checked.schedule.header.workload.model
    notes = [*sorted(simulation.cost.notes), *more, *races(simulation), *(model.notes or ())]
    profile = simulation.profile
    if profile is None:
        name = simulation.cluster.spec.name
        rates = (
            f"no profile: every kernel and link runs at the datasheet rates of {name!r}, real kernels are 1.4 to 2 "
            f"times slower"
        )
        return Evidence(profile="datasheet", measured_on="", created="", complete=True, rates="", notes=[rates, *notes])
    return Evidence(
        profile=profile.name,
        measured_on=profile.machine.gpu,
        created=profile.created,
        complete=profile.complete,
        rates=(profile.rates or "burst") if simulation.cluster.spec.gpu.kind == "cuda" else "",
        notes=notes,
    )
