"""A simulated step: its time at once; its figures, its interval and its memory when they are asked for."""

from __future__ import annotations

from functools import cached_property

import msgspec

from sim.accounts.trace import Trace
from sim.engine.intervals.difference import Ratio, difference
from sim.engine.intervals.interval import Interval
from sim.engine.play.simulate import Simulation
from sim.engine.results.critical import Span, critical_path
from sim.engine.results.report import Report, report
from sim.engine.results.room import Room
from sim.schedule.proof.check import Checked
from sim.setup.stacks import techniques_on
from sim.setup.unnamed_software import Slowest, slowest, widened
from sim.words.profile import Profile
from topology.cluster import Cluster


class PlayedStep:
    """One simulated step of a schedule on a cluster. What is known of it is computed when first asked for, and kept."""

    def __init__(self, simulation: Simulation, schedule: str, title: str) -> None:
        self.simulation = simulation
        """The trace, and all that it was made from."""
        self.schedule = schedule
        """As it was named."""
        self.title = title
        """One line that says what was simulated."""

    @property
    def checked(self) -> Checked:
        """The schedule, proved."""
        return self.simulation.checked

    @property
    def played(self) -> Checked:
        """What of it was played: of equal data-parallel replicas one."""
        return self.simulation.fold.checked

    @property
    def cluster(self) -> Cluster:
        """What it was played on."""
        return self.simulation.cluster

    @property
    def profile(self) -> Profile | None:
        """What its costs were measured in; None at the rates of datasheets."""
        return self.simulation.profile

    @property
    def trace(self) -> Trace:
        """When every op was posted, begun and ended."""
        return self.simulation.trace

    @property
    def step_time_s(self) -> float:
        """Seconds from the start of the first rank to the end of the last."""
        return self.trace.step_time_s

    @cached_property
    def interval(self) -> Interval | None:
        """The 90 % interval of the step time, which takes three more simulations; None where nothing is known of how
        far costs may be off. Where the software is not named, it reaches up to that of the slowest.
        """
        return widened(self.simulation, self.slowest)

    @cached_property
    def slowest(self) -> Slowest | None:
        """The step with the slowest kernels that are used; None where the software is named, or known."""
        return slowest(self.simulation)

    def over(self, other: PlayedStep) -> Ratio | None:
        """Return how many times as long it takes as another prediction, with the 90 % interval of the ratio, which is
        narrower than those of both, since they rest on the same costs; None where nothing is known of how far these are
        off. Takes two simulations of each.

        >>> from sim.setup.predict import predict
        >>> p = predict("zigzag", model="llama3-8b", seq="64K", cluster="hgx-h100", layers=1)
        >>> ratio = p.replace(schedule="ring").over(p)
        >>> ratio.expected > 1, ratio.tied
        (True, False)
        """
        return difference(self.simulation, other.simulation)

    @cached_property
    def figures(self) -> Report:
        """All figures but the interval and the hash of the schedule, which would take longer."""
        return report(self.simulation, with_hash=False)

    @cached_property
    def report(self) -> Report:
        """All figures."""
        return msgspec.structs.replace(self.figures, interval_s=self.interval, schedule_hash=self.trace.schedule_hash)

    @property
    def fits(self) -> bool | None:
        """Whether the memory is enough for a training step; None where it is at the limit. Below that scope False if
        buffers alone exceed the memory, and else None, not known.
        """
        return self.figures.fits

    @property
    def room(self) -> Room | None:
        """The memory of a training step by its terms, and what is left; None below that scope."""
        return self.figures.room

    @property
    def techniques(self) -> list[str]:
        """What saves memory in this training step, with the options that switch it on; below that scope nothing."""
        header = self.checked.schedule.header
        rank = header.workload.model.lora_rank
        adapters = [f"adapters of rank {rank} alone are trained (model.lora_rank={rank})"] if rank else []
        return [*adapters, *techniques_on(header.options)] if header.workload.scope == "step" else []

    @property
    def peak_hbm_bytes(self) -> int:
        """Peak allocated of the rank that needs most, in bytes: see ``Report``; what is beside it is in ``room``."""
        return self.figures.peak_hbm_bytes

    @property
    def bound_by(self) -> str:
        """The figure of the machine whose doubling saves most: compute, hbm, a kind of link or its latency; host where
        that is its host's time, imbalance where ranks have unequal work.
        """
        return self.figures.bound_by

    def critical_path(self) -> list[Span]:
        """Return what the step's end waited for, back to its start: spans without gaps, in the order of time.

        >>> from sim.setup.predict import predict
        >>> p = predict("ulysses", model="llama3-8b", seq="64K", cluster="hgx-h100", layers=1)
        >>> spans = p.critical_path()
        >>> spans[0].begin_s, spans[-1].end_s == p.step_time_s, spans[-1].on
        (0.0, True, 'hbm')
        """
        return critical_path(self.simulation)
