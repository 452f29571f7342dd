"""Measures interference between kernels and transfers.

Each pair is timed within one run, alternately alone and together, because the machine's speed drifts between runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import chain, combinations
from typing import Literal, NamedTuple

import numpy as np

from calibrate.measure.cases import KernelCase, cases_of
from calibrate.measure.fit import COMPUTE_BOUND
from calibrate.measure.interference_schedules import Place, Transfer, interference_schedules
from calibrate.measure.kernels import Lap, RepeatedKernel
from runtime.execution.groups import start_together
from runtime.processes.launch import Session
from runtime.processes.rank import RankContext
from runtime.run import ScheduleRun
from sim.accounts.trace import Trace
from sim.schedule.derive.kernels import KernelUse
from sim.schedule.ir.program import Program
from sim.schedule.proof.check import check
from sim.words.profile import MeasuredJitter, Slowdown
from sim.words.workload import Dtype, ModelSpec

_TURN_S = 0.05
"""About how long ranks repeat a kernel before it is the turn of more of them."""
_MOST_RUNS = 40
_TURNS = 9
_WARM = 2
_REPEATS = 8
_ENOUGH_RUNS = 5
_NINE_OF_TEN = 1.645
"""What nine of ten values of |z| lie below, z standard normal."""
_STATE = "repeated kernel"

Clock = Literal["wall", "thread"]


class Crowd(NamedTuple):
    """One kernel, on one rank and on several at once."""

    slowdowns: list[Slowdown]
    together: list[list[list[float]]]
    """Per turn and rank the wall time in seconds of every run while all ranks are busy."""


def crowded_cases(model: ModelSpec, dtype: Dtype) -> list[KernelCase]:
    """Return one case of every kernel and variant that a layer, a ring and Ulysses run."""
    found: dict[tuple[str, str], KernelCase] = {}
    for case in cases_of(interference_schedules("exchange", 2, model, dtype).sequential.program(0)):
        found.setdefault((case.use.kernel, case.use.variant), case)
    return list(found.values())


def short_cases(model: ModelSpec, dtype: Dtype) -> list[KernelCase]:
    """Return the two shortest of them that computing bounds: what most of a step's time goes into is like them."""
    bound = [case for case in crowded_cases(model, dtype) if case.use.kernel in COMPUTE_BOUND]
    return sorted(bound, key=lambda case: case.rough_s)[:2]


def time_crowded(session: Session, case: KernelCase) -> Crowd:
    """Return how much longer a kernel takes on 2, 3, … ranks at once than on one of them, by both clocks."""
    counts = [count for count in (1, 2, 3, 4, 8) if count < session.ranks] + [session.ranks]
    warm = chain(*session.call(_set_up, case.program.to_json()))
    runs = min(max(round(_TURN_S / statistics.median(lap.wall_s for lap in warm)), 1), _MOST_RUNS)
    turns: list[dict[int, list[list[Lap]]]] = [
        {count: session.call(_turn, count, runs)[:count] for count in counts} for _ in range(_TURNS)
    ]
    session.call(_clean_up)
    slowdowns = []
    for clock, seconds_of in _CLOCKS.items():
        for count in counts[1:]:
            pairs = [
                (statistics.median(map(seconds_of, turn[1][0])), statistics.median(map(seconds_of, laps)))
                for turn in turns
                for laps in turn[count]
            ]
            slowdowns.append(_slowdown("kernel", case.use, "ranks", count, pairs, clock))
    together = [[[lap.wall_s for lap in laps] for laps in turn[session.ranks]] for turn in turns]
    return Crowd(slowdowns, together)


_CLOCKS: dict[Clock, Callable[[Lap], float]] = {"wall": lambda lap: lap.wall_s, "thread": lambda lap: lap.cpu_s}


