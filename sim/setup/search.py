"""Branch and bound over configurations of a training step, in as many processes as are wanted.

    families ── options, one after the other ── configurations ── simulation ── memory of all ranks

A branch, a schedule with its degrees and its first options, is as slow at least as the configuration in it that
recomputes and copies least, and holds as much at least as the one that holds least (``bounds``, from one rank's
program). What is looked at first is only a guess: the bound, and what links add where nothing hides them, or added in
the same family. The search ends where no bound is below the last of the best, or with its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from sim.engine.interval import Interval, interval
from sim.engine.room import Limit, Room, room_of
from sim.engine.sensitivity import bound
from sim.engine.simulate import Simulation, simulate
from sim.errors import InputError
from sim.garbage import garbage_collection_off
from sim.memory import walks
from sim.schedule.derive.replicas import folds
from sim.schedule.proof.check import Checked
from sim.setup.bounds import Least, least_room, least_seconds
from sim.setup.room import room
from sim.setup.setup import Setup
from sim.setup.space import Branch, Family
from sim.setup.workers import Workers

PLAYED = (3, 4)
"""Layers that are played of a step that has more: every further one takes what the last of these adds. A step of 16
layers, played in full, takes the same within 1e-5 (``tests/sim/test_plan.py``)."""

WALKED = (5, 6)
"""Layers whose memory is walked of a branch that has more: each further one takes what the last of these adds. What
offloading has under way no longer grows by then; where another op than in few layers holds most, it is a little more.
"""
SURE = 0.9
"""Which share of what ``Branch.leanest`` holds every configuration of a branch holds: recomputing and tiles save much
and take a little for themselves, up to 5 % where there is little to save. ``tests/sim/test_plan.py`` holds them to it.
"""

Progress = Callable[[int, int, float | None], object]
"""Told how many configurations are settled, of how many, and the seconds that are left at most, if there is a limit."""

NEAR = 1.02
"""How much slower by its bound what is looked at may be than the fastest, while nothing is known that fits."""


class Open(NamedTuple):
    """A branch that may have one of the best. Seconds are over replicas: what each of their batches takes."""

    branch: Branch
    least_s: float = 0.0
    """What none of its configurations is below."""
    exposed_s: float = 0.0
    """What links add where nothing hides them."""
    fastest: Least | None = None
    """Of ``branch.fastest``, where that is known and can be built."""
    leanest: Limit | None = None
    """Of the GPU's memory in ``branch.leanest``, likewise."""


class Lost(NamedTuple):
    """A branch that does not fit, or that builders refuse."""

    branch: Branch
    missing_bytes: int = 0
    memory: str = ""
    refused: str = ""


class Played(NamedTuple):
    """A configuration with what its step takes."""

    branch: Branch
    step_s: float
    within: Interval | None
    bound_by: str
    room: Room | None
    """None where it was too slow to ask."""

    @property
    def batch_s(self) -> float:
        """Seconds over replicas."""
        return self.step_s / self.branch.family.setup.dp_degree


def step_of(setup: Setup) -> tuple[float, Simulation]:
    """Return the seconds of a training step without noise, and its simulation: of more than ``PLAYED`` layers only so
    many are played, and the others taken to add as much as the last of these. The schedule is not proved.
    """
    layers = setup.resolved().workload.layers
    few, more = PLAYED
    if layers <= more:
        played = _simulation(setup)
        return played.trace.step_time_s, played
    before, played = _simulation(setup.replace(layers=few)), _simulation(setup.replace(layers=more))
    each_s = (played.trace.step_time_s - before.trace.step_time_s) / (more - few)
    return played.trace.step_time_s + each_s * (layers - more), played


@garbage_collection_off()
def _simulation(setup: Setup) -> Simulation:
    found = setup.resolved()
    schedule = found.built()
    return simulate(Checked(schedule, folds=folds(schedule)), found.cluster, found.profile, engine=found.engine)


