"""Intervals where nobody has named the software that trains: they reach up to the step of the slowest in use."""

from __future__ import annotations

from typing import NamedTuple

from sim.engine.intervals.interval import Interval, interval
from sim.engine.play.simulate import Simulation, simulate
from sim.setup.machine import attended, kernels_on, measured_here
from sim.software.kernels import beside_fused, running
from sim.software.software import load_software

SLOWEST = "deepspeed"
"""The software that ships whose kernels take longest: each op of torch a kernel of its own, also around AdamW."""


class Slowest(NamedTuple):
    """A step with the kernels of other software. What that has of the schedule stays as it is."""

    said: str
    seconds: float


def slowest(simulation: Simulation) -> Slowest | None:
    """Return the step with the slowest kernels that are used; None where the software is named, or known since its
    kernels were measured here, and of attention alone, whose kernel every answer names.
    """
    profile = simulation.profile
    workload = simulation.checked.schedule.header.workload
    if profile is None or profile.software or measured_here(profile) or workload.scope == "attention":
        return None
    software = load_software(SLOWEST)
    kernels = kernels_on(simulation.cluster.spec, profile, beside_fused(software))
    turns = int(simulation.checked.schedule.header.options.get("micro_batches", 1))
    other = running(profile, kernels, software.said, simulation.cluster.spec.gpu.chip, attended(workload, turns))
    play = simulate(simulation.checked, simulation.cluster, other, simulation.noise, engine=simulation.engine)
    return Slowest(software.said, play.trace.step_time_s)


def within(simulation: Simulation) -> Interval | None:
    """Return the 90 % interval of a step, as ``Prediction.interval`` has it."""
    return widened(simulation, slowest(simulation))


def widened(simulation: Simulation, other: Slowest | None) -> Interval | None:
    """Return the 90 % interval of a step, up to that of the slowest software where none was named."""
    within = interval(simulation)
    if within is None or other is None:
        return within
    longer = max(other.seconds / simulation.trace.step_time_s, 1.0)
    return Interval(within.low_s, within.high_s * longer)
