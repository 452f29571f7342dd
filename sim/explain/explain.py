"""What a framework's configuration comes to, beside a line of its log: the answer, what it consists of, what helps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sim.accounts.breakdown import breakdown, critical_rank
from sim.base.errors import InputError
from sim.base.garbage import garbage_collection_off
from sim.diagnose.judge import Judge, play, quick
from sim.diagnose.kernel_names import kind_of_op
from sim.diagnose.measured import Measured, findings_of_figures
from sim.engine.play.simulate import Simulation
from sim.engine.results.floors import floors
from sim.engine.results.room import room_played
from sim.explain.changes import changes
from sim.explain.logs import Figure, Logged, read_log
from sim.explain.screen import Explanation, Memory
from sim.explain.weighed import Scale, longest_by_few, shortened, turns
from sim.plan.search.steps import fullest
from sim.schedule.ir.ops import KINDS
from sim.schedule.proof.check import Checked
from sim.setup.answers.answer import record
from sim.setup.configuration import Configuration
from sim.setup.imports.imported import Imported, imported
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup

CHANGES = 4
"""That are shown."""
_LIMIT_S = 20.0
"""CPU time after which no further change is tried: of very many GPUs each takes seconds."""
_PARTS = {"copy": "copies", "communication": "exposed communication", "synchronisation": "waiting", "idle": "waiting"}
"""What the parts of a step but kernels are called."""
_KERNELS = {"attention forward": "attention", "attention backward": "attention", "gemm": "matrix products",
            "optimiser": "optimiser"}  # fmt: skip
"""What kernels are called; all others are such."""
_OTHERS = "other kernels"


def explain(
    *paths: str | Path, log: str | None = None, framework: str | None = None, anyway: bool = False, **given: Any
) -> Explanation:
    """Return what the configuration of a run comes to, beside a line or a file of its log; ``given`` are fields of a
    setup that come before what files say.

    Raises InputError for what is no configuration, for keys that matter and are not sayable unless ``anyway``, and for
    a log of which nothing is understood.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.json"
    >>> _ = path.write_text('{"zero_optimization": {"stage": 2}, "sequence_parallel_size": 2}')
    >>> found = explain(path, log="1s/it", model="tiny", seq="8K", gpus=2, layers=2)
    >>> found.measured_s, found.memory.fits, found.helps[0].change.by
    (1.0, True, 'flag')
    """
    logged = None if log is None else read_log(log)
    return of_imported(imported(*paths, framework=framework, anyway=anyway), logged, **given)


@garbage_collection_off()
def of_imported(found: Imported, logged: Logged | None = None, **given: Any) -> Explanation:
    """Return the same of files that were read, and of what a log says."""
    if given.get("scope", "step") != "step":
        raise InputError(f"`scope` {given['scope']}: explained are training steps; set `scope` step, or leave it out")
    setup, assumptions = found.answer(**given)
    rows = found.rows(**given)
    predicted = _without_noise(shortened(setup).setups[-1]).predicted()
    step = _Step(setup, predicted)
    header, folded = predicted.checked.schedule.header, predicted.simulation.fold
    room = room_played(header, folded, setup.resolved().allocator)
    terms = {str(name): nbytes for name, nbytes in room.terms.items()}
    memory = Memory(terms, room.tightest, room.limits[0], room.fits)
    measured = _measured(logged, setup.resolved())
    judge = Judge(setup, measured, predicted)
    held = memory.gpu.held_bytes
    (least, _), (_, most) = judge.memory_range(sum(room.terms.values())), judge.memory_range(held)
    within = predicted.interval
    ranks = fullest(predicted.simulation, setup.resolved().mesh) or None
    longest = longest_by_few(setup, memory.tightest.free_bytes, ranks=ranks)
    scale = Scale(setup.resolved(), step.step_time_s, held, longest, step.turn_s, step.one_s)
    longer = step.step_time_s / predicted.step_time_s
    return Explanation(
        setup=setup,
        title=found.title,
        paths=tuple(file.path for file in found.files),
        assumptions=assumptions,
        defaults=tuple(row for row in rows if row.state == "taken" and row.is_default),
        left_out=tuple(row for row in rows if row.state == "not sayable"),
        step_time_s=step.step_time_s,
        interval_s=within and (within.low_s * longer, within.high_s * longer),
        expected_s=(judge.low * step.step_time_s, judge.high * step.step_time_s),
        floor_s=step.floor_s,
        parts=step.parts,
        memory=memory,
        expected_bytes=(least, most),
        longest=longest,
        weighed=tuple(scale.weigh(changes(found, **given), CHANGES, _LIMIT_S)),
        record=record(predicted.simulation) if predicted.profile else predicted.rests_on[0],
        logged=logged,
        measured_s=step.measured_s(judge, measured),
        measured_bytes=measured.memory_bytes,
        findings=tuple(_findings(measured, judge, step)),
    )


def _without_noise(setup: Setup) -> Setup:
    """Return a step without noise, unless that was asked for. Changes are weighed without, and what is drawn of GPUs at
    their power limit would be up to 2 % of a step: more than many a change saves.
    """
    return setup if setup.jitter is not None or setup.seeds is not None else setup.replace(jitter=0.0)


class _Step:
    """A step of all its micro-batches, by the prediction of few of them where there are more."""

    def __init__(self, setup: Setup, predicted: Prediction) -> None:
        self.predicted, few = predicted, shortened(setup)
        two, self.one_s, self.turn_s = _parts(predicted.simulation), 0.0, 0.0
        self.step_time_s, self.parts = predicted.step_time_s, two
        self.floor_s = max(floors(predicted.simulation.fold).values(), default=0.0)
        self.times = 1.0
        """As much as a step of the micro-batches that were predicted has tokens."""
        if len(few.setups) == 1:
            return
        alone = quick(_without_noise(few.setups[0]).resolved())
        schedule = alone.built()
        one = play(alone, Checked(schedule)).simulation
        self.one_s = one.trace.step_time_s
        if setup.resolved().mesh.pp == 1:
            self.turn_s = predicted.step_time_s - self.one_s
        self.step_time_s = few.told(self.one_s, predicted.step_time_s)
        parts = _parts(one)
        self.parts = {name: max(0.0, few.told(parts.get(name, 0.0), s)) for name, s in two.items()}
        self.times = turns(setup) / turns(few.setups[-1])
        self.floor_s *= self.times

    def measured_s(self, judge: Judge, measured: Measured) -> float | None:
        """Return the step time that was measured: as such, as a rate, or as an MFU."""
        if judge.step_s is None or measured.step_s(1, 1) is not None:
            return judge.step_s
        return judge.step_s * self.times


def _findings(measured: Measured, judge: Judge, step: _Step) -> list[str]:
    """Return where figures contradict each other, if there are several; of a part of the micro-batches where only these
    were predicted.
    """
    told = [measured.step_time_s, measured.tokens_per_s, measured.tokens_per_s_per_gpu, measured.mfu]
    if sum(one is not None for one in told) < 2 or judge.step_s is None:
        return []
    found = shortened(judge.setup).setups[-1].resolved()
    return findings_of_figures(measured, judge.step_s / step.times, step.predicted, found)


def _parts(simulation: Simulation) -> dict[str, float]:
    """Return what the step of the critical rank consists of: kernels by kind, and what they do not hide."""
    trace = simulation.trace
    rank = critical_rank(trace)
    spent, ops = breakdown(trace, rank), trace.ops
    first, last = ops.starts[rank], ops.starts[rank + 1]
    took_s = np.maximum(trace.ended_s[first:last] - trace.begun_s[first:last], 0.0)
    kernels: dict[str, float] = dict.fromkeys(("attention", "matrix products", _OTHERS, "optimiser"), 0.0)
    for kind, s in zip(ops.kinds[first:last], took_s.tolist(), strict=True):
        if KINDS[kind].meta.activity == "compute":
            kernels[_KERNELS.get(kind_of_op(kind) or "", _OTHERS)] += s
    every_s = math.fsum(kernels.values())
    found = {name: s / every_s * spent["compute"] if every_s else 0.0 for name, s in kernels.items()}
    for name, s in spent.items():
        if name != "compute":
            found[_PARTS[name]] = found.get(_PARTS[name], 0.0) + s
    return found


def _measured(logged: Logged | None, found: Configuration) -> Measured:
    """Return what a log says as measured figures."""
    figures: Mapping[Figure, float] = {} if logged is None else logged.figures
    rate = figures.get("samples_per_s")
    by_samples = None if rate is None else rate * found.workload.real_seq
    return Measured(
        step_time_s=figures.get("step_time_s"),
        tokens_per_s=figures.get("tokens_per_s", by_samples),
        tokens_per_s_per_gpu=figures.get("tokens_per_s_per_gpu"),
        memory_bytes=figures.get("memory_bytes"),
        mfu=figures.get("mfu"),
    )
