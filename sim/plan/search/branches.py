"""What is found of a branch of configurations: that it does not fit, its bounds, or what its step takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from sim.accounts.memory import walks
from sim.base.errors import InputError
from sim.base.garbage import garbage_collection_off
from sim.engine.intervals.extrapolated import decisive
from sim.engine.intervals.interval import Interval
from sim.engine.play.simulate import Simulation, simulate
from sim.engine.results.report import evidence
from sim.engine.results.room import Limit, Room, room_of
from sim.engine.results.sensitivity import IMBALANCE, TOLD, Bound, bound
from sim.plan.search.bounds import Least, least_of_any, least_room, least_seconds
from sim.plan.search.few import PLAYED, WALKED, Few, of_layers, of_played, of_turns
from sim.plan.search.passes import least_steps
from sim.plan.search.room import room
from sim.plan.search.space import Branch
from sim.schedule.derive.replicas import folds
from sim.schedule.proof.check import Checked
from sim.setup.answers.answer import Grounds, grounds_of
from sim.setup.setup import Setup
from sim.setup.unnamed_software import slowest, widened

Found = TypeVar("Found")

SURE = 0.9
"""Which share of what ``Branch.leanest`` holds every configuration of a branch holds: recomputing and tiles save much
and take a little for themselves, up to 5 % where there is little to save. ``tests/plan/test_plan.py`` holds them to it.
"""


class Open(NamedTuple):
    """A branch that may have one of the best. Seconds are over what a step of its family is worth."""

    branch: Branch
    least_s: float = 0.0
    """What none of its configurations is below."""
    exposed_s: float = 0.0
    """What links add where nothing hides them."""
    fastest: Least | None = None
    """Of ``branch.fast``, whichever has less, where that is known and can be built."""
    leanest: Limit | None = None
    """Of the GPU's memory in ``branch.leanest``, likewise."""
    copied: tuple[Limit, ...] | None = None
    """Of the host's memory in ``branch.fastest``, where it was asked."""


class Lost(NamedTuple):
    """A branch that does not fit, that builders refuse, or that is too slow for what is to be reached."""

    branch: Branch
    missing_bytes: int = 0
    memory: str = ""
    refused: str = ""
    least_s: float | None = None
    """Where it is too slow: what none of its steps is below, in seconds over worth."""


class Played(NamedTuple):
    """A configuration with what its step takes."""

    branch: Branch
    step_s: float
    room: Room | None = None
    """None where it was too slow to ask; so are the others then."""
    within: Interval | None = None
    bound_by: str = ""
    saves: Mapping[str, float] = {}
    """By figure of the machine the share of the step that doubling it saves."""
    grounds: Grounds | None = None
    """What it rests on."""

    @property
    def batch_s(self) -> float:
        """Seconds over what a step of its family is worth: least is best."""
        return self.step_s / self.branch.family.worth

    @property
    def reaches(self) -> bool:
        """Whether its step takes no longer than it may."""
        return self.step_s <= self.branch.family.within_s


def step_of(setup: Setup, layers: tuple[int, int] = PLAYED) -> tuple[float, Simulation]:
    """Return the seconds of a training step without noise, and its simulation: of more than so many ``layers`` and
    few micro-batches only these are played, and the others taken to add as much as the last of these
    (``sim.plan.search.few``). The schedule is not proved.
    """
    found = _steps_of(setup, layers)
    return found.step_s, found.last


