"""A traced run beside the simulated one: seconds by kind of work, ranks that differ, waiting, an idle GPU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from sim.diagnose.kernel_names import KERNELS, KINDS_OF_WORK, TRANSFERS, WorkKind
from sim.diagnose.measured import Measured
from sim.diagnose.profiled import Span, TracedRank, ranks_of_rows
from sim.engine.play.lowered import lowered
from sim.engine.play.simulate import Simulation

_SHARE = 0.05
"""Of a step: what is less is not told."""
_OFF = 1.25
"""By so much a kind has to differ to be told: assumed, above what calibrated kernels are off by."""
_APART = 1.15
"""So far above the median of ranks' kernels is another rank: assumed, above jitter."""
_UNKNOWN_SHOWN = 5


class KindRow(NamedTuple):
    """Seconds of a step that one kind of work takes, mean over ranks."""

    kind: WorkKind
    measured_s: float
    """Of transfers with their wait for peers, as kernels of NCCL have it."""
    simulated_s: float


class RankRow(NamedTuple):
    """Seconds of a step of one rank."""

    rank: int
    kernels_s: float
    transfers_s: float
    waiting_s: float
    """Of transfers: beyond the rank that took the same one fastest."""
    idle_s: float
    """Neither kernel, nor transfer, nor copy."""


class Traced(NamedTuple):
    """What traces say of a run."""

    kinds: list[KindRow]
    ranks: list[RankRow]
    unknown: dict[str, float]
    """Seconds of a step by name, of what no pattern knows; mean over ranks."""
    findings: list[str]


def with_traces(measured: Measured, ranks: Sequence[TracedRank], num_ranks: int) -> Measured:
    """Return what was measured, and what traces measure beside it: the step, the kernels of all ranks and kinds."""
    if not ranks:
        return measured
    of_steps = [_busy_s(one, KERNELS) for one in ranks]
    kernels = tuple(map(statistics.median, of_steps))
    whole = [one.rank for one in ranks] == [*range(num_ranks)] and min(map(min, of_steps)) > 0
    rated = measured.step_s(1, 1) is not None
    return msgspec.structs.replace(
        measured,
        step_time_s=measured.step_time_s if rated else max(one.step_s for one in ranks),
        rank_s=measured.rank_s or (kernels if whole else ()),
        kind_s=_mean_kinds(ranks),
        loops_apart=_sees_kernels(ranks),
        step_error=0.0 if rated else max(_error_of_median(np.log(one.steps_s).tolist()) for one in ranks),
        rank_error=0.0 if measured.rank_s or not whole else _error_between(of_steps),
    )


def _sees_kernels(ranks: Sequence[TracedRank]) -> bool:
    """Return whether traces have each kernel by itself; Longstep's own have ops, of which a loop over tiles is one."""
    return all(one.source != "Longstep" for one in ranks)


def _error_of_median(values: Sequence[float]) -> float:
    """Return the standard error of a median, for a normal distribution; 0 for a single value, whose error is
    not known.
    """
    return math.sqrt(math.pi / 2 / len(values)) * float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _error_between(of_steps: list[list[float]]) -> float:
    """Return the largest standard error of how far a rank is from the median of ranks, in logarithms."""
    if len({len(steps) for steps in of_steps}) > 1:
        return 0.0
    logs = np.log(of_steps)
    return max(map(_error_of_median, (logs - np.median(logs, axis=0)).tolist()))


def kinds_s(simulation: Simulation, *, loops_apart: bool = False) -> dict[WorkKind, float]:
    """Return the seconds that each kind of work takes in a simulated step, mean over all ranks; with ``loops_apart``
    those of a loop over tiles by each of its kernels, as a profiler sees them, and not all as those of products.
    """
    ranks = ranks_of_rows(row._asdict() for row in simulation.trace.rows)
    of_rank = {one.rank: _sums(one) for one in ranks}
    every = [of_rank.get(rank, {}) for rank in range(simulation.trace.num_ranks)]
    found = {
        kind: statistics.fmean(simulation.fold.of_all([sums.get(kind, 0.0) for sums in every]))
        for kind in KINDS_OF_WORK
    }
    if loops_apart:
        streamed_s = statistics.fmean(simulation.fold.of_all(_streamed_s(simulation)))
        found["gemm"] -= streamed_s
        found["elementwise"] += streamed_s
    return found


