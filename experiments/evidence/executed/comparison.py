"""Simulated and executed steps of one schedule, laid side by side, and what they say of each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from experiments.evidence.executed.diagnosis import diagnosis
from experiments.evidence.executed.execution import Execution, attention_ran, measured_steps, median_step, open_session
from sim.accounts.memory import walks_with
from sim.accounts.trace import Trace
from sim.base.errors import InputError
from sim.base.units import FEW, number, percent, seconds, seconds_between, size
from sim.engine.results.report import Report
from sim.schedule.proof.check import Checked
from sim.setup.answers.answer import as_html, as_text
from sim.setup.prediction import Prediction
from sim.words.profile import Profile

if TYPE_CHECKING:
    from runtime.processes.launch import Session
    from runtime.run import Step

_PROBES, _PROBE_S = 6, 0.1
"""Kernels that are timed again to see whether the machine has drifted, and for how long each."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated time beside executed ones."""

    simulated_s: float
    median_s: float
    low_s: float
    """Least of the executed times."""
    high_s: float
    """Largest of the executed times."""
    error: float
    """simulated / median - 1."""


class KindRow(msgspec.Struct, frozen=True, kw_only=True):
    """All ops of one kind, in seconds at work, averaged over the ranks."""

    kind: str
    part: str
    count: int
    times: Measured


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """Largest sum of the buffers of a rank, over all ranks, in bytes: no workspace of kernels."""

    simulated: int
    executed: int
    simulated_hbm: int
    """With what kernels hold beside their buffers."""
    allocated: int
    """Most that a GPU's allocator had given; 0 on a CPU."""

    @property
    def error(self) -> float:
        """Of what was simulated beside what was allocated; 0 where there is no allocator."""
        return self.simulated_hbm / self.allocated - 1 if self.allocated else 0.0


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule, simulated and executed.

    >>> "error" in Measured.__struct_fields__ and "kinds" in Comparison.__struct_fields__
    True
    """

    schedule_hash: str
    step: Measured
    step_times_s: list[float]
    kinds: list[KindRow]
    peak_bytes: Peak
    diagnosis: list[str]
    """Where the error comes from, in sentences."""
    drift: list[float]
    """Before and after: how much longer kernels take now than when the machine was calibrated."""
    report: Report
    attention: str = ""
    """Which implementations of attention ran; empty in records of versions that did not say it."""

    @property
    def answer(self) -> str:
        """What it says in one sentence: both times of the step, and how far they are apart."""
        step, simulated = self.step, f"Simulated {seconds(self.step.simulated_s, FEW)}"
        if not step.median_s:
            return f"{simulated}; the steps that were executed took no time"
        off = f"{number(100 * abs(step.error), 2)} % {'more' if step.error >= 0 else 'less'}"
        within = f"{seconds_between(step.low_s, step.high_s)} in {len(self.step_times_s)} steps"
        return f"{simulated} is {off} than the measured {seconds(step.median_s, FEW)} ({within})"

    def to_dict(self, rests_on: Sequence[str] = ()) -> dict[str, Any]:
        """Return the answer and all figures as plain data, as ``longstep compare --json`` prints them."""
        return {"answer": self.answer, "rests_on": [*rests_on], **msgspec.structs.asdict(self)}

    def __repr__(self) -> str:
        return as_text(self.answer, "", comparison_lines(self))

    def _repr_html_(self) -> str:
        return as_html(self.answer, "", comparison_lines(self))


def calibrated(profile: Profile | None) -> Profile:
    """Return the profile that a comparison rests on; raises InputError if there is none."""
    if profile is None:
        raise InputError(
            "comparing needs a profile of this machine: run longstep calibrate --quick, which the cluster host then "
            "takes by default, and leave out `profile` datasheet"
        )
    return profile


def compare(prediction: Prediction, repeats: int = 5, *, timeout: float = 120.0, attention: str = "") -> Comparison:
    """Return a predicted step beside executed ones: the schedule runs on this machine, one process per rank.

    It needs torch and a profile of this machine, which ``longstep calibrate --quick`` makes in two minutes. Raises
    InputError without one.

    >>> from longstep import predict
    >>> compare(predict(model="tiny", cluster="host", seq="1K", gpus=2, profile="datasheet"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    sim.base.errors.InputError: comparing needs a profile of this machine: run longstep calibrate --quick, ...
    """
    if not isinstance(prediction, Prediction):
        raise InputError(
            f"{type(prediction).__name__} is no prediction: expected what longstep.predict or longstep.simulate returns"
        )
    calibrated(prediction.profile)
    execution = Execution(repeats=repeats, timeout=timeout, attention=attention)
    with open_session(prediction.checked, prediction.cluster.spec, prediction.profile, execution) as session:
        return comparison(prediction, session, repeats)[0]


def comparison(
    prediction: Prediction, session: Session, repeats: int, advance: Callable[[], None] = lambda: None
) -> tuple[Comparison, list[Trace]]:
    """Return the comparison, and the simulated and the (median) executed trace."""
    from runtime.run import ScheduleRun

    profile, checked = calibrated(prediction.profile), prediction.checked
    drift = [_drift(session, profile)]
    run = ScheduleRun(session, checked)

    def advancing() -> Step:
        step = run.step()
        advance()
        return step

    steps = measured_steps(advancing, repeats)
    run.close()
    drift.append(_drift(session, profile))
    predicted = prediction.report
    if prediction.cluster.spec.gpu.kind == "cpu" and not session.one_host:
        elsewhere = "executed on several hosts, predicted as on one: a host's profile knows no other"
        evidence = msgspec.structs.replace(predicted.evidence, notes=[*predicted.evidence.notes, elsewhere])
        predicted = msgspec.structs.replace(predicted, evidence=evidence)
    simulated = prediction.simulation.of_every_rank().trace
    found = laid_side_by_side(checked, simulated, predicted, steps, drift)
    return found, [simulated, median_step(steps).trace]


def _drift(session: Session, profile: Profile) -> float:
    """Return how much longer kernels of the profile take now: the median over a few, since each point has its noise."""
    from calibrate.measure.residuals import repeat

    repeated = repeat(profile, session, most=_PROBES, budget_s=_PROBE_S)
    return statistics.median(one.drift for one in repeated) if repeated else 0.0


def laid_side_by_side(
    checked: Checked, simulated: Trace, predicted: Report, steps: list[Step], drift: list[float]
) -> Comparison:
    """Return what a simulated and some executed steps of one schedule say of each other."""
    traces = [step.trace for step in steps]
    times = [trace.step_time_s for trace in traces]
    kinds = _kinds(simulated, traces)
    errors = {f"{row.kind} {row.part}": row.times.simulated_s - row.times.median_s for row in kinds}
    median = median_step(steps)
    walked = walks_with(checked, attention_ran(median.trace))
    return Comparison(
        schedule_hash=checked.schedule.hash,
        step=measured(predicted.step_time_s, times),
        step_times_s=times,
        kinds=kinds,
        peak_bytes=Peak(
            simulated=max(found.buffer_peak_bytes for found in walked),
            executed=max(median.peak_bytes),
            simulated_hbm=max(found.peak_bytes for found in walked),
            allocated=max(median.allocated_bytes),
        ),
        diagnosis=diagnosis(errors, drift, simulated, median.trace),
        drift=drift,
        report=predicted,
        attention=attention_ran(median.trace),
    )


def measured(simulated: float, executed: list[float]) -> Measured:
    """Return a simulated time beside executed ones."""
    median = statistics.median(executed)
    return Measured(
        simulated_s=simulated,
        median_s=median,
        low_s=min(executed),
        high_s=max(executed),
        error=simulated / median - 1 if median else 0.0,
    )


def _kinds(simulated: Trace, executed: list[Trace]) -> list[KindRow]:
    """Return the time at work by op kind and pass, averaged over ranks."""
    keys = sorted({(row.part, row.kind) for row in simulated.rows}, key=lambda key: (key[0] == "backward", key))

    def total(trace: Trace, key: tuple[str, str]) -> float:
        return sum(row.busy_s for row in trace.rows if (row.part, row.kind) == key) / trace.num_ranks

    return [
        KindRow(
            kind=kind,
            part=part,
            count=sum((row.part, row.kind) == (part, kind) for row in simulated.rows),
            times=measured(total(simulated, (part, kind)), [total(trace, (part, kind)) for trace in executed]),
        )
        for part, kind in keys
    ]


def drift_line(drift: list[float]) -> str:
    """Return what some kernels say of the machine's speed since its calibration."""
    before, after = (percent(value) for value in drift)
    return f"machine: beside its calibration, kernels take {before} before these steps and {after} after them"


def _allocated_line(peak: Peak) -> list[str]:
    """Return what a GPU's allocator says, where there is one."""
    if not peak.allocated:
        return []
    error = percent(peak.error)
    shown = f"simulated {size(peak.simulated_hbm)}, allocated {size(peak.allocated)}"
    return [f"peak with what kernels hold meanwhile: {shown} ({error})"]


def comparison_lines(found: Comparison) -> list[str]:
    """Return what a comparison says beside its table: memory, the machine, and where the error lies."""
    peak = found.peak_bytes
    return [
        f"peak of the buffers: simulated {size(peak.simulated)}, executed {size(peak.executed)}",
        *_allocated_line(peak),
        *([f"attention kernel: {found.attention}"] if found.attention else []),
        drift_line(found.drift),
        *(f"diagnosis: {sentence}" for sentence in found.diagnosis),
    ]