class _Steps(NamedTuple):
    """A step by its plays."""

    step_s: float
    last: Simulation
    """That of most layers and micro-batches."""
    before: _Fewer | None
    """The one with fewer layers; None where all are played."""
    turns: Few
    of_turns: list[Simulation]
    """By number of micro-batches that with most layers."""

    @property
    def bound(self) -> Bound:
        """What bounds the step. Of a pipeline savings are told by those of few micro-batches and of one more, since
        bubbles are less of a step the more there are; what even stages would save is not, since the head is less the
        more layers there are.
        """
        whole = len(self.of_turns) == 1 and self.before is None
        if whole or self.last.checked.schedule.header.mesh.pp == 1:
            return bound(self.last)
        first, last = (bound(one, told=0.0).saves for one in (self.of_turns[0], self.of_turns[-1]))
        steps_s = [self.of_turns[0].trace.step_time_s, self.last.trace.step_time_s]
        saved = {
            name: self.turns.told(first[name] * steps_s[0], last[name] * steps_s[1]) / self.turns.told(*steps_s)
            for name in last
            if name in first and name != IMBALANCE
        }
        by = max((name for name in saved if "+" not in name), key=lambda name: saved[name])
        told = {name: share for name, share in saved.items() if share >= TOLD or name == by}
        return Bound(by, dict(sorted(told.items(), key=lambda one: -one[1])))


class _Fewer(NamedTuple):
    """A simulation of fewer layers than the last one has."""

    simulation: Simulation
    times: float
    """How often what the last one adds to it is still to come."""


def _steps_of(setup: Setup, some: tuple[int, int] = PLAYED) -> _Steps:
    """Return the step of a setup by plays of few layers and micro-batches."""
    few = of_turns(setup)
    found = [_steps_of_layers(one, some) for one in few.setups]
    *before, (last_s, last, fewer) = found
    step_s = few.told(before[0][0], last_s) if before else last_s
    return _Steps(step_s, last, fewer, few, [one for _, one, _ in found])


def _steps_of_layers(setup: Setup, some: tuple[int, int]) -> tuple[float, Simulation, _Fewer | None]:
    few = of_played(setup, some)
    *before, played = [_simulation(one) for one in few.setups]
    if not before:
        return played.trace.step_time_s, played, None
    step_s = few.told(before[0].trace.step_time_s, played.trace.step_time_s)
    return step_s, played, _Fewer(before[0], few.further / few.between)


@garbage_collection_off()
def _simulation(setup: Setup) -> Simulation:
    found = setup.resolved()
    schedule = found.built()
    return simulate(Checked(schedule, folds=folds(schedule)), found.cluster, found.profile, engine=found.engine)


def least_of(setup: Setup) -> Least:
    """Return the least seconds of a training step: of many layers and micro-batches as of few, and of a pipeline with
    its bubbles.
    """
    few = of_turns(setup, steady=False)
    found = _told(few, lambda one: _told(of_layers(one, PLAYED), _least, Least.with_layers), Least.with_more)
    if setup.resolved().mesh.pp == 1:
        return found
    steps = least_steps(setup)
    return found._replace(kernels_s=steps.passes_s, states_s=steps.all_s - steps.passes_s)


def _least(setup: Setup) -> Least:
    return least_seconds(setup.resolved())


def least_limits(setup: Setup) -> list[Limit]:
    """Return what a training step takes of each memory: of many layers and micro-batches as of few."""
    return _told(of_turns(setup), lambda one: _told(of_layers(one, WALKED), _room_limits, _with_more), _with_more)


def _limits(setup: Setup) -> list[Limit]:
    """Return what a training step takes of each memory: of all its layers, of many micro-batches as of few."""
    return _told(of_turns(setup), _room_limits, _with_more)


def _room_limits(setup: Setup) -> list[Limit]:
    return [*least_room(setup.resolved()).limits]


def _told(few: Few, found_of: Callable[[Setup], Found], with_more: Callable[[Found, Found, Few], Found]) -> Found:
    """Return what is found of a setup by those of few layers or micro-batches."""
    *before, last = map(found_of, few.setups)
    return with_more(before[0], last, few) if before else last


def _with_more(first: Sequence[Limit], last: Sequence[Limit], few: Few) -> list[Limit]:
    """Return limits where more is to come, each of which adds what the last of those that are found does."""
    more = []
    for one, second in zip(first, last, strict=True):
        held = math.ceil(few.told(one.held_bytes, second.held_bytes))
        free = second.free_bytes - (held - second.held_bytes)
        more.append(msgspec.structs.replace(second, held_bytes=held, free_bytes=free))
    return more


