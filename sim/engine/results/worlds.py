"""One play that carries other machines along: what a step takes on them, without playing it again.

``player.c`` keeps for each of these worlds the time of every event beside its own. A world has the events of the play
in its order. What waits for several things goes on with the last of them in each world, so a critical path that changes
is followed. Costs come from the cost model of each machine, so their differences are those that a what-if would have.
What is not followed: a flow is slowed by the resource that slows it in the play, and SMs go to who got them there.
Where a world would have given them to another first, it says so.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from sim.engine.costs.cost import CostModel
from sim.engine.costs.phases import Activity, Flow
from sim.engine.play import native
from sim.engine.play.facts import Array
from sim.engine.play.lowered import Lowered, lowered
from sim.engine.play.simulate import Simulation
from sim.engine.results.figures import HOST_CALLS, LAUNCHES, Figure, scaled, with_calls
from sim.native.library import load
from sim.words.profile import Profile
from topology.cluster import Cluster
from topology.specs import ClusterSpec

MOST, FEW = 24, 8
"""Worlds that one play carries, and of a schedule of many ops, each of which takes 32 bytes for every world."""
SIZES = (FEW, 12, MOST)
"""How many the player is compiled for; fewer take as long as the next of these. What bounds a step on several nodes
takes 12."""
_MANY = 2**19


class Change(NamedTuple):
    """What is different in a world."""

    figures: tuple[Figure, ...]
    times: float
    """How many times as good they are: higher rates, shorter times."""

    def of(self, spec: ClusterSpec) -> ClusterSpec:
        """Return the cluster of the world."""
        for figure in self.figures:
            spec = scaled(spec, figure, figure.factor(self.times))
        return spec

    def of_host(self, profile: Profile | None) -> Profile | None:
        """Return the profile of the world, which has the host's calls."""
        return with_calls(profile, HOST_CALLS.factor(self.times)) if HOST_CALLS in self.figures else profile


class World(NamedTuple):
    """What becomes of the step there."""

    step_time_s: float
    turned: bool
    """Whether SMs would have gone to others first, so that the play would have been another one."""


def worlds(simulation: Simulation, changes: Sequence[Change]) -> list[World]:
    """Return what becomes of the step that was played, with the same noise, under each change: by one play for all, or
    for every 24 of them, of more than half a million ops every 8. Raises UnavailableError where there is no C compiler.
    """
    folded = simulation.fold
    arrays, stretch = lowered(folded.checked), simulation.noise.stretch(folded, simulation.cost)
    most = MOST if arrays.num_ops <= _MANY else FEW
    found: list[World] = []
    for at in range(0, len(changes), most):
        some = changes[at : at + most]
        size = min(size for size in SIZES if size >= len(some))
        player = library(size)
        costs = _Costs(folded.cluster, simulation.profile, simulation.cost, some)
        priced = _Priced(arrays, folded.cluster, costs, size)
        ends = np.zeros((2, size))
        times, _ = native.run(player, arrays, priced, stretch, ends)
        assert times.ended.max(initial=0.0) == simulation.trace.step_time_s
        found += [World(step_s, bool(turned)) for step_s, turned in ends[:, : len(some)].T.tolist()]
    return found


def library(most: int) -> ctypes.CDLL:
    """Return the player, compiled to carry so many worlds; raises UnavailableError where there is no C compiler."""
    return load("player", None, f"-DWORLDS={most}")


