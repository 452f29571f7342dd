"""Branches of configurations, with what is known of them: their bounds, what their step takes, or why they are lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from sim.base.errors import InputError
from sim.engine.intervals.interval import Interval
from sim.engine.results.room import Limit, Room
from sim.plan.search.bounds import Least, least_of_any, least_room, least_seconds, room_by_few
from sim.plan.search.few import PLAYED, WALKED, Few, holds_as_much, of_layers, of_turns
from sim.plan.search.passes import least_steps
from sim.plan.search.space import Branch
from sim.plan.search.steps import room_of_step, steps_of
from sim.setup.answers.answer import Grounds
from sim.setup.setup import Setup

Found = TypeVar("Found")

SURE = 0.9
"""Which share of what ``Branch.leanest`` holds every configuration of a branch holds: recomputing and tiles save much
and take a little for themselves, up to 5 % where there is little to save. ``tests/plan/test_plan.py`` holds them to it.
"""


class Open(NamedTuple):
    """A branch that may hold one of the best. Seconds are divided by what a step of its family is worth."""

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
        """Seconds of a step over what it is worth; the least is the best."""
        return self.step_s / self.branch.family.worth

    @property
    def reaches(self) -> bool:
        """Whether its step takes no longer than it may."""
        return self.step_s <= self.branch.family.within_s


def least_of(setup: Setup) -> Least:
    """Return lower bounds of the seconds of a training step. Those of many layers and micro-batches follow from those
    of few; a pipeline's have its bubbles.
    """
    found = least_of_rank(setup)
    if setup.resolved().mesh.pp == 1:
        return found
    steps = least_steps(setup)
    return found._replace(kernels_s=steps.passes_s, states_s=steps.all_s - steps.passes_s)


def least_of_rank(setup: Setup) -> Least:
    """Return the same of one rank alone, in a pipeline of the last stage, which waits for no other."""
    few = of_turns(setup, steady=False)
    return _told(few, lambda one: _told(of_layers(one, PLAYED), _least, Least.with_layers), Least.with_more)


def _least(setup: Setup) -> Least:
    return least_seconds(setup.resolved())


def least_limits(setup: Setup) -> list[Limit]:
    """Return the least that a training step takes of each memory, by few of its layers and micro-batches."""
    return _told(of_layers(setup, WALKED), _limits, _with_more)


def _limits(setup: Setup) -> list[Limit]:
    """Return the least that a training step takes of each memory, by all of its layers and few of its micro-batches."""
    few = of_turns(setup)
    if holds_as_much(setup, few):
        return [*room_by_few(setup.resolved(), few).limits]
    return _told(few, _room_limits, _with_more)


def _room_limits(setup: Setup) -> list[Limit]:
    return [*least_room(setup.resolved()).limits]


def _told(few: Few, found_of: Callable[[Setup], Found], with_more: Callable[[Found, Found, Few], Found]) -> Found:
    """Return what is found of a setup, by what is found of those with few layers or micro-batches."""
    *before, last = map(found_of, few.setups)
    return with_more(before[0], last, few) if before else last


def _with_more(first: Sequence[Limit], last: Sequence[Limit], few: Few) -> list[Limit]:
    """Return the limits with all layers or micro-batches, each of which adds as much as the last of the few."""
    more = []
    for one, second in zip(first, last, strict=True):
        held = math.ceil(few.told(one.held_bytes, second.held_bytes))
        free = second.free_bytes - (held - second.held_bytes)
        more.append(msgspec.structs.replace(second, held_bytes=held, free_bytes=free))
    return more


def opened(branch: Branch, above: Open | None = None) -> Open | Lost:
    """Return a branch with its bounds, or why it is lost. What the branch ``above`` knows of the same configurations is
    not computed again. Where builders refuse one configuration, they may still take others of its branch.
    """
    found, refused = _inherited(branch, above), ""
    try:
        if branch.is_leaf:
            limits = _limits(branch.setup)
            found = found._replace(leanest=limits[0])
        else:
            leanest = found.leanest or least_limits(branch.leanest.setup)[0]
            found = found._replace(leanest=leanest)
            if found.copied is None and {"host", "offload"} & {*branch.chosen}:
                found = found._replace(copied=tuple(least_limits(branch.fastest.setup)[1:]))
            limits = [_surely(leanest), *(found.copied or ())]
        if lost := _too_large(found, limits):
            return lost
    except InputError as error:
        refused = str(error)
    try:
        found = found._replace(fastest=found.fastest or least_of_any([least_of(one.setup) for one in branch.fast]))
    except InputError as error:
        refused = str(error)
    if branch.is_leaf and refused:
        return Lost(branch, refused=refused)
    return _timed(found)


def _inherited(branch: Branch, above: Open | None) -> Open:
    """Return a branch with those bounds of the one ``above`` that hold for it, too."""
    if above is None:
        return Open(branch)
    same_leanest = branch.leanest.chosen == above.branch.leanest.chosen
    same_fastest = branch.fastest.chosen == above.branch.fastest.chosen
    return Open(
        branch,
        above.least_s,
        above.exposed_s,
        fastest=above.fastest if same_fastest and len(branch.fast) == len(above.branch.fast) else None,
        leanest=above.leanest if same_leanest else None,
        copied=above.copied if same_fastest else None,
    )


def _surely(leanest: Limit) -> Limit:
    """Return a limit that every configuration of a branch keeps or exceeds, by that of its leanest one (``SURE``)."""
    spared = int((1 - SURE) * leanest.held_bytes)
    return msgspec.structs.replace(leanest, free_bytes=leanest.free_bytes + spared)


def _too_large(found: Open, limits: Sequence[Limit]) -> Lost | None:
    """Return a branch as lost if one of its limits is exceeded, with what its leanest configuration lacks itself."""
    over = next((limit for limit in limits if limit.free_bytes < 0), None)
    if over is None:
        return None
    said = found.leanest if found.leanest and over.memory == found.leanest.memory else over
    return Lost(found.branch, -said.free_bytes, over.memory)


def _timed(found: Open) -> Open | Lost:
    """Return a branch with its least time, or as lost where that is longer than a step may take."""
    branch, fastest = found.branch, found.fastest
    if fastest is None:
        return found
    own_s, worth = fastest.step_s if branch.is_leaf else fastest.branch_s, branch.family.worth
    least_s = max(found.least_s, own_s / worth)
    if own_s > branch.family.within_s:
        return Lost(branch, least_s=least_s)
    return found._replace(least_s=least_s, exposed_s=fastest.links_s / worth)


def parts(found: Open) -> list[Open | Lost]:
    """Return the parts of a branch, one for each value of its next option, with their bounds."""
    return [opened(part, found) for part in found.branch.parts]


def played(branch: Branch, beaten_at: float) -> Played | Lost:
    """Return a configuration with the time of its step. Its memory, interval and bound are computed only where it is no
    slower than ``beaten_at`` (seconds over worth) and than it may be; the last two only where it fits.
    """
    try:
        steps = steps_of(branch.setup)
        result = Played(branch, steps.step_s)
        if result.batch_s > beaten_at or not result.reaches:
            return result
        held = room_of_step(branch.setup, steps.last)
    except InputError as error:
        return Lost(branch, refused=str(error))
    if held.free_bytes < 0:
        return Lost(branch, -held.free_bytes, held.tightest.memory)
    bounded = steps.bound
    within, grounds = steps.rests
    return result._replace(room=held, within=within, bound_by=bounded.by, saves=bounded.saves, grounds=grounds)