def opened(branch: Branch, above: Open | None = None) -> Open | Lost:
    """Return a branch with its bounds, of which some may be those of the branch that it is a part of. A configuration
    that is refused says nothing of the others of its branch.
    """
    leanest, fastest, copied, refused = None, None, None, ""
    if above and branch.leanest.chosen == above.branch.leanest.chosen:
        leanest = above.leanest
    if above and branch.fastest.chosen == above.branch.fastest.chosen:
        copied = above.copied
        fastest = above.fastest if len(branch.fast) == len(above.branch.fast) else None
    try:
        if branch.is_leaf:
            limits = _limits(branch.setup)
            leanest = limits[0]
        else:
            leanest = leanest or least_limits(branch.leanest.setup)[0]
            sure = int((1 - SURE) * leanest.held_bytes)
            limits = [msgspec.structs.replace(leanest, free_bytes=leanest.free_bytes + sure)]
            if copied is None and {"host", "offload"} & {*branch.chosen}:
                copied = tuple(least_limits(branch.fastest.setup)[1:])
            limits += copied or ()
        for limit in limits:
            if limit.free_bytes < 0:
                said = leanest if limit.memory == leanest.memory else limit  # what the leanest one lacks itself
                return Lost(branch, -said.free_bytes, limit.memory)
    except InputError as error:
        refused = str(error)
    try:
        fastest = fastest or least_of_any([least_of(one.setup) for one in branch.fast])
    except InputError as error:
        refused = str(error)
    if branch.is_leaf and refused:
        return Lost(branch, refused=refused)
    worth, least_s = branch.family.worth, above.least_s if above else 0.0
    if fastest is None:
        return Open(branch, least_s, above.exposed_s if above else 0.0, None, leanest, copied)
    own_s = fastest.step_s if branch.is_leaf else fastest.branch_s
    least_s = max(least_s, own_s / worth)
    if own_s > branch.family.within_s:
        return Lost(branch, least_s=least_s)
    return Open(branch, least_s, fastest.links_s / worth, fastest, leanest, copied)


def parts(found: Open) -> list[Open | Lost]:
    """Return what a branch consists of."""
    return [opened(part, found) for part in found.branch.parts]


def played(branch: Branch, beaten_at: float) -> Played | Lost:
    """Return what the step of a configuration takes; all else is asked for only where it is no slower than
    ``beaten_at``, in seconds over worth, as fast as it has to be, and fits.
    """
    try:
        steps = _steps_of(branch.setup)
        step_s, last, before, *_ = steps
        result = Played(branch, step_s)
        if result.batch_s > beaten_at or not result.reaches:
            return result
        held = room_of_step(branch.setup, last)
    except InputError as error:
        return Lost(branch, refused=str(error))
    if held.free_bytes < 0:
        return Lost(branch, -held.free_bytes, held.tightest.memory)
    other = slowest(last)
    found, longer = widened(last, other), step_s / last.trace.step_time_s
    within = found and Interval(found.low_s * longer, found.high_s * longer)
    bounded = steps.bound
    decides = decisive(last, before.simulation, before.times) if before else decisive(last)
    grounds = grounds_of(last, evidence(last, []), decides, other and other._replace(seconds=other.seconds * longer))
    return result._replace(room=held, within=within, bound_by=bounded.by, saves=bounded.saves, grounds=grounds)


def room_of_step(setup: Setup, last: Simulation) -> Room:
    """Return the memory of a configuration, by the last simulation of ``step_of``. Where no rank of that holds more
    than the one that ``least_room`` builds, that one is all that has to be built of the whole.
    """
    few = room_of(last.checked.schedule.header, walks(last.fold.checked), last.fold.cluster)
    workload = last.checked.schedule.header.workload
    whole = setup.resolved()
    if (workload.layers, workload.batch) == (whole.workload.layers, whole.workload.batch):
        return few
    if few.limits == least_room(of_played(of_turns(setup).setups[-1]).setups[-1].resolved()).limits:
        return least_room(whole)
    return room(whole)