def least_of(setup: Setup) -> Least:
    """Return the least seconds of a training step: of many layers as of ``PLAYED``."""
    layers = setup.resolved().workload.layers
    if layers <= PLAYED[-1]:
        return least_seconds(setup.resolved())
    first, last = (least_seconds(setup.replace(layers=number).resolved()) for number in PLAYED)
    return first.with_layers(last, layers - PLAYED[-1])


def least_limits(setup: Setup) -> list[Limit]:
    """Return what a training step takes of each memory: of many layers as of ``WALKED``."""
    layers = setup.resolved().workload.layers
    few, more = WALKED
    if layers <= more:
        return [*least_room(setup.resolved()).limits]
    before, last = (least_room(setup.replace(layers=number).resolved()).limits for number in WALKED)
    found = []
    for first, second in zip(before, last, strict=True):
        more_bytes = (second.held_bytes - first.held_bytes) * (layers - more) // (more - few)
        held, free = second.held_bytes + more_bytes, second.free_bytes - more_bytes
        found.append(msgspec.structs.replace(second, held_bytes=held, free_bytes=free))
    return found


def opened(branch: Branch, above: Open | None = None) -> Open | Lost:
    """Return a branch with its bounds, of which some may be those of the branch that it is a part of. A configuration
    that is refused says nothing of the others of its branch.
    """
    leanest, fastest, refused = None, None, ""
    if above and branch.leanest.chosen == above.branch.leanest.chosen:
        leanest = above.leanest
    if above and branch.fastest.chosen == above.branch.fastest.chosen:
        fastest = above.fastest
    try:
        if branch.is_leaf:
            limits = [*least_room(branch.setup.resolved()).limits]
        else:
            leanest = leanest or least_limits(branch.leanest.setup)[0]
            sure = int((1 - SURE) * leanest.held_bytes)
            limits = [msgspec.structs.replace(leanest, free_bytes=leanest.free_bytes + sure)]
            limits += least_limits(branch.fastest.setup)[1:] if "host" in branch.chosen else []
        for limit in limits:
            if limit.free_bytes < 0:
                return Lost(branch, -limit.free_bytes, limit.memory)
    except InputError as error:
        refused = str(error)
    try:
        fastest = fastest or least_of(branch.fastest.setup)
    except InputError as error:
        refused = str(error)
    if branch.is_leaf and refused:
        return Lost(branch, refused=refused)
    dp, least_s = branch.family.setup.dp_degree, above.least_s if above else 0.0
    if fastest is None:
        return Open(branch, least_s, above.exposed_s if above else 0.0, None, leanest)
    own_s = fastest.step_s if branch.is_leaf else fastest.branch_s
    return Open(branch, max(least_s, own_s / dp), fastest.links_s / dp, fastest, leanest)


def parts(found: Open) -> list[Open | Lost]:
    """Return what a branch consists of."""
    return [opened(part, found) for part in found.branch.parts]


def played(branch: Branch, beaten_at: float) -> Played | Lost:
    """Return what the step of a configuration takes; its memory is asked for only where it is faster than
    ``beaten_at``, in seconds over replicas.
    """
    try:
        step_s, last = step_of(branch.setup)
        found = interval(last)
        longer = step_s / last.trace.step_time_s
        within = found and Interval(found.low_s * longer, found.high_s * longer)
        result = Played(branch, step_s, within, bound(last).by, None)
        if result.batch_s >= beaten_at:
            return result
        held = _room(branch.setup, last)
    except InputError as error:
        return Lost(branch, refused=str(error))
    if held.free_bytes < 0:
        return Lost(branch, -held.free_bytes, held.tightest.memory)
    return result._replace(room=held)


def _room(setup: Setup, last: Simulation) -> Room:
    """Return the memory of a configuration, of which so many layers were played. Where no rank then holds more than the
    one that ``least_room`` builds, that one is all that has to be built of the whole.
    """
    few = room_of(last.checked.schedule.header, walks(last.fold.checked), last.fold.cluster)
    workload = last.checked.schedule.header.workload
    if workload.layers == setup.resolved().workload.layers:
        return few
    if few.limits == least_room(setup.replace(layers=workload.layers).resolved()).limits:
        return least_room(setup.resolved())
    return room(setup.resolved())


