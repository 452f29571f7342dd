"""What the doctor answers, in one sentence: whether what a run measured is possible, and what explains it."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from sim.base.units import FEW, digits_within, number, seconds, seconds_between, size
from sim.diagnose.traced import Traced
from sim.setup.answers.answer import Grounds, as_html, as_text
from sim.setup.answers.table import Table

Verdict = Literal["impossible", "too fast", "healthy", "too slow", "memory differs", "ranks differ"]

_NAMED = 3
"""Explanations that are named; of more it is said how many there are."""


class Cause(NamedTuple):
    """A hypothesis beside what was measured."""

    name: str
    says: str
    check: str
    step_time_s: float
    peak_hbm_bytes: int
    factor: float | None
    """Of a figure of the machine, found from the time; None where nothing was fitted."""
    off: float
    """The figure that is explained worst, in units of how far it may be off: up to 1 is consistent."""
    moved: float
    """The figure that it moves most of those that were measured, in the same units."""

    @property
    def consistent(self) -> bool:
        """Whether it explains all that was measured."""
        return self.off <= 1


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What a run points to. Times in seconds, sizes in bytes.

    >>> from sim.diagnose.doctor import doctor
    >>> from sim.diagnose.measured import Measured
    >>> from sim.setup.setup import Setup
    >>> setup = Setup("ring", model="llama3-8b", cluster="hgx-h100", seq="64K", scope="attention")
    >>> found = doctor(setup, Measured(step_time_s=setup.predicted().step_time_s))
    >>> found.verdict, found.consistent, len(found.table())
    ('healthy', [], 0)
    """

    verdict: Verdict
    measured_s: float | None
    simulated_s: float
    low_s: float
    """What one healthy run in a hundred is outside of; at the rates of datasheets of what these allow."""
    high_s: float
    floor_s: float
    """FLOPs at the peak, or bytes on the links: no run is faster."""
    attention_s: float
    """Attention kernels alone on the rank that has most, simulated."""
    peak_hbm_bytes: int
    findings: list[str]
    """Sentences with figures."""
    causes: list[Cause]
    """What was simulated, the best explanation first."""
    untold: list[str]
    """Hypotheses that move nothing of what was measured, so that it says nothing of them."""
    skipped: list[str]
    """Hypotheses that could not be simulated, and why."""
    traced: Traced | None = None
    """What traces say beside the simulated run; None where none was given."""
    floor_by: str = ""
    """Whose floor that is: compute, or a kind of link."""
    memory_bytes: float | None = None
    """Measured; None where it was not."""
    memory_within: tuple[float, float] = (0.0, 0.0)
    """What a run as predicted may report: what its allocator holds, or with what is beside it."""
    grounds: Grounds | None = None
    """What the prediction rests on."""

    @property
    def answer(self) -> str:
        """What it says in one sentence: the verdict with the figures that decide it, and what explains them."""
        return of_diagnosis(self)

    @property
    def rests_on(self) -> list[str]:
        """What that rests on, in three lines at most."""
        return self.grounds.lines if self.grounds else []

    def __repr__(self) -> str:
        return as_text(self.answer, "\n".join(self.findings), self.rests_on)

    def _repr_html_(self) -> str:
        return as_html(self.answer, self.table()._repr_html_(), [*self.findings, *self.rests_on])

    @property
    def consistent(self) -> list[Cause]:
        """Those that explain all that was measured."""
        return [cause for cause in self.causes if cause.consistent]

    def table(self) -> Table:
        """Return the causes as rows."""
        return Table([cause._asdict() | {"consistent": cause.consistent} for cause in self.causes])


def of_diagnosis(found: Diagnosis) -> str:
    """Return the verdict with the figures that decide it, and which causes are consistent with what was measured."""
    return _verdict(found) + _explained(found)


def _verdict(found: Diagnosis) -> str:
    predicted = seconds(found.simulated_s, digits_within(found.low_s, found.high_s))
    within = f"{predicted} ({seconds_between(found.low_s, found.high_s)})"
    if found.verdict == "ranks differ":
        return "Ranks differ: beside each other their kernels do not take what is predicted"
    if found.verdict == "memory differs" or found.measured_s is None:
        held = f"{size(found.memory_bytes or 0, FEW)} of a GPU"
        between = " to ".join(size(end, FEW) for end in found.memory_within)
        if found.verdict == "memory differs":
            return f"Memory differs: {held}, predicted are {between}"
        said = f"{held} are within the predicted {between}" if found.memory_bytes else f"predicted are {within} a step"
        return f"Healthy: {said}"
    measured = f"{seconds(found.measured_s)} a step"
    if found.verdict == "impossible":
        by = "FLOPs at the peak" if found.floor_by == "compute" else f"bytes over {found.floor_by}"
        return f"Impossible: {measured} is below {seconds(found.floor_s, FEW)}, the floor by {by}"
    if found.verdict == "healthy":
        held = f"; so is the memory, {size(found.memory_bytes, FEW)} of a GPU" if found.memory_bytes else ""
        return f"Healthy: {measured} is as predicted, {within}{held}"
    times = f"{number(found.measured_s / found.simulated_s, FEW)} times the predicted {within}"
    alone = f", and less than its attention alone, {seconds(found.attention_s, FEW)}"
    return f"{found.verdict.capitalize()}: {measured} is {times}{alone * (found.measured_s < found.attention_s)}"


def _explained(found: Diagnosis) -> str:
    """Return which causes explain what was measured; empty where none was looked for."""
    names = [cause.name for cause in found.consistent]
    if not found.causes:
        return ""
    if not names:
        return "; nothing that was simulated explains it"
    others = f" or {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return f"; {' or '.join(names[:_NAMED])}{others} would explain it"
