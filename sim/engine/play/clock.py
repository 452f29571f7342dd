"""Simulated time: SimPy's, with a short way for what happens at one moment.

An op that ends wakes at once what waits for it, so every third event would enter SimPy's queue of times only to leave
it at the time at which it came. These have a queue of their own, and are taken in the order in which SimPy would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import simpy

Then: TypeAlias = Callable[[], Any]
"""What follows when something has ended; what it returns does not matter."""


class Timer(simpy.Event):
    """An event that calls ``call`` with itself at a set time: of SimPy's Timeout what a simulation of ops needs."""

    _ok = True
    _value = None

    def __init__(self, call: Callable[[Any], None]) -> None:
        self.callbacks = [call]

    def cancel(self) -> None:
        """Let the time pass without a call."""
        self.callbacks.clear()


class Clock(simpy.Environment):
    """SimPy's environment, and the queue of what is to be done once all events of this moment have happened."""

    def __init__(self) -> None:
        super().__init__()
        self._soon: deque[Then] = deque()
        self.soon = self._soon.append

    def after(self, seconds: float, call: Then) -> None:
        """Call after a delay."""
        self.start(Timer(lambda _: call()), seconds)

    def start(self, timer: Timer, seconds: float) -> None:
        """Set a timer; a delay that is too short to move the time ends at this moment."""
        if self._now + seconds > self._now:
            self.schedule(timer, delay=seconds)
        else:
            self.soon(lambda: [call(timer) for call in timer.callbacks])

    def step(self) -> None:
        """Process the next event, or all that is to be done soon if none is left at this moment."""
        soon = self._soon
        if not soon or self.peek() <= self._now:
            super().step()
            return
        while soon:
            soon.popleft()()
