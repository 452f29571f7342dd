"""What is found of a branch of configurations: that it does not fit, its bounds, or what its step takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from sim.accounts.memory import walks
from sim.base.errors import InputError
from sim.base.garbage import garbage_collection_off
from sim.engine.intervals.extrapolated import decisive
from sim.engine.intervals.interval import Interval
from sim.engine.play.simulate import Simulation, simulate
from sim.engine.results.report import evidence
from sim.engine.results.room import Limit, Room, room_of
from sim.engine.results.sensitivity import bound
from sim.plan.search.bounds import Least, least_of_any, least_room, least_seconds
from sim.plan.search.room import room
from sim.plan.search.space import Branch
from sim.schedule.derive.replicas import folds
from sim.schedule.proof.check import Checked
from sim.setup.answers.answer import Grounds, grounds_of
from sim.setup.setup import Setup
from sim.setup.unnamed_software import slowest, widened

PLAYED = (3, 4)
"""Layers that are played of a step that has more: every further one takes what the last of these adds. A step of 16
layers, played in full, takes the same within 1e-5 (``tests/plan/test_plan.py``)."""

WALKED = (5, 6)
"""Layers whose memory is walked of a branch that has more: each further one takes what the last of these adds. What
offloading has under way no longer grows by then; where another op than in few layers holds most, it is a little more.
"""
TURNS = (2, 3)
"""Micro-batches that are played of a step that has more, and whose memory is walked: each further one takes and holds
what the last of these adds (``tests/plan/test_plan.py``). The first is another: nothing was added up before it.
"""
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
    ``TURNS`` micro-batches only these are played, and the others taken to add as much as the last of these. The
    schedule is not proved.
    """
    step_s, last, _ = _steps_of(setup, layers)
    return step_s, last


def _steps_of(setup: Setup, few: tuple[int, int] = PLAYED) -> tuple[float, Simulation, Simulation | None]:
    """Return the same with the simulation of fewer layers; None where all are played."""
    setups, further = _turns(setup)
    *before, (last_s, played, fewer) = [_steps_of_layers(one, few) for one in setups]
    return last_s + sum(further * (last_s - first_s) for first_s, *_ in before), played, fewer


def _steps_of_layers(setup: Setup, some: tuple[int, int]) -> tuple[float, Simulation, Simulation | None]:
    layers = setup.resolved().workload.layers
    few, more = some
    if layers <= more:
        played = _simulation(setup)
        return played.trace.step_time_s, played, None
    before, played = _simulation(setup.replace(layers=few)), _simulation(setup.replace(layers=more))
    each_s = (played.trace.step_time_s - before.trace.step_time_s) / (more - few)
    return played.trace.step_time_s + each_s * (layers - more), played, before


def _turns(setup: Setup) -> tuple[list[Setup], int]:
    """Return a setup, or it with as many micro-batches as ``TURNS`` each where it has more, and how many more."""
    found = setup.resolved()
    turns = getattr(found.options, "micro_batches", 1)
    if turns <= TURNS[-1] or found.workload.batch % turns:
        return [setup], 0
    spelled, each = setup.spelled_out(), found.workload.batch // turns
    fewer = [spelled.replace(batch=each * few, set={"schedule.micro_batches": few}) for few in TURNS]
    return fewer, turns - TURNS[-1]


@garbage_collection_off()
def _simulation(setup: Setup) -> Simulation:
    found = setup.resolved()
    schedule = found.built()
    return simulate(Checked(schedule, folds=folds(schedule)), found.cluster, found.profile, engine=found.engine)


def least_of(setup: Setup) -> Least:
    """Return the least seconds of a training step: of many layers as of ``PLAYED``, of many micro-batches as of
    ``TURNS``.
    """
    setups, further = _turns(setup)
    *before, last = [_least_of_layers(one) for one in setups]
    return before[0].with_more(last, further) if before else last


def _least_of_layers(setup: Setup) -> Least:
    layers = setup.resolved().workload.layers
    if layers <= PLAYED[-1]:
        return least_seconds(setup.resolved())
    first, last = (least_seconds(setup.replace(layers=number).resolved()) for number in PLAYED)
    return first.with_more(last, layers - PLAYED[-1])


def least_limits(setup: Setup) -> list[Limit]:
    """Return what a training step takes of each memory: of many layers as of ``WALKED``, of many micro-batches as of
    ``TURNS``.
    """
    setups, further = _turns(setup)
    return _with_more([_limits_of_layers(one) for one in setups], further)


def _limits_of_layers(setup: Setup) -> list[Limit]:
    layers = setup.resolved().workload.layers
    if layers <= WALKED[-1]:
        return [*least_room(setup.resolved()).limits]
    walked = [least_room(setup.replace(layers=number).resolved()).limits for number in WALKED]
    return _with_more(walked, layers - WALKED[-1])


def _limits(setup: Setup) -> list[Limit]:
    """Return what a training step takes of each memory: of all its layers, of many micro-batches as of ``TURNS``."""
    setups, further = _turns(setup)
    return _with_more([least_room(one.resolved()).limits for one in setups], further)


def _with_more(found: Sequence[Sequence[Limit]], further: int) -> list[Limit]:
    """Return limits where so many more are to come, each of which adds what the last of those that are found does."""
    *before, last = found
    if not before:
        return [*last]
    more = []
    for first, second in zip(before[0], last, strict=True):
        bytes_more = (second.held_bytes - first.held_bytes) * further
        held, free = second.held_bytes + bytes_more, second.free_bytes - bytes_more
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
        step_s, last, before = _steps_of(branch.setup)
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
    bounded = bound(last)
    more = branch.setup.resolved().workload.layers - last.checked.schedule.header.workload.layers
    grounds = grounds_of(
        last, evidence(last, []), decisive(last, before, more), other and other._replace(seconds=other.seconds * longer)
    )
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
    played = _turns(setup)[0][-1].replace(layers=workload.layers)
    if few.limits == least_room(played.resolved()).limits:
        return least_room(whole)
    return room(whole)
