"""Activities on shared resources: phases that queue, delay or flow; and holds, taken off the top.

A flow has a solo time and a demand on every resource that it uses, at relative speed x = 1. Where the demands on a
resource exceed what holds leave of it, speeds are cut by progressive filling (max-min fair in x): all rise together
until a resource is full, its users stop there, the others go on. An activity slows only when something that it uses is
full. Only what hangs together through overloaded resources is solved again, so an uncontended machine costs nothing.
A flow of late blocks (``Flow.late``) demands no more than is free when it starts, and ends later for what it lacks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

from sim.engine.costs.phases import Activity, Flow, Latency, Wait
from sim.engine.play.clock import Clock, Then, Timer
from topology.fabric.fabrics import Resource

_SLACK = 1.0 + 1e-9
"""Loads are sums of floats; a resource that is exactly full is not overloaded."""

_SAME = 1.0 + 1e-12
"""Levels within this of each other are equal, but for the order in which their loads were summed."""


class _Running:
    """A flow under way; ``then`` is called at its end, of which ``timer`` tells."""

    __slots__ = ("fills", "held_s", "last_s", "late", "left_s", "number", "speed", "then", "timer", "uses")

    def __init__(self, number: int, flow: Flow, then: Then, now: float) -> None:
        self.number = number
        self.uses = flow.demands
        self.fills = flow.fills
        self.late = flow.late
        self.held_s: float | None = None  # if less is free of what it fills: how long that had been held by then
        self.left_s = flow.seconds
        self.speed = 0.0
        self.last_s = now
        self.timer: _End | None = None
        self.then = then


class _End(Timer):
    """The timer of a flow's end."""

    def __init__(self, call: Callable[[Any], None], running: _Running) -> None:
        super().__init__(call)
        self.running = running