class Search:
    """What is known of all configurations."""

    def __init__(self, families: list[Family], most: int, limit_s: float | None, progress: Progress | None) -> None:
        self.families, self._most, self._progress = families, most, progress
        self._ends = None if limit_s is None else time.monotonic() + limit_s
        self.count = sum(family.num_leaves for family in families)
        self.open: list[Open] = [Open(Branch(family)) for family in families]
        self._unasked = {id(found) for found in self.open}
        """Branches without bounds."""
        self.best: list[Played] = []
        """Those that fit, the fastest first."""
        self.played: list[Played] = []
        self.lost: list[Lost] = []
        self._added_s: dict[str, float] = {}
        """Per family what a configuration took at least beyond its bound."""
        self._turn = 0

    @property
    def beaten_at(self) -> float:
        """Seconds at which a configuration is not among the best."""
        return self.best[self._most - 1].batch_s if len(self.best) >= self._most else float("inf")

    @property
    def least_s(self) -> float:
        """Seconds that nothing is below that was not simulated: infinite where nothing is left."""
        return min((found.least_s for found in self.open), default=float("inf"))

    def run(self, jobs: int) -> None:
        """Search until no bound is below the last of the best, or the time is over."""
        running: dict[int, Open] = {}
        with Workers(jobs) as workers:
            while True:
                while workers.idle and (found := self._pick(running)):
                    if id(found) in self._unasked:
                        number = workers.submit(opened, found.branch)
                    elif found.branch.is_leaf:
                        number = workers.submit(played, found.branch, self.beaten_at)
                    else:
                        number = workers.submit(parts, found)
                    running[number] = found
                if not running:
                    return
                done = workers.wait(None if self._ends is None else self._ends - time.monotonic())
                if done is None:
                    return
                number, result = done
                self._take(running.pop(number), result)
                self._tell()
                if self._ends is not None and time.monotonic() > self._ends:
                    return

    def _take(self, asked: Open, result: Open | Lost | Played | list[Open | Lost]) -> None:
        self.open = [found for found in self.open if found is not asked]
        self._unasked.discard(id(asked))
        for one in result if isinstance(result, list) else [result]:
            if isinstance(one, Open):
                self.open.append(one)
            elif isinstance(one, Lost):
                self.lost.append(one)
            else:
                self.played.append(one)
                name, added_s = asked.branch.family.named, one.batch_s - asked.least_s
                self._added_s[name] = min(added_s, self._added_s.get(name, added_s))
                if one.room is not None:
                    self.best = sorted([*self.best, one], key=lambda found: found.batch_s)

    def _pick(self, running: dict[int, Open]) -> Open | None:
        """Return what to look at next: all branches without bounds; then what may be the fastest, of those within
        ``NEAR`` of each other the smallest, so that something is known soon that fits, and last those whose memory may
        just not do; then in turn a configuration and a branch.
        """
        taken = {id(found) for found in running.values()}
        waiting = [found for found in self.open if id(found) not in taken and found.least_s < self.beaten_at]
        if unasked := [found for found in waiting if id(found) in self._unasked]:
            return unasked[0]
        self._turn += 1
        if self.best:
            kind = [found for found in waiting if found.branch.is_leaf == bool(self._turn % 2)]
            return min(kind or waiting, key=self._guessed_s, default=None)
        waiting = [found for found in waiting if not found.leanest or found.leanest.free_bytes >= 0] or waiting
        nearest_s = NEAR * min(map(self._guessed_s, waiting), default=0.0)
        near = [found for found in waiting if self._guessed_s(found) <= nearest_s]
        return max(near, key=lambda found: len(found.branch.chosen), default=None)

    def _guessed_s(self, found: Open) -> float:
        """Return what a branch may take: its bound, and what links added in its family, or may add."""
        return found.least_s + self._added_s.get(found.branch.family.named, found.exposed_s)

    def _tell(self) -> None:
        if self._progress is not None:
            left = None if self._ends is None else max(0.0, self._ends - time.monotonic())
            settled = len(self.played) + sum(found.branch.num_leaves for found in self.lost)
            self._progress(settled, self.count, left)
