"""The step of a configuration, by plays of few of its layers and micro-batches: its time, its bound, its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sim.accounts.memory import walks
from sim.base.garbage import garbage_collection_off
from sim.engine.intervals.extrapolated import decisive
from sim.engine.intervals.interval import Interval
from sim.engine.play.jitter import STEADY
from sim.engine.play.simulate import Simulation, simulate
from sim.engine.results.report import evidence
from sim.engine.results.room import Room, fullest_of, room_of, room_played
from sim.engine.results.sensitivity import IMBALANCE, Bound, bound, bound_of
from sim.plan.search.bounds import least_room, room_by_few
from sim.plan.search.few import PLAYED, Few, holds_as_much, of_played, of_turns
from sim.plan.search.room import room
from sim.plan.search.timed import few_stages, told_by_passes
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import Checked
from sim.setup.answers.answer import Grounds, grounds_of
from sim.setup.configuration import Configuration
from sim.setup.setup import Setup
from sim.setup.unnamed_software import slowest, widened
from sim.words.mesh import Mesh


class _OfLayers(NamedTuple):
    """A step of some micro-batches, by plays of few of its layers."""

    step_s: float
    last: Simulation
    """That of most layers."""
    before: Simulation | None
    """The one with fewer; None where all are played."""
    few: Few
    """By which layers it is told."""

    def told(self, seconds: Callable[[Simulation], float]) -> float:
        """Return seconds of all of its layers, as its time is told."""
        last = seconds(self.last)
        return self.few.told(seconds(self.before), last) if self.before else last

    @property
    def simulations(self) -> list[Simulation]:
        """Those with fewer layers first."""
        return [self.before, self.last] if self.before else [self.last]


class Steps(NamedTuple):
    """A step by its plays."""

    step_s: float
    turns: Few
    of_turns: list[_OfLayers]
    """By number of micro-batches."""
    setups: list[Setup]
    """All that were played."""
    longer: float = 1.0
    """How many times as long the step takes as its play, where passes of few stages tell of many. What else is told has
    the share of the step that it has of the play: stages wait for each other for a smaller one."""

    def told(self, seconds: Callable[[Simulation], float]) -> float:
        """Return seconds of the whole step, such as those that ranks wait, by those of its plays."""
        return self.longer * self._told(seconds)

    def _told(self, seconds: Callable[[Simulation], float]) -> float:
        few = [one.told(seconds) for one in self.of_turns]
        return self.turns.told(*few) if len(few) > 1 else few[0]

    @property
    def last(self) -> Simulation:
        """The play with most layers and micro-batches."""
        return self.of_turns[-1].last

    @property
    def built(self) -> list[_Built]:
        """The schedules that were played."""
        checked = [one.checked for of_layers in self.of_turns for one in of_layers.simulations]
        return [_Built(setup.resolved(), one) for setup, one in zip(self.setups, checked, strict=True)]

    @property
    def bound(self) -> Bound:
        """What bounds the step: what doubling saves in two plays says what it saves in the whole, as their times do. Of
        a pipeline they have unlike numbers of micro-batches, because the share of bubbles falls with these; the saving
        of even stages is left out, because the head's share falls with the number of layers. Of one stage they have
        unlike layers, where there are such. Where passes of few stages tell the step, their play says it: what comes
        once a step, as sums of gradients do, has a larger share there.
        """
        of_last, in_stages = self.of_turns[-1], self.last.checked.schedule.header.mesh.pp > 1
        if of_last.before and not in_stages:
            ends, few = (of_last.before, of_last.last), of_last.few
        elif len(self.of_turns) > 1:
            ends, few = (self.of_turns[0].last, self.last), self.turns
        elif self.longer == 1.0:
            return bound(self.last)
        else:
            saves = bound(self.last).saves
            return bound_of({name: share for name, share in saves.items() if name != IMBALANCE})
        first, last = (bound(one, told=0.0).saves for one in ends)
        steps_s = [one.trace.step_time_s for one in ends]
        told_s = few.told(*steps_s)
        return bound_of(
            {
                name: few.told(first[name] * steps_s[0], last[name] * steps_s[1]) / told_s
                for name in last
                if name in first and not (in_stages and name == IMBALANCE)
            }
        )

    @property
    def rests(self) -> tuple[Interval | None, Grounds]:
        """The 90 % interval of the step and what it rests on: those of the last play, scaled to the step."""
        _, last, before, few = self.of_turns[-1]
        other, longer = slowest(last), self.step_s / last.trace.step_time_s
        found = widened(last, other)
        within = found and Interval(found.low_s * longer, found.high_s * longer)
        decides = decisive(last, before, few.further / few.between) if before else decisive(last)
        slower = other and other._replace(seconds=other.seconds * longer)
        return within, grounds_of(last, evidence(last, []), decides, slower)


def step_of(setup: Setup, layers: tuple[int, int] = PLAYED) -> tuple[float, Simulation]:
    """Return the seconds of a training step without noise, and its simulation. A step of more than ``layers`` layers
    and few micro-batches is played with these only, and each further one adds as much as the last of these
    (``sim.plan.search.few``). The schedule is not proved.
    """
    found = steps_of(setup, layers)
    return found.step_s, found.last


def steps_of(setup: Setup, some: tuple[int, int] = PLAYED, like: Steps | None = None) -> Steps:
    """Return the step of a setup by plays of few layers and micro-batches. Schedules that it shares with the step
    ``like`` are not built again.
    """
    known = like.built if like else []
    if some_stages := few_stages(setup):
        return _by_passes(setup, some_stages, known)
    few = of_turns(setup)
    of_layers = [of_played(one, some) for one in few.setups]
    found = [_steps_of_layers(one, known) for one in of_layers]
    steps_s = [one.step_s for one in found]
    step_s = few.told(*steps_s) if len(steps_s) > 1 else steps_s[0]
    return Steps(step_s, few, found, [setup for one in of_layers for setup in one.setups])


def _by_passes(setup: Setup, some: Setup, known: list[_Built]) -> Steps:
    """Return the step of a setup by the passes of ``some`` of its stages."""
    play = _simulation(some, known, among=setup.resolved().mesh.size, by_outline=True)
    played_s, step_s, alone = play.trace.step_time_s, told_by_passes(setup, some, play), Few([some])
    return Steps(step_s, alone, [_OfLayers(played_s, play, None, alone)], [some], step_s / played_s)


def _steps_of_layers(few: Few, known: list[_Built]) -> _OfLayers:
    *before, last = [_simulation(one, known) for one in few.setups]
    if not before:
        return _OfLayers(last.trace.step_time_s, last, None, few)
    step_s = few.told(before[0].trace.step_time_s, last.trace.step_time_s)
    return _OfLayers(step_s, last, before[0], few)


class _Built(NamedTuple):
    """A schedule, and what it was asked for by."""

    configuration: Configuration
    checked: Checked


@garbage_collection_off()
def _simulation(setup: Setup, known: list[_Built], among: int = 0, *, by_outline: bool = False) -> Simulation:
    """Return a play without noise; GPUs are as slow as the slowest ``among`` so many. ``by_outline`` ranks that differ
    in what they count in norms alone are played as one.
    """
    found = setup.resolved()
    checked = next((one.checked for one in known if found.has_schedule_of(one.configuration)), None)
    if checked is None:
        schedule = found.built()
        checked = Checked(schedule.by_outline() if by_outline else schedule)
    steady = STEADY._replace(among=among)
    return simulate(checked, found.cluster, found.profile, steady, engine=found.engine)


def room_of_step(setup: Setup, last: Simulation) -> Room:
    """Return the memory of a configuration, by the last simulation of ``step_of``. Of the whole only those ranks are
    built whose places took most in that one, with few micro-batches. Where an allocator is walked it then reserves
    within 0.4 % of what it does for all; else buffers of all hold as much.
    """
    header = last.checked.schedule.header
    whole = setup.resolved()
    if (header.workload.layers, header.workload.batch) == (whole.workload.layers, whole.workload.batch):
        return room_played(header, last.fold, whole.allocator)
    ranks = None
    if whole.entry in SCHEDULES.values() and not (ranks := fullest(last, whole.mesh)):
        return room(whole)
    if whole.allocator is not None:
        return reserved_room(setup, ranks)
    few = of_turns(setup)
    return room_by_few(whole, few, ranks) if ranks and holds_as_much(setup, few) else least_room(whole, ranks)


def fullest(play: Simulation, mesh: Mesh) -> list[int]:
    """Return the ranks of a mesh, all stages of its first replica, at the places that took most memory in a stage of
    what was played. Empty where other replicas took more.
    """
    header, fold, walked = play.checked.schedule.header, play.fold, walks(play.fold.checked)
    place = {rank: header.mesh.place(rank) for rank in fold.ranks}
    of_first = {rank: one for rank, one in zip(fold.ranks, walked, strict=True) if not place[rank]["dp"]}
    found = {place[rank]["pp"]: rank for rank in fullest_of(header.mesh, of_first)}
    of_fullest = [of_first[found[place[rank]["pp"]]] for rank in fold.ranks]
    alone, all_of_them = (room_of(header, some, fold.cluster) for some in (of_fullest, walked))
    if alone.limits != all_of_them.limits:
        return []
    stages = range(mesh.pp)
    some = [{axis: stages if axis == "pp" else [at] for axis, at in place[rank].items()} for rank in found.values()]
    return sorted({rank for places in some for rank in mesh.at(places)})


def reserved_room(setup: Setup, ranks: Sequence[int] | None = None) -> Room:
    """Return the least that a configuration takes of each memory, with what its allocator reserves of the GPU's, by all
    of its layers and few of its micro-batches.
    """
    return least_room(of_turns(setup).setups[-1].resolved(), ranks, reserved=True)