def _streamed_s(simulation: Simulation) -> list[float]:
    """Return per rank the seconds of loops over tiles in which no product runs, by what each of their kernels costs."""
    arrays, cost, trace = lowered(simulation.fold.checked), simulation.cost, simulation.trace
    found = [0.0] * trace.num_ranks
    for op in np.flatnonzero(arrays.op_use >= 0).tolist():
        rank, use = int(arrays.op_rank[op]), arrays.uses.found[arrays.op_use[op]]
        if use.loop:
            parts_s = [(one.kernel, count * cost.kernel_seconds(rank, one)[0]) for one, count in use.loop]
            share = math.fsum(s for name, s in parts_s if name != "gemm") / math.fsum(s for _, s in parts_s)
            found[rank] += share * float(trace.ended_s[op] - trace.begun_s[op])
    return found


def traced(ranks: Sequence[TracedRank], simulation: Simulation) -> Traced:
    """Return what traces say beside the simulated run; there is at least one."""
    measured, simulated = _mean_kinds(ranks), kinds_s(simulation, loops_apart=_sees_kernels(ranks))
    kinds = [KindRow(kind, measured[kind], simulated[kind]) for kind in KINDS_OF_WORK
             if measured[kind] or simulated[kind]]  # fmt: skip
    waiting = _waiting_s(ranks)
    rows = []
    for one in ranks:
        sums = _sums(one)
        busy_s = statistics.median(_busy_s(one, KINDS_OF_WORK))
        rows.append(
            RankRow(
                one.rank,
                statistics.median(_busy_s(one, KERNELS)),
                sum(sums.get(kind, 0.0) for kind in TRANSFERS),
                waiting[one.rank],
                max(0.0, one.step_s - busy_s),
            )
        )
    unknown: dict[str, float] = {}
    for one in ranks:
        for span in one.work:
            if span.kind == "unknown":
                unknown[span.name] = unknown.get(span.name, 0.0) + span.seconds / one.steps / len(ranks)
    unknown = dict(sorted(unknown.items(), key=lambda pair: -pair[1]))
    step_s = max(one.step_s for one in ranks)
    findings = [*_kinds_off(kinds, step_s), *_ranks_off(rows, step_s), *_host_bound(ranks, rows, simulation)]
    return Traced(kinds, rows, unknown, findings + _not_known(unknown, step_s))


def _sums(one: TracedRank) -> dict[WorkKind, float]:
    """Return the seconds of a step by kind, the median of steps."""
    of_kind: dict[WorkKind, list[float]] = {}
    for number, spans in enumerate(one.of_steps()):
        for span in spans:
            of_kind.setdefault(span.kind, [0.0] * one.steps)[number] += span.seconds
    return {kind: statistics.median(sums) for kind, sums in of_kind.items()}


def _mean_kinds(ranks: Sequence[TracedRank]) -> dict[WorkKind, float]:
    every = [_sums(one) for one in ranks]
    return {kind: statistics.fmean(sums.get(kind, 0.0) for sums in every) for kind in KINDS_OF_WORK}


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the times at which any of some spans goes on, apart from each other; in order."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda one: one.begin_s):
        if found and span.begin_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end_s))
        else:
            found.append((span.begin_s, span.end_s))
    return found


def _busy_s(one: TracedRank, kinds: Sequence[WorkKind]) -> list[float]:
    """Return the seconds of every step in which work of some kinds goes on."""
    last_s = one.bounds_s[-1]
    return [
        sum(min(end, last_s) - begin for begin, end in _union(span for span in spans if span.kind in kinds))
        for spans in one.of_steps()
    ]


def _waiting_s(ranks: Sequence[TracedRank]) -> dict[int, float]:
    """Return the seconds of a step that transfers of each rank take beyond the rank whose same transfer was fastest.

    The n-th transfer of a kind on one rank is that on another, if all have as many: a kernel of NCCL is on its GPU
    from when its rank comes to the end, so that the last one to come takes least.
    """
    waiting = dict.fromkeys((one.rank for one in ranks), 0.0)
    for kind in TRANSFERS:
        lengths = [[span.seconds for span in one.work if span.kind == kind] for one in ranks]
        if len(ranks) < 2 or len({len(of_rank) for of_rank in lengths}) != 1:
            continue
        for together in zip(*lengths, strict=True):
            for one, taken in zip(ranks, together, strict=True):
                waiting[one.rank] += (taken - min(together)) / one.steps
    return waiting