class Network:
    """The resources of a cluster and everything that runs on them."""

    def __init__(self, clock: Clock, resources: list[Resource]) -> None:
        self._clock = clock
        self._capacity = [resource.capacity for resource in resources]
        self._held = [0.0] * len(resources)
        self._holding_s = [0.0] * len(resources)
        self._since_s = [0.0] * len(resources)
        self._fillers = [0] * len(resources)
        self._limit = [resource.capacity * _SLACK for resource in resources]
        self._load = [0.0] * len(resources)
        self._users: list[dict[_Running, float]] = [{} for _ in resources]
        self._queues: dict[int, deque[tuple[float, Then]]] = {}
        self._dirty: dict[int, None] = {}
        self._created = 0

    def run(self, activity: Activity, then: Then, at: int = 0) -> None:
        """Begin an activity, at phase number ``at``; call ``then`` at its end."""
        if at == len(activity):
            then()
            return
        phase, following = activity[at], at + 1
        if isinstance(phase, Flow):
            self._start(phase, then if following == len(activity) else partial(self.run, activity, then, following))
            return
        delay_s = self._delay_s(phase)
        if delay_s > 0:
            self._clock.after(delay_s, partial(self.run, activity, then, following))
        else:
            self.run(activity, then, following)

    def _delay_s(self, phase: Latency | Wait) -> float:
        if isinstance(phase, Latency):
            return phase.seconds
        if isinstance(phase, Wait):
            rounds = self._load[phase.resource] * _SLACK // self._free(phase.resource)
            return rounds * phase.seconds
        assert_never(phase)

    def hold(self, resource: int, amount: float, turn: Then) -> bool:
        """Take an amount of a resource off the top, first come first served; something is always left for flows.

        Return whether it was there at once; if not, because of other holds or of a flow that fills the resource,
        ``turn`` is called when it is.
        """
        queue = self._queues.setdefault(resource, deque())
        if queue or not self._grants(resource, amount):
            queue.append((amount, turn))
            return False
        self._change_hold(resource, amount)
        return True

    def release(self, resource: int, amount: float) -> None:
        """Give back what was held."""
        self._change_hold(resource, -amount)
        self._serve(resource)

    def _grants(self, resource: int, amount: float) -> bool:
        return not self._fillers[resource] and self._held[resource] + amount < self._capacity[resource]

    def _serve(self, resource: int) -> None:
        """Give those that wait for a hold what there is."""
        queue = self._queues.get(resource)
        while queue and self._grants(resource, queue[0][0]):
            amount, turn = queue.popleft()
            self._change_hold(resource, amount)
            turn()

    def _free(self, resource: int) -> float:
        return self._capacity[resource] - self._held[resource]

    def _overloaded(self, resource: int) -> bool:
        return self._load[resource] > self._limit[resource]

    def _start(self, flow: Flow, then: Then) -> None:
        self._created += 1
        running = _Running(self._created, flow, then, self._clock.now)
        if flow.fills >= 0:
            self._fillers[flow.fills] += 1
        load, contended = self._load, []
        if flow.late:
            self._take_free(running)
        for resource, amount in running.uses:
            self._users[resource][running] = amount
            load[resource] += amount
            if load[resource] > self._limit[resource]:
                contended.append(resource)
        if contended:
            self._adjust(running, contended)
        else:
            self._set_speed(running, 1.0)

    def _take_free(self, running: _Running) -> None:
        """Let a flow demand no more of what it fills than is free, and note what it lacks."""
        filled, free = running.fills, self._free(running.fills)
        amount = dict(running.uses)[filled]
        if amount > free:
            running.held_s = self._held_for(filled)
            running.late = min(running.late * (amount - free), 1.0)
            running.uses = tuple((one, free if one == filled else given) for one, given in running.uses)

    def _held_for(self, resource: int) -> float:
        """Return for how long something of a resource has been held up to now."""
        lasts = self._clock.now - self._since_s[resource] if self._held[resource] > 0 else 0.0
        return self._holding_s[resource] + lasts

    def _finish(self, timer: _End) -> None:
        running, load = timer.running, self._load
        running.timer = None
        for resource, amount in running.uses:
            users = self._users[resource]
            if len(users) == 1:
                users.clear()
                load[resource] = 0.0
                continue
            if load[resource] > self._limit[resource]:
                self._settle_soon(resource)
            del users[running]
            load[resource] -= amount
        if running.fills >= 0:
            self._fillers[running.fills] -= 1
            self._serve(running.fills)
        if running.held_s is not None:
            self._clock.after((self._held_for(running.fills) - running.held_s) * running.late, running.then)
        else:
            running.then()

    def _change_hold(self, resource: int, amount: float) -> None:
        before = self._overloaded(resource)
        self._holding_s[resource] = self._held_for(resource)
        self._since_s[resource] = self._clock.now
        self._held[resource] += amount
        self._limit[resource] = self._free(resource) * _SLACK
        if before or self._overloaded(resource):
            users = self._users[resource]
            if len(users) == 1:
                (running,) = users
                self._adjust(running, [r for r, _ in running.uses if self._load[r] > self._limit[r]])
            else:
                self._settle_soon(resource)

    def _adjust(self, running: _Running, contended: list[int]) -> None:
        """Set the speed of one flow at once if nothing shares what it finds full, else leave it to the settling."""
        speed = 1.0
        for resource in contended:
            users = self._users[resource]
            if len(users) > 1:
                break
            speed = min(speed, self._free(resource) / users[running])
        else:
            self._set_speed(running, speed)
            return
        for resource in contended:
            self._settle_soon(resource)

    def _set_speed(self, running: _Running, speed: float) -> None:
        """Change the speed of a flow and the time at which it will end."""
        now = self._clock.now
        running.left_s -= (now - running.last_s) * running.speed
        running.last_s = now
        running.speed = speed
        if running.timer is not None:
            running.timer.cancel()
            running.timer = None
        if speed > 0:
            running.timer = timer = _End(self._finish, running)
            self._clock.start(timer, max(running.left_s, 0.0) / speed)

    def _settle_soon(self, resource: int) -> None:
        """Solve again once everything that happens at this moment has happened."""
        if not self._dirty:
            self._clock.soon(self._settle)
        self._dirty[resource] = None

    def _settle(self) -> None:
        flows, full = self._component()
        for running, speed in self._filled(flows, full).items():
            if speed != running.speed:
                self._set_speed(running, speed)

    def _component(self) -> tuple[list[_Running], list[int]]:
        """Return the flows on changed resources and all that hangs together with them through overloaded ones."""
        reached, self._dirty = self._dirty, {}
        stack = list(reached)
        flows: dict[_Running, None] = {}
        while stack:
            for running in self._users[stack.pop()]:
                if running in flows:
                    continue
                flows[running] = None
                for resource, _ in running.uses:
                    if resource not in reached and self._overloaded(resource):
                        reached[resource] = None
                        stack.append(resource)
        ordered = sorted(flows, key=lambda running: running.number)
        return ordered, sorted(resource for resource in reached if self._overloaded(resource))

    def _filled(self, flows: list[_Running], full: list[int]) -> dict[_Running, float]:
        """Return the max-min fair relative speeds.

        All that fill up first fill up together, so a round costs what its flows use, however many resources are equal.
        """
        speeds = dict.fromkeys(flows, 1.0)
        rising = {resource: len(self._users[resource]) for resource in full}
        left = {resource: self._free(resource) for resource in full}
        asked = {resource: self._load[resource] for resource in full}
        settled: set[_Running] = set()
        while rising:
            levels = {r: max(left[r], 0.0) / asked[r] for r in rising if asked[r] > 0.0}
            level = min(levels.values(), default=1.0)
            if level >= 1.0:
                break
            for tight in [r for r, reached in levels.items() if reached <= level * _SAME]:
                if not rising.pop(tight, 0):
                    continue
                for running in self._users[tight]:
                    if running in settled:
                        continue
                    settled.add(running)
                    speeds[running] = level
                    for resource, amount in running.uses:
                        if resource in rising:
                            left[resource] -= amount * level
                            asked[resource] -= amount
                            rising[resource] -= 1
            rising = {resource: users for resource, users in rising.items() if users}
        return speeds
