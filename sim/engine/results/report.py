"""What a simulation says: one object with the figures that ``longstep simulate --json`` prints."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sim.accounts.breakdown import PartName, breakdown, critical_rank
from sim.accounts.bubbles import Stage, stages_of
from sim.accounts.memory import MemoryWalk, walks
from sim.accounts.reserved import Reserved
from sim.accounts.uneven import uneven
from sim.base.garbage import garbage_collection_off
from sim.engine.intervals.interval import Interval, interval
from sim.engine.play.simulate import Simulation
from sim.engine.results.floors import floors
from sim.engine.results.races import races
from sim.engine.results.room import Room, Verdict, allocated, held_by_socket, room_of, tiers
from sim.engine.results.sensitivity import NOT_ASKED, bound
from sim.schedule.ir.program import Claims
from sim.schedule.model.layer import gemm_flops
from sim.schedule.write.attention import attention_flops
from sim.words.profile import Rates
from sim.words.workload import Workload
from topology.cluster import Cluster
from topology.specs import ClusterSpec


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


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What training at the speed of one step takes."""

    hfu: float | None
    """FLOPs of all matrix products and of attention over the peak: with what checkpointing, tiles and fused attention
    compute again, which ``mfu`` leaves out (arXiv:2204.02311 appendix B); None where a builder claims no FLOPs."""
    hours_per_billion_tokens: float
    gpu_hours_per_billion_tokens: float
    """As many for each GPU, together."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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
    """Allocated by the rank that needs most: buffers, and what kernels hold meanwhile. Context, communicators and what
    else no buffer can have are beside it (``topology.reserved``); of training steps ``room`` adds them up."""
    peak_host_bytes: int
    """Of the rank that needs most of its host's memory."""
    fits: bool | None
    """Whether a training step does, as ``room`` says; None at the limit. Below that scope parameters and optimiser are
    not part of it: False if buffers alone exceed a GPU's memory, or its host's; else None, not known."""
    memory: dict[str, int]
    """At the peak of the rank that needs most, by category."""
    breakdown: dict[PartName, float]
    """Of the critical rank: the one that waits least."""
    critical_rank: int
    bound_by: str
    """The figure of the machine whose doubling saves most, host, or imbalance; empty where it was not asked for."""
    floors: dict[str, float]
    """Times that nothing can beat: by FLOPs at the peak, and by bytes on each kind of link."""
    schedule_hash: str
    evidence: Evidence
    saves: dict[str, float] = {}
    """What doubling each figure saves, as shares of the step (``sim.engine.results.sensitivity.Bound``). The default is
    for records that ship and are older than this field.
    """
    room: Room | None = None
    """The memory of a training step by its terms, and its limits; None, and not in JSON, below that scope."""
    training: Training | None = None
    """Of a training step, too."""
    stages: tuple[Stage, ...] = ()
    """Of a pipeline, in the order of the model."""
    uneven: float | msgspec.UnsetType = msgspec.UNSET
    """Of a pipeline whose micro-batches have documents of their own, the share of the step that it waits longer than if
    each pass of a stage took as long for all micro-batches as on average; unset, and not in JSON, of others."""
    peak_reserved: Reserved | None = None
    """Of a training step whose software's allocator is known, on the stage where it reserves most: what logs have as
    torch.cuda.max_memory_reserved (``sim.accounts.reserved``)."""

    @property
    def verdict(self) -> Verdict:
        """Whether it fits, in words."""
        if self.room:
            return self.room.verdict
        return "not known" if self.fits is None else "yes" if self.fits else "no"