def _kinds_off(kinds: list[KindRow], step_s: float) -> list[str]:
    """Return which kinds of kernels and copies take longer or shorter than simulated, the largest difference first."""
    found = []
    for row in sorted(kinds, key=lambda row: -abs(row.measured_s - row.simulated_s)):
        if row.kind in TRANSFERS or row.kind == "unknown" or abs(row.measured_s - row.simulated_s) < _SHARE * step_s:
            continue
        line = f"{row.kind}: {row.measured_s:.4g} s a step in the trace, {row.simulated_s:.4g} s simulated"
        if not row.measured_s:
            found.append(f"{line}: no such kernel ran")
        elif not row.simulated_s:
            found.append(f"{line}: the configuration has none")
        elif max(row.measured_s / row.simulated_s, row.simulated_s / row.measured_s) > _OFF:
            found.append(f"{line}: {row.measured_s / row.simulated_s:.3g} times")
    return found


def _ranks_off(rows: list[RankRow], step_s: float) -> list[str]:
    """Return which rank's kernels take longer than those of others, and who waits."""
    if len(rows) < 2:
        return []
    found = []
    slowest = max(rows, key=lambda row: row.kernels_s)
    others_s = statistics.median(row.kernels_s for row in rows if row is not slowest)
    if others_s and slowest.kernels_s > _APART * others_s:
        found.append(
            f"rank {slowest.rank} runs kernels for {slowest.kernels_s:.4g} s a step, the others {others_s:.4g} s: it "
            f"is slow, or has more work"
        )
    waits = max(rows, key=lambda row: row.waiting_s)
    least = min(rows, key=lambda row: row.waiting_s)
    if waits.waiting_s - least.waiting_s > _SHARE * step_s:
        found.append(
            f"rank {waits.rank} waits {waits.waiting_s:.4g} s a step in transfers for others; rank {least.rank}, which "
            f"waits least ({least.waiting_s:.4g} s), is the one that is waited for"
        )
    return found


def _host_bound(ranks: Sequence[TracedRank], rows: list[RankRow], simulation: Simulation) -> list[str]:
    """Return whether a GPU is idle for longer than simulated, and what its host does meanwhile."""
    if any(one.source != "GPU kernels" for one in ranks):
        return []
    row, one = max(zip(rows, ranks, strict=True), key=lambda pair: pair[0].idle_s / pair[1].step_s)
    simulated = ranks_of_rows(each._asdict() for each in simulation.trace.rows)
    expected = max((1 - sum(_busy_s(each, KINDS_OF_WORK)) / each.step_s for each in simulated), default=0.0)
    share = row.idle_s / one.step_s
    if share - expected < _SHARE:
        return []
    line = f"the GPU of rank {row.rank} is idle for {100 * share:.0f} % of a step ({100 * expected:.0f} % simulated)"
    if one.host:
        waits = [span for span in one.host if "Synchronize" in span.name]
        awaited, active = _union(waits), _union(span for span in one.host if "Synchronize" not in span.name)
        gaps = _gaps(one)
        idle_s = sum(end - begin for begin, end in gaps)
        launching, waiting = (100 * _common_s(gaps, spans) / idle_s for spans in (active, awaited))
        line += f": its host runs operators and launches in {launching:.0f} % of that time, and waits in "
        line += f"{waiting:.0f} %"
    return [f"{line}: host-bound, kernels are issued too late (small kernels, .item(), data loading)"]


def _gaps(one: TracedRank) -> list[tuple[float, float]]:
    """Return when a GPU is idle."""
    first_s, last_s = one.bounds_s[0], one.bounds_s[-1]
    busy = [(first_s, first_s), *_union(one.work), (last_s, last_s)]
    return [(end, begin) for (_, end), (begin, _) in pairwise(busy) if begin > end]


def _common_s(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Return the seconds that two lists of times have in common; each is in order and without overlaps."""
    total, at = 0.0, 0
    for begin, end in some:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        look = at
        while look < len(others) and others[look][0] < end:
            total += min(end, others[look][1]) - max(begin, others[look][0])
            look += 1
    return total


def _not_known(unknown: dict[str, float], step_s: float) -> list[str]:
    """Return what kernels no pattern knows, where they take some of a step."""
    total_s = sum(unknown.values())
    if total_s < 0.01 * step_s:
        return []
    most = "; ".join(f"{name[:60]} {seconds:.3g} s" for name, seconds in [*unknown.items()][:_UNKNOWN_SHOWN])
    return [f"kernels whose names are not known take {total_s:.4g} s a step: {most}"]