class _Costs:
    """Cost models side by side: that of the play, then those of the worlds where they differ from it."""

    def __init__(self, cluster: Cluster, profile: Profile | None, base: CostModel, changes: Sequence[Change]) -> None:
        self._changes, self._base = changes, base
        self.clusters = [cluster.like(change.of(cluster.spec)) for change in changes]
        self._worlds = [CostModel(one, profile) for one in self.clusters]
        self._twice = CostModel(cluster.like(scaled(cluster.spec, LAUNCHES, 2.0)), profile)

    def kernel_anywhere(self, rank: int, use: Any) -> tuple[Activity, ...]:
        return self._each("kernels", "kernel_anywhere", rank, use)

    def on_host(self, *what: Any) -> tuple[Activity, ...]:
        return self._each("moves", "on_host", *what)

    def transfer(self, *what: Any) -> tuple[Activity, ...]:
        return self._each("moves", "transfer", *what)

    def copied(self, *what: Any) -> tuple[Activity, ...]:
        return self._each("moves", "copied", *what)

    def collective(self, *what: Any) -> tuple[Activity, ...]:
        return self._each("moves", "collective", *what)

    def held_by_messages(self, *what: Any) -> float:
        return self._base.held_by_messages(*what)

    def held_by_collective(self, *what: Any) -> float:
        return self._base.held_by_collective(*what)

    def threads(self, *what: Any) -> float:
        return self._base.threads(*what)

    @property
    def handoff(self) -> tuple[Activity, ...]:
        return (self._base.handoff, *(one.handoff for one in self._worlds))

    @property
    def one_queue(self) -> bool:
        return self._base.one_queue

    def issue_s(self, *what: Any) -> float:
        return self._base.issue_s(*what)

    def issues_s(self, *what: Any) -> list[float]:
        """Return what issuing an op takes in each world; launches are in proportion to a figure, calls are the rest."""
        base_s = self._base.issue_s(*what)
        launches_s = self._twice.issue_s(*what) - base_s
        of = {LAUNCHES: launches_s, HOST_CALLS: base_s - launches_s}
        return [
            base_s + math.fsum((figure.factor(times) - 1) * of.get(figure, 0.0) for figure in figures)
            for figures, times in self._changes
        ]

    def _each(self, where: str, name: str, *what: Any) -> tuple[Activity, ...]:
        """Return an activity of the play and of every world; the same one where no figure that changes is in it."""
        base = getattr(self._base, name)(*what)
        return base, *(
            getattr(world, name)(*what) if any(getattr(figure, where) for figure in change.figures) else base
            for change, world in zip(self._changes, self._worlds, strict=True)
        )


class _Activities(native.Activities):
    """Distinct activities by what they are in all worlds."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[list[float]] = []
        self.amounts: list[list[float]] = []

    def add(self, activity: Any) -> int:
        base, *others = activity
        known = len(self._numbers)
        number = self._numbered(activity, base)
        if number == known:
            for at, phase in enumerate(base):
                same = [one[at] if _alike(one, base) else phase for one in others]
                self.seconds.append([one.seconds for one in same])
                if isinstance(phase, Flow):
                    each = [dict(one.demands) for one in same]
                    self.amounts += [[one.get(link, amount) for one in each] for link, amount in phase.demands]
        return number


def _alike(one: Activity, other: Activity) -> bool:
    """Return whether two activities have phases of the same kinds."""
    return list(map(type, one)) == list(map(type, other))


class _Priced(native.Priced):
    """What a machine, and those of the worlds, make of a lowered schedule."""

    def __init__(self, arrays: Lowered, cluster: Cluster, costs: _Costs, most: int) -> None:
        activities = _Activities()
        super().__init__(arrays, cluster, cast("CostModel", costs), activities)
        capacities = [world.resources.capacities() for world in costs.clusters]
        issues = [costs.issues_s(*one) for one in arrays.issues.found]
        self.arrays |= {
            "world_seconds": _padded(activities.seconds, most),
            "world_amounts": _padded(activities.amounts, most),
            "world_capacities": _padded(list(zip(*capacities, strict=True)), most),
            "world_issues": _padded(issues, most),
        }
        self.point()


def _padded(rows: Sequence[Sequence[float]], most: int) -> Array:
    """Return a row for each thing, with as many columns as a play has worlds; those that nobody asked for are like the
    last one.
    """
    found = np.ones((max(len(rows), 1), most))
    if rows:
        given = np.array(rows, float)
        found[:, : given.shape[1]] = given
        found[:, given.shape[1] :] = given[:, -1:]
    return found
