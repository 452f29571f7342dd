"""A measured run beside simulated ones: how far each figure is off, in units of its tolerance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sim.accounts.breakdown import kernels_s
from sim.accounts.memory import walks
from sim.diagnose.hypotheses import Sign
from sim.diagnose.kernel_names import KERNELS
from sim.diagnose.measured import Measured
from sim.diagnose.traced import kinds_s
from sim.engine.intervals.interval import interval
from sim.engine.play.simulate import Prepared, Simulation
from sim.schedule.proof.check import Checked
from sim.setup.configuration import Configuration
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup

_ALARM = 2.576 / 1.645
"""By how much an interval of 90 % is widened to one of 99 %, as of a normal distribution: what is called ill is what
one healthy run in a hundred is like."""
_CHANCE = 3.0
"""Standard errors that the median of a few scattered steps may be off by."""
_DATASHEET = (1.0, 2.0)
"""Where no interval is known: of what datasheets allow, real kernels take 1.4 to 2 times
(``sim.engine.results.report``).
"""
RANKS_WITHIN = 0.1
"""How far kernel seconds of ranks may be from those simulated, all scaled to their median: assumed, above the jitter
of kernels and below what any layout or slow rank that matters does."""
_KINDS_WITHIN = 0.25
"""How far seconds of a kind of kernels may be from those simulated, and no less than all of a step: assumed, since no
interval of one kind is known."""
_KIND_SHARE = 0.1
"""Of all kernels: kinds that take less are not compared, since names of small kernels are matched less surely."""
_NEAREST = 0.005
"""Where an interval is narrower than this, times are as exact as users state them."""
_MEMORY_WITHIN = 0.02
"""Share of a peak that an allocator may round up, and a user's figure with few digits may be off: assumed."""


class Case(NamedTuple):
    """One simulated run."""

    checked: Checked
    simulation: Simulation

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.simulation.trace.step_time_s

    def peak_bytes(self) -> int:
        """Peak memory of the rank that needs most, as a run can measure it: allocators of GPUs count the workspace of
        kernels, of a host only its buffers are counted.
        """
        of_host = self.simulation.cluster.spec.gpu.kind == "cpu"
        found = walks(self.simulation.fold.checked)
        return max(walk.buffer_peak_bytes if of_host else walk.peak_bytes for walk in found)


def play(found: Configuration, checked: Checked | None = None) -> Case:
    """Return a configuration, played; a schedule that was proved before is not proved again."""
    checked = checked or found.checked()
    prepared = Prepared(checked)
    return Case(checked, prepared.play(found.cluster, found.profile, found.jitter, found.engine))


def quick(found: Configuration) -> Configuration:
    """Return a configuration with one seed of noise, which moves a step by less than an interval is wide."""
    return dataclasses.replace(found, jitter=found.jitter._replace(seeds=1))


def rank_s(simulation: Simulation) -> list[float]:
    """Return the seconds of kernels of every rank."""
    return simulation.fold.of_all(kernels_s(simulation.trace).tolist())


