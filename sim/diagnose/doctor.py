"""What a measured run points to: whether it is possible, and what explains it, each hypothesis simulated.

A cause is "consistent with" what was measured, never certain: those that several figures cannot tell apart are said so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sim.accounts.breakdown import attention_s
from sim.base.errors import InputError, LongstepError
from sim.diagnose.answer import Cause, Diagnosis, Verdict
from sim.diagnose.hypotheses import MACHINES, NO_FACTOR, PROGRAMS, Machine, Program, Sign, both
from sim.diagnose.judge import RANKS_WITHIN, Case, Judge, play, quick
from sim.diagnose.measured import Measured, findings_of_figures
from sim.diagnose.profiled import TracedRank
from sim.diagnose.traced import traced, with_traces
from sim.setup.answers.answer import grounds
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup

Progress = Callable[[int, int], object]

_MOVES = 0.05
"""What moves figures less, in units of how far they may be off, cannot be seen in them."""
_PAIRS = 8
"""How many pairs of causes are simulated where none alone explains a run."""
_TIME_WITHIN, _TRIES = 0.005, 12
"""How near to the time a factor is searched, and with how many plays."""


def doctor(
    setup: Setup,
    measured: Measured,
    also: Sequence[tuple[Setup, Measured]] = (),
    progress: Progress = lambda *_: None,
    traces: Sequence[TracedRank] = (),
) -> Diagnosis:
    """Return what a measured run points to, beside what its configuration is predicted to take.

    ``also`` are runs of the same job at other degrees, whose memory is compared. ``traces`` are
    what the profiler saw of its ranks (``sim.diagnose.profiled.read_traces``): the step time, kernel seconds of ranks
    and of kinds are theirs where they are not given. Raises InputError where nothing was
    measured, or the configuration cannot be simulated.

    >>> setup = Setup("zigzag", model="llama3-8b", cluster="hgx-h100", seq="256K", scope="attention")
    >>> found = doctor(setup, Measured(step_time_s=0.05))
    >>> found.verdict, "cp-off" in [cause.name for cause in found.consistent]
    ('impossible', True)
    """
    setup = setup.spelled_out()
    base = setup.predicted()
    measured = with_traces(measured, traces, _all_ranks(setup, traces))
    measured.require()
    ranks = setup.resolved().mesh.size
    if measured.rank_s and len(measured.rank_s) != ranks:
        raise InputError(f"`rank_times` of {len(measured.rank_s)} ranks: expected those of all {ranks}")
    judge = Judge(setup, measured, base)
    signs = judge.signs()
    floors = base.figures.floors
    floor_by = max(floors, key=lambda name: floors[name], default="")
    floor_s = floors.get(floor_by, 0.0)
    verdict = _verdict(judge.step_s, signs, floor_s)
    findings = findings_of_figures(measured, judge.step_s, base, judge.found)
    beside = traced(traces, base.simulation) if traces else None
    findings += beside.findings if beside else []
    findings += _memory_findings(judge, signs) + _between_runs(base, measured, also)
    tried = _Tried([], [], [])
    if signs or (measured.rank_s and judge.off(base.step_time_s, judge.peak_bytes, base.simulation) > 1):
        tried = _tried(judge, signs, progress)
    least, most = judge.memory_range(judge.peak_bytes)
    return Diagnosis(
        verdict=verdict,
        measured_s=judge.step_s,
        simulated_s=base.step_time_s,
        low_s=judge.low * base.step_time_s,
        high_s=judge.high * base.step_time_s,
        floor_s=floor_s,
        attention_s=float(attention_s(base.trace).max()),
        peak_hbm_bytes=judge.peak_bytes,
        findings=findings,
        causes=tried.causes,
        untold=tried.untold,
        skipped=tried.skipped,
        traced=beside,
        floor_by=floor_by,
        memory_bytes=measured.memory_bytes,
        memory_within=(max(0.0, least), most),
        grounds=grounds(base),
    )


def _all_ranks(setup: Setup, traces: Sequence[TracedRank]) -> int:
    """Return how many ranks a run has; raises InputError for traces of ranks that it has not."""
    size = setup.resolved().mesh.size
    strange = [one.rank for one in traces if one.rank >= size]
    if strange:
        raise InputError(
            f"`trace` is of rank {strange[0]}: expected ranks 0 to {size - 1} of {size}; set `gpus` to what ran, or "
            f"leave that file out"
        )
    return size


def _verdict(step_s: float | None, signs: set[Sign], floor_s: float) -> Verdict:
    if step_s is not None and step_s < floor_s:
        return "impossible"
    if "faster" in signs:
        return "too fast"
    if "slower" in signs:
        return "too slow"
    if signs & {"more memory", "less memory"}:
        return "memory differs"
    return "ranks differ" if signs else "healthy"


class _Tried(NamedTuple):
    """What became of hypotheses, as ``Diagnosis`` has it."""

    causes: list[Cause]
    untold: list[str]
    skipped: list[str]


def _tried(judge: Judge, signs: set[Sign], progress: Progress) -> _Tried:
    """Return the hypotheses that may explain such a run, simulated: each alone, and pairs where none does alone."""
    likely: list[Program | Machine] = [one for one in PROGRAMS if signs & {*one.signs}]
    if signs & {"slower", "uneven ranks"} and judge.step_s is not None:
        likely += MACHINES
    # signs say what to simulate first: of a run with one fault some figures are within what is known, others are not
    others: list[Program | Machine] = [one for one in PROGRAMS if one not in likely]
    tried = _Tried([], [], [])
    for some in (lambda: likely, lambda: others, lambda: _pairs(judge, tried.causes)):
        if any(cause.consistent for cause in tried.causes):
            break
        of_kind = some()
        for done, one in enumerate(of_kind):
            progress(done, len(of_kind))
            try:
                cause = _fitted(judge, one) if isinstance(one, Machine) else _played(judge, one)
            except LongstepError as error:
                tried.skipped.append(f"{one.name}: {error}")
                continue
            if cause and cause.moved < _MOVES:
                tried.untold.append(cause.name)
            elif cause:
                tried.causes.append(cause)
        progress(len(of_kind), len(of_kind))
    # what needs no fitted factor explains more with less
    tried.causes.sort(key=lambda cause: (not cause.consistent, cause.factor is not None, cause.off))
    return tried


def _pairs(judge: Judge, causes: Sequence[Cause]) -> list[Program]:
    """Return the pairs of programs that come nearest to what was measured. Each program is taken to change time and
    memory by the same factor as it does alone.
    """
    programs, by_name = {one.name: one for one in PROGRAMS}, {cause.name: cause for cause in causes}
    base = (judge.base.step_time_s, judge.peak_bytes)
    meant = (judge.step_s or base[0], judge.measured.memory_bytes or base[1])
    asked = (judge.step_s is not None, judge.measured.memory_bytes is not None)

    def apart(pair: tuple[str, str]) -> float:
        """Return the larger distance, in logarithm, of the two figures."""
        alone = [(by_name[name].step_time_s, by_name[name].peak_hbm_bytes) for name in pair]
        at_once = [alone[0][of] * alone[1][of] / base[of] for of in (0, 1)]
        return max(abs(math.log(at_once[of] / meant[of])) for of in (0, 1) if asked[of])

    pairs = itertools.combinations([name for name in by_name if name in programs], 2)
    nearest = sorted(pairs, key=apart)[:_PAIRS] if any(asked) else []
    return [both(programs[one], programs[other]) for one, other in nearest]


def _played(judge: Judge, program: Program) -> Cause | None:
    """Return another program, beside what was measured; None where it is the one that was meant."""
    changed = program.change(judge.setup, judge.found)
    if changed is None:
        return None
    case = play(quick(changed.resolved()))
    peak_bytes = case.peak_bytes()
    off, moved = judge.off(case.step_s, peak_bytes, case.simulation), judge.moved(case, peak_bytes)
    return Cause(program.name, program.says, program.check, case.step_s, peak_bytes, None, off, moved)


def _fitted(judge: Judge, machine: Machine) -> Cause | None:
    """Return a machine with one figure worse, by the factor that explains the time; None where it has no such
    figure.

    The largest factor is kept where it is not enough.
    """
    assert judge.step_s is not None
    rank, found, checked = judge.slowest_rank(), quick(judge.found), judge.base.checked

    def played(factor: float) -> Case | None:
        changed = machine.change(found, factor, rank)
        return None if changed is None else play(changed, checked if changed.mesh == found.mesh else None)

    case, factor = played(machine.most), machine.most
    if case is None:
        return None
    if machine.most != NO_FACTOR and case.step_s > judge.step_s:
        case, factor = _bisected(played, machine.most, judge.step_s)
    peak_bytes = judge.peak_bytes
    off = judge.off(case.step_s, peak_bytes, case.simulation)
    says = machine.says.format(factor=factor, rank=rank)
    fitted = None if machine.most == NO_FACTOR else factor
    return Cause(
        machine.name, says, machine.check, case.step_s, peak_bytes, fitted, off, judge.moved(case, peak_bytes)
    )  # fmt: skip


def _bisected(played: Callable[[float], Case | None], most: float, step_s: float) -> tuple[Case, float]:
    """Return the factor between 1 and ``most`` by which a step takes so long, and that step: times grow with it."""
    low, high = 1.0, most
    for _ in range(_TRIES):
        factor = math.sqrt(low * high)
        found = played(factor)
        assert found is not None  # as with the largest factor
        case = found
        if abs(case.step_s / step_s - 1) <= _TIME_WITHIN:
            break
        low, high = (factor, high) if case.step_s < step_s else (low, factor)
    return case, factor


def _memory_findings(judge: Judge, signs: set[Sign]) -> list[str]:
    """Return which terms of the memory are about as large as the excess."""
    room, measured = judge.base.room, judge.measured.memory_bytes
    if "more memory" not in signs or room is None or measured is None:
        return []
    _, most = judge.memory_range(judge.peak_bytes)
    excess = measured - judge.peak_bytes
    terms = sorted(room.terms.items(), key=lambda term: abs(term[1] - excess))
    near = [f"{name} {size / 2**30:.3g} GiB" for name, size in terms[:2] if size and 0.5 < excess / size < 2]
    said = (
        f"memory is {excess / 2**30:.3g} GiB above the walk, {(measured - most) / 2**30:.3g} beyond what is not known"
    )
    return [said + (f": as much as a second time {' or '.join(near)}" if near else ": no single term is as large")]


def _between_runs(base: Prediction, measured: Measured, also: Sequence[tuple[Setup, Measured]]) -> list[str]:
    """Return whether memory moved between degrees as it should have."""
    found = []
    for setup, other in also:
        if measured.memory_bytes is None or other.memory_bytes is None:
            raise InputError("`also`: two runs are compared by their memory; give `memory` of both")
        there = setup.predicted()
        said = there.peak_hbm_bytes / base.peak_hbm_bytes
        seen = other.memory_bytes / measured.memory_bytes
        gpus = (base.checked.schedule.num_ranks, there.checked.schedule.num_ranks)
        line = f"from {gpus[0]} to {gpus[1]} GPUs memory went to {seen:.2f} of it; predicted is {said:.2f}"
        moved, should = math.log(seen), math.log(said)
        if abs(should) > 2 * abs(moved) and abs(should - moved) > RANKS_WITHIN:
            line += ": it did not move as it should; activations are not sharded (context parallelism is off), or a "
            line += "constant dominates"
        found.append(line)
    return found
