"""What is found of a branch of configurations: that it does not fit, its bounds, or what its step takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from sim.base.errors import InputError
from sim.engine.intervals.interval import Interval
from sim.engine.results.room import Limit, Room
from sim.plan.search.bounds import Least, least_of_any, least_room, least_seconds
from sim.plan.search.few import PLAYED, WALKED, Few, of_layers, of_turns
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