class Judge:
    """Holds simulated runs against the measured one."""

    def __init__(self, setup: Setup, measured: Measured, base: Prediction) -> None:
        self.setup, self.measured, self.base = setup, measured, base
        self.found = setup.resolved()
        workload = self.found.workload
        tokens = self.found.mesh.dp * workload.num_real_tokens
        self.step_s = measured.step_s(tokens, self.found.mesh.size)
        if self.step_s is None:
            self.step_s = measured.by_mfu_s(base)
        step_s, reach = base.step_time_s, interval(base.simulation)
        low, high = ((reach.low_s / step_s) ** _ALARM, (reach.high_s / step_s) ** _ALARM) if reach else _DATASHEET
        chance = _CHANCE * measured.step_error
        self.low = math.exp(-math.hypot(math.log(low), chance))
        self.high = math.exp(math.hypot(math.log(high), chance))
        self.ranks_within = math.hypot(RANKS_WITHIN, _CHANCE * measured.rank_error)
        self.kinds_within = max(_KINDS_WITHIN, -math.log(self.low), math.log(self.high) if reach else 0.0)
        reserved, within = self.found.spec.reserved
        self.reserved_bytes, self.within_bytes = reserved, within
        self.peak_bytes = Case(base.checked, base.simulation).peak_bytes()

    def memory_range(self, peak_bytes: int) -> tuple[float, float]:
        """Return what a run may report of a peak: that of the allocator (buffers), or of the driver (and context)."""
        within = max(self.within_bytes, _MEMORY_WITHIN * peak_bytes)
        return peak_bytes - within, peak_bytes + self.reserved_bytes + within

    def signs(self) -> set[Sign]:
        """Return how the measured run differs from the one that was meant."""
        found: set[Sign] = set()
        if self.step_s is not None and self.step_s < self.low * self.base.step_time_s:
            found.add("faster")
        if self.step_s is not None and self.step_s > self.high * self.base.step_time_s:
            found.add("slower")
        if self.measured.memory_bytes is not None:
            least, most = self.memory_range(self.peak_bytes)
            if self.measured.memory_bytes > most:
                found.add("more memory")
            if self.measured.memory_bytes < least:
                found.add("less memory")
        if self._ranks_off(rank_s(self.base.simulation)) > 1:
            found.add("uneven ranks")
        return found

    def _ranks_off(self, ranks_s: Sequence[float]) -> float:
        """Return how far the kernel seconds of ranks, beside their median, are off, in units of their tolerance."""
        if len(self.measured.rank_s) != len(ranks_s) or min(ranks_s) <= 0:
            return 0.0
        own = np.log(np.array(self.measured.rank_s) / np.median(self.measured.rank_s))
        other = np.log(np.array(ranks_s) / np.median(ranks_s))
        return float(np.abs(own - other).max()) / self.ranks_within

    def _beyond(self, seconds: float, simulated_s: float, within: float = _NEAREST) -> float:
        """Return how far seconds are off, in units of the interval, or of ``within`` where that is wider: steps that a
        host bounds are hardly ever shorter, which says nothing of kernels.
        """
        apart = math.log(seconds / simulated_s)
        return apart / (max(math.log(self.high), within) if apart > 0 else min(math.log(self.low), -within))

    def moved(self, case: Case, peak_bytes: int) -> float:
        """Return how far a case moves the measured figures from those of the run that was meant, in units of their
        tolerance. A measurement neither supports nor refutes a case that moves none of them.
        """
        found = [0.0]
        if self.step_s is not None:
            found.append(abs(self._beyond(case.step_s, self.base.step_time_s)))
        if self.measured.memory_bytes is not None:
            least, most = self.memory_range(self.peak_bytes)
            found.append(abs(peak_bytes - self.peak_bytes) / ((most - least) / 2))
        ranks_s, own_s = np.array(rank_s(case.simulation)), np.array(rank_s(self.base.simulation))
        if self.measured.rank_s and ranks_s.shape == own_s.shape and min(*ranks_s, *own_s) > 0:
            found.append(float(np.abs(np.log(ranks_s / own_s)).max()) / self.ranks_within)
        return math.inf if self.measured.kind_s else max(found)

    def off(self, step_s: float, peak_bytes: int, simulation: Simulation) -> float:
        """Return how far the worst figure is off, in units of its tolerance."""
        off = [0.0]
        if self.step_s is not None:
            off.append(self._beyond(self.step_s, step_s))
        if self.measured.memory_bytes is not None:
            least, most = self.memory_range(peak_bytes)
            middle, half = (least + most) / 2, (most - least) / 2
            off.append(abs(self.measured.memory_bytes - middle) / half)
        ranks_s = rank_s(simulation)
        if self.measured.rank_s and len(self.measured.rank_s) == len(ranks_s) and min(ranks_s) > 0:
            off.append(self._ranks_off(ranks_s))
            apart = self._beyond(float(np.median(self.measured.rank_s)), float(np.median(ranks_s)), self.ranks_within)
            off.append(apart)
        return max(off + self._kinds_off(simulation))

    def _kinds_off(self, simulation: Simulation) -> list[float]:
        """Return how far each kind of kernels that takes some time is off, in units of its tolerance."""
        own = self.measured.kind_s
        if not any(own.get(kind) for kind in KERNELS):
            return []
        other, off = kinds_s(simulation, loops_apart=self.measured.loops_apart), []
        least_s = _KIND_SHARE * sum(own.get(kind, 0.0) for kind in KERNELS)
        for kind in KERNELS:
            pair = (own.get(kind, 0.0), other[kind])
            if max(pair) > least_s:
                off.append(abs(math.log(max(pair[0], least_s / 10) / max(pair[1], least_s / 10))) / self.kinds_within)
        return off

    def slowest_rank(self) -> int:
        """Return the rank whose kernels are slowest beside those simulated; the last where no rank was measured."""
        simulated = rank_s(self.base.simulation)
        if len(self.measured.rank_s) != len(simulated) or min(simulated) <= 0:
            return len(simulated) - 1
        return int(np.argmax(np.array(self.measured.rank_s) / np.array(simulated)))