@garbage_collection_off()
def report(
    simulation: Simulation, *, with_interval: bool = False, with_bound: bool = True, with_hash: bool = True
) -> Report:
    """Return the figures of a simulated schedule; its interval takes two more plays, what bounds it one, and the hash
    of the schedule as long as several.
    """
    (checked, cluster, *_), trace = simulation.fold, simulation.trace
    schedule = simulation.checked.schedule
    workload, ranks, replicas = schedule.header.workload, schedule.num_ranks, schedule.header.mesh.dp
    step_s = trace.step_time_s
    critical = critical_rank(trace)
    parts = breakdown(trace, critical)
    walked = walks(checked)
    most = max(walked, key=lambda found: found.peak_bytes)
    beyond_dram = _beyond_dram(walked, cluster)
    beyond_hbm = hbm_held(walked, cluster.spec) > cluster.spec.hbm.capacity_bytes
    step = workload.scope == "step"
    profile = simulation.profile
    of_allocator = allocated(checked, cluster, profile.allocator) if profile and step else None
    room = room_of(schedule.header, walked, cluster, of_allocator) if step else None
    lower, bounded = floors(simulation.fold), bound(simulation) if with_bound else NOT_ASKED
    peak = peak_flops_per_s(workload, cluster, ranks)
    tokens_per_s = replicas * workload.num_real_tokens / step_s if step_s else 0.0
    return Report(
        step_time_s=step_s,
        interval_s=interval(simulation) if with_interval else None,
        step_times_s=simulation.step_times_s,
        tokens_per_s_per_gpu=tokens_per_s / ranks,
        mfu=mfu_of(workload, replicas, peak, step_s),
        peak_hbm_bytes=most.peak_bytes,
        peak_host_bytes=max(found.host_peak_bytes for found in walked),
        peak_reserved=max(of_allocator.stages, key=lambda one: one.most_bytes) if of_allocator else None,
        fits=room.fits if room else False if beyond_dram or beyond_hbm else None,
        memory={str(name): size for name, size in sorted(most.by_category.items()) if size},
        breakdown=parts,
        critical_rank=trace.numbers[critical],
        bound_by=bounded.by,
        saves=bounded.saves,
        floors=lower,
        schedule_hash=trace.schedule_hash if with_hash else "",
        evidence=evidence(simulation, [*beyond_dram, *races(simulation)]),
        room=room,
        stages=stages_of(
            trace, walked, schedule.header, simulation.fold.counts, of_allocator.stages if of_allocator else ()
        ),
        uneven=uneven(trace, checked.schedule),
        training=_training(schedule.header.claims, peak * step_s, tokens_per_s, ranks) if room and step_s else None,
    )


def _training(claims: Claims | None, peak_flops: float, tokens_per_s: float, ranks: int) -> Training:
    """Return what training takes, of the FLOPs that all ranks could do in a step."""
    hours = 1e9 / tokens_per_s / 3600
    return Training(
        hfu=(claims.attention_flops + claims.gemm_flops) / peak_flops if claims else None,
        hours_per_billion_tokens=hours,
        gpu_hours_per_billion_tokens=ranks * hours,
    )


def hbm_held(walked: list[MemoryWalk], spec: ClusterSpec) -> int:
    """Return the most bytes that are in any one memory: a GPU has its own, the ranks of a host share one."""
    peaks = [found.peak_bytes for found in walked]
    return sum(peaks) if spec.gpu.kind == "cpu" else max(peaks)


def _beyond_dram(walked: list[MemoryWalk], cluster: Cluster) -> list[str]:
    """Return a note for each socket whose memory is less than what its ranks keep there."""
    called = {"host": "of memory", "CXL": "behind CXL"}
    return [
        f"socket {number} is given {tier.held(nbytes) / 1e9:.4g} GB to keep and has {tier.capacity_bytes / 1e9:.4g} GB "
        f"{called[tier.memory]}"
        for number, nbytes in held_by_socket(walked, cluster).items()
        for tier in tiers(cluster.spec)
        if tier.held(nbytes) > tier.capacity_bytes
    ]


def peak_flops_per_s(workload: Workload, cluster: Cluster, ranks: int) -> float:
    """Return the FLOPs a second of so many ranks together, at their peaks."""
    return math.fsum(cluster.peak_flops_per_s(rank, workload.dtype) for rank in range(ranks))


def mfu_of(workload: Workload, replicas: int, peak: float, step_s: float) -> float | None:
    """Return the share of a ``peak`` of all ranks that the FLOPs of the model take; None for a step of no time."""
    return replicas * _model_flops(workload) / (peak * step_s) if step_s else None


def _model_flops(workload: Workload) -> float:
    """Return the FLOPs that the model asks for in one replica. A backward pass needs four matmuls; the fifth, which the
    kernels do and ``attention_flops`` counts, recomputes the scores.
    """
    return math.fsum([_flops_of(workload.of_sequence(number)) for number in range(len(workload.sequences or (None,)))])


def _flops_of(workload: Workload) -> float:
    """Return those of sequences that are alike."""
    whole = msgspec.structs.replace(workload, passes="both", seq=workload.real_seq, padding=0)
    alone = msgspec.structs.replace(whole, scope="attention", layers=1, passes="forward")
    attends = sum(attention_flops(one) * count for one, count in alone.kinds(workload.layers))
    gemms = gemm_flops(whole) / 3
    if workload.model.is_frozen and not workload.backward:
        gemms = gemm_flops(msgspec.structs.replace(whole, passes="forward"))  # a third only where all is trained
    forward = attends + gemms
    return forward * (workload.forward + 2 * workload.backward)


def evidence(simulation: Simulation, more: list[str]) -> Evidence:
    """Return what a simulation rests on; ``more`` is what else has to be said."""
    model = simulation.checked.schedule.header.workload.model
    taken = [simulation.cluster.spec.taken] if simulation.cluster.spec.taken else []
    notes = [
        *taken,
        *sorted(simulation.cost.notes),
        *sorted(simulation.cost.warnings),
        *more,
        *(model.notes or ()),
    ]
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