def jitter_of(crowds: list[Crowd]) -> MeasuredJitter | None:
    """Return how much kernels scatter: medians over kernels; None if none was repeated often enough to tell."""
    shares, correlations, runs = [], [], 0
    for crowd in crowds:
        turns = [np.array(turn) for turn in crowd.together if len(turn[0]) >= _ENOUGH_RUNS]
        if not turns:
            continue
        relative = [times / np.median(times) for times in turns]
        shares.append((float(np.percentile(np.concatenate(relative, axis=1), 90)) - 1) / _NINE_OF_TEN)
        pairs = [
            float(np.corrcoef(one, other)[0, 1])
            for times in relative
            for one, other in combinations(np.argsort(np.argsort(times)), 2)
        ]
        correlations.append(statistics.median(pairs))
        runs += sum(times.size for times in turns)
    if not shares:
        return None
    return MeasuredJitter(share=statistics.median(shares), correlation=statistics.median(correlations), runs=runs)


def _set_up(context: RankContext, program_json: bytes) -> list[Lap]:
    """Make the operands of a kernel on every rank; return the times of first runs."""
    repeated = RepeatedKernel(Program.from_json(program_json), context)
    context.state[_STATE] = repeated
    return repeated.once_each()


def _turn(context: RankContext, active: int, runs: int) -> list[Lap]:
    """Repeat the kernel on the first ``active`` ranks, which start together; the others sleep."""
    start_together(context.ranks, context.device)
    repeated: RepeatedKernel = context.state[_STATE]
    return [repeated.once() for _ in range(runs)] if context.rank < active else []


def _clean_up(context: RankContext) -> None:
    del context.state[_STATE]


def time_interference(session: Session, transfer: Transfer, model: ModelSpec, dtype: Dtype) -> list[Slowdown]:
    """Return the slowdown of every kernel during a transfer, and of the transfer during it, on all ranks."""
    schedules = interference_schedules(transfer, session.ranks, model, dtype)
    runs = [ScheduleRun(session, check(schedule)) for schedule in (schedules.sequential, schedules.overlapped)]
    sequential, overlapped = runs
    steps = [(sequential.step(ahead=True).trace, overlapped.step(ahead=True).trace) for _ in range(_WARM + _REPEATS)]
    for run in runs:
        run.close()
    return [
        _slowdown(slowed, place.use, transfer, session.ranks, pairs)
        for place in schedules.places
        for slowed, pairs in compared(place, steps[_WARM:]).items()
    ]


def compared(
    place: Place, steps: list[tuple[Trace, Trace]]
) -> dict[Literal["kernel", "transfer"], list[tuple[float, float]]]:
    """Return per step and rank the seconds of the kernel after and during the transfer, and of the transfer before and
    during the kernel; ``steps`` has the traces of both schedules.
    """
    kernel, transfer = [], []
    for pair in steps:
        rows = [{(row.rank, row.op): row.busy_s for row in trace.rows} for trace in pair]
        for rank in range(pair[0].num_ranks):
            kernel.append((rows[0][rank, place.kernel(overlapped=False)], rows[1][rank, place.kernel(overlapped=True)]))
            transfer.append((rows[0][rank, place.transfer], rows[1][rank, place.transfer]))
    return {"kernel": kernel, "transfer": transfer}


def _slowdown(
    slowed: Literal["kernel", "transfer"],
    use: KernelUse,
    beside: Literal["ranks"] | Transfer,
    ranks: int,
    pairs: list[tuple[float, float]],
    clock: Clock = "wall",
) -> Slowdown:
    """Return the slowdown that a profile stores, from pairs of seconds: alone and during the other."""
    low, median, high = (float(x) for x in np.percentile([slow / alone for alone, slow in pairs], [25, 50, 75]))
    return Slowdown(
        slowed=slowed,
        kernel=use.kernel,
        variant=use.variant,
        dtype=use.dtype,
        shape=use.shape,
        nbytes=use.hbm_bytes,
        beside=beside,
        ranks=ranks,
        clock=clock,
        alone_s=statistics.median(alone for alone, _ in pairs),
        median=median,
        low=low,
        high=high,
        runs=len(pairs),
    )
