"""What a framework's configuration comes to, beside a line of its log: the answer, what it consists of, what helps."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sim.accounts.breakdown import breakdown, critical_rank
from sim.accounts.memory import walks
from sim.base.errors import InputError
from sim.base.garbage import garbage_collection_off
from sim.base.units import FEW, digits_within, length, number, seconds, seconds_between, size
from sim.diagnose.judge import Judge, play, quick
from sim.diagnose.kernel_names import kind_of_op
from sim.diagnose.measured import Measured, findings_of_figures
from sim.engine.play.simulate import Simulation
from sim.engine.results.report import floors
from sim.engine.results.room import Limit, room_of
from sim.explain.changes import changes
from sim.explain.logs import Figure, Logged, read_log
from sim.explain.weighed import Scale, Weighed, longest_by_few, of_all_turns, shortened, turns
from sim.schedule.derive.replicas import folds
from sim.schedule.ir.ops import KINDS
from sim.schedule.proof.check import Checked
from sim.setup.answers.answer import record
from sim.setup.imports.facts import Row
from sim.setup.imports.imported import Imported, imported
from sim.setup.prediction import Prediction
from sim.setup.setup import Configuration, Setup
from sim.setup.stacks import techniques_on

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


class Memory(NamedTuple):
    """What a GPU's memory goes to, in bytes."""

    terms: dict[str, int]
    """Of the peak allocated of the rank that holds most."""
    tightest: Limit
    """The memory with least to spare: the GPU's, or its host's."""
    gpu: Limit
    fits: bool | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a configuration comes to. Times in seconds, sizes in bytes.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.json"
    >>> _ = path.write_text('{"zero_optimization": {"stage": 2}, "sequence_parallel_size": 2}')
    >>> found = explain(path, model="tiny", seq="8K", gpus=2, layers=2)
    >>> found.step_time_s < found.expected_s[1], [*found.to_dict()][0]
    (True, 'answer')
    """

    setup: Setup
    title: str
    """The files, and what they are of."""
    paths: tuple[str, ...]
    assumptions: tuple[str, ...]
    """What no key says and is taken, with the field that says otherwise."""
    defaults: tuple[Row, ...]
    """What the framework takes where a key is missing."""
    left_out: tuple[Row, ...]
    """Keys that matter and are not simulated."""
    step_time_s: float
    interval_s: tuple[float, float] | None
    """The 90 % interval."""
    expected_s: tuple[float, float]
    """What one healthy run in a hundred is outside of."""
    floor_s: float
    """FLOPs at the peak, or bytes on the links: no run is faster."""
    parts: dict[str, float]
    """What the step of the critical rank consists of."""
    memory: Memory
    expected_bytes: tuple[float, float]
    """What a run may report of the memory: by the allocator, or the driver."""
    longest: int | None
    """The longest context that fits, in tokens; None where documents say how long sequences are."""
    weighed: tuple[Weighed, ...]
    """Single changes, those that help most first."""
    record: str
    """How often such answers were right; at the rates of datasheets, that it is at these."""
    logged: Logged | None = None
    measured_s: float | None = None
    measured_bytes: float | None = None
    findings: tuple[str, ...] = ()
    """Where figures of the log contradict each other."""

    @property
    def helps(self) -> tuple[Weighed, ...]:
        """The changes that help most: keys of the framework first."""
        return tuple(sorted((one for one in self.weighed if one.helps), key=lambda one: one.change.by == "option"))

    @property
    def answer(self) -> str:
        """Time and memory in a sentence each, with what was measured."""
        return f"{self.of_time} {self.of_memory}"

    @property
    def of_time(self) -> str:
        """What the step takes, beside what it took."""
        digits = digits_within(*self.interval_s) if self.interval_s else FEW
        within = seconds_between(*self.interval_s) if self.interval_s else "at datasheet rates"
        said = f"Predicted {seconds(self.step_time_s, digits)} a step ({within})"
        if self.measured_s is None:
            return f"{said}."
        said += f"; measured {seconds(self.measured_s, FEW)}"
        low_s, high_s = self.expected_s
        if low_s <= self.measured_s <= high_s:
            return f"{said} is as expected."
        ratio = self.measured_s / self.step_time_s
        times = f"{said} is {number(ratio, 2)} times as long as predicted"
        parts = turns(self.setup)
        if parts > 1 and low_s <= parts * self.measured_s <= high_s:
            return f"{times}, and as expected of one of its {parts} micro-batches: see what the log counts as a step."
        if self.measured_s < self.floor_s:
            return f"{times}, and impossible: the GPUs at their peak take {seconds(self.floor_s, FEW)}."
        return f"{times}: {self._cause()}."

    @property
    def of_memory(self) -> str:
        """What a GPU holds, beside what it held."""
        gpu, tightest = self.memory.gpu, self.memory.tightest
        said = f"Predicted {size(gpu.held_bytes + gpu.reserved_bytes, FEW)} of {size(gpu.capacity_bytes)} of a GPU"
        free = f"{size(abs(tightest.free_bytes), FEW)} {'left' if tightest.free_bytes >= 0 else 'missing'}"
        of = "" if tightest.memory == gpu.memory else f" of the {tightest.memory}'s memory"
        does = {True: "fits", False: "does not fit", None: "at the limit"}[self.memory.fits]
        said += f" ({does}, {free}{of})"
        if self.measured_bytes is None:
            return f"{said}."
        said += f"; measured {size(self.measured_bytes, FEW)}"
        low, high = self.expected_bytes
        if low <= self.measured_bytes <= high:
            return f"{said} is as expected."
        apart = self.measured_bytes - (high if self.measured_bytes > high else low)
        more = f"{size(abs(apart), FEW)} {'more' if apart > 0 else 'less'} than expected"
        by_time = self.measured_s is not None and not self.expected_s[0] <= self.measured_s <= self.expected_s[1]
        return f"{said} is {more}{'' if by_time else f': {self._cause()}'}."

    def _cause(self) -> str:
        """Return which single change would explain what was measured, or who looks for more."""
        found = [one for one in self.weighed if self._explains(one)]
        if not found:
            files = " ".join(f"--from {path}" for path in self.paths)
            measured = "" if self.measured_s is None else f" --step-time {self.measured_s:.4g}s"
            measured += "" if self.measured_bytes is None else f" --memory {self.measured_bytes / 2**30:.4g}GiB"
            return f"no single change of it would take that; for other causes ask longstep doctor {files}{measured}"
        best = min(found, key=lambda one: abs(math.log((one.step_time_s or 1.0) / (self.measured_s or 1.0))))
        would = f"{seconds(best.step_time_s or 0.0, FEW)} and {size(self._held(best), FEW)}"
        return f"with {best.change.text} it would be {would}"

    def _held(self, one: Weighed) -> int:
        return one.peak_bytes + self.memory.gpu.reserved_bytes

    def _explains(self, one: Weighed) -> bool:
        """Return whether a change takes the time and the memory that were measured, as far as they were."""
        if one.step_time_s is None or one.tokens != 1:
            return False
        low, high = (end / self.step_time_s * one.step_time_s for end in self.expected_s)
        more = one.peak_bytes - self.memory.gpu.held_bytes
        least, most = (end + more for end in self.expected_bytes)
        return (self.measured_s is None or low <= self.measured_s <= high) and (
            self.measured_bytes is None or least <= self.measured_bytes <= most
        )

    @property
    def understood(self) -> list[str]:
        """What was understood, in two lines: what is trained on what, and how."""
        found = self.setup.resolved()
        work, mesh = found.workload, found.mesh
        batch, parts = mesh.dp * work.batch, turns(self.setup)
        batches = f"global batch of {batch} sequence{'s' if batch > 1 else ''} ({length(batch * work.real_seq)} tokens)"
        at_once = f"{parts} micro-batches of {work.batch // parts}" if parts > 1 else f"{work.batch} at once"
        replicas = f"{mesh.dp} replicas" if mesh.dp > 1 else "one replica"
        nodes = f", {found.spec.nodes} nodes" if found.spec.nodes > 1 else ""
        machine = f"{mesh.size} x {found.spec.gpu.name} ({found.spec.name}{nodes})"
        split = (
            f"{found.schedule} over {mesh.size // mesh.dp} GPUs" if mesh.size > mesh.dp else "no context parallelism"
        )
        if mesh.ulysses > 1 < mesh.ring:
            split += f" (heads {mesh.ulysses} x tokens {mesh.ring})"
        return [
            f"{work.model.name}, {machine}, {length(work.real_seq)} tokens, {batches}, {at_once} on {replicas}",
            "; ".join([split, *techniques_on(dataclasses.asdict(found.options))]),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, as ``longstep explain --json`` prints it."""
        gpu = self.memory.gpu
        low_high = dict(zip(("low", "high"), self.interval_s or (None, None), strict=True))
        return {
            "answer": self.answer,
            "files": self.title,
            "understood": self.understood,
            "assumptions": list(self.assumptions),
            "defaults": [f"{row.key} = {row.value.strip('()')}" for row in self.defaults],
            "left_out": [f"{row.key} = {row.value}: {row.means}" for row in self.left_out],
            "step_time_s": self.step_time_s,
            "interval_s": low_high,
            "expected_s": list(self.expected_s),
            "floor_s": self.floor_s,
            "parts_s": self.parts,
            "terms_bytes": self.memory.terms,
            "reserved_bytes": gpu.reserved_bytes,
            "capacity_bytes": gpu.capacity_bytes,
            "free_bytes": self.memory.tightest.free_bytes,
            "fits": self.memory.fits,
            "expected_bytes": list(self.expected_bytes),
            "longest": self.longest,
            "measured": None if self.logged is None else {
                "step_time_s": self.measured_s, "memory_bytes": self.measured_bytes, "read": list(self.logged.said),
                "not_understood": list(self.logged.unknown), "findings": list(self.findings),
            },
            "changes": [
                {
                    "change": one.change.text, "by": one.change.by, "step_time_s": one.step_time_s,
                    "memory_bytes": self._held(one), "fits": one.fits, "longest": one.longest, "tokens": one.tokens,
                }
                for one in self.helps
            ],
            "record": self.record,
        }  # fmt: skip

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        first, *others = (html.escape(line) for line in self.lines())
        return f"<p><b>{first}</b></p><pre>{chr(10).join(others)}</pre>"

    def lines(self, named: Callable[[str], str] = str) -> list[str]:
        """Return the screen as lines of at most 80 columns where words allow it; ``named`` writes fields as options."""
        from sim.explain.screen import screen  # noqa: PLC0415 - screens are made of explanations

        return screen(self, named)


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
    predicted = shortened(setup).replace(seeds=setup.seeds or 1).predicted()
    step = _Step(setup, predicted)
    limits = room_of(predicted.checked.schedule.header, walks(predicted.played), predicted.cluster)
    memory = Memory(
        {str(name): nbytes for name, nbytes in limits.terms.items()}, limits.tightest, limits.limits[0], limits.fits
    )
    measured = _measured(logged, setup.resolved())
    judge = Judge(setup, measured, predicted)
    held = memory.gpu.held_bytes
    least, most = judge.memory_range(held)
    within = predicted.interval
    longest = longest_by_few(setup, memory.tightest.free_bytes)
    scale = Scale(setup.resolved(), step.step_time_s, held, longest, step.turn_s, step.one_s)
    longer = step.step_time_s / predicted.step_time_s
    return Explanation(
        setup=setup,
        title=found.title,
        paths=tuple(file.path for file in found.files),
        assumptions=assumptions,
        defaults=tuple(row for row in rows if row.state == "taken" and row.value.startswith("(")),
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


class _Step:
    """A step of all its micro-batches, by the prediction of two of them where there are more."""

    def __init__(self, setup: Setup, predicted: Prediction) -> None:
        self.predicted, self.count = predicted, turns(setup)
        two, self.one_s, self.turn_s = _parts(predicted.simulation), 0.0, 0.0
        self.step_time_s, self.parts = predicted.step_time_s, two
        self.floor_s = max(floors(predicted.played, predicted.cluster).values(), default=0.0)
        self.times = 1.0
        """As much as a step of the micro-batches that were predicted has tokens."""
        if shortened(setup) is setup:
            return
        alone = quick(shortened(setup, 1).resolved())
        schedule = alone.built()
        one = play(alone, Checked(schedule, folds=folds(schedule))).simulation
        self.one_s = one.trace.step_time_s
        self.turn_s = predicted.step_time_s - self.one_s
        self.step_time_s = of_all_turns(self.one_s, predicted.step_time_s, self.count)
        parts = _parts(one)
        self.parts = {name: max(0.0, of_all_turns(parts.get(name, 0.0), s, self.count)) for name, s in two.items()}
        self.times = self.count / turns(shortened(setup))
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
    found = shortened(judge.setup).resolved()
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
