"""What a planner returns: a plan, and how it came about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from sim.base.errors import InputError
from sim.base.garbage import garbage_collection_off
from sim.schedule.ir.plan import Plan

Transport = Literal["blocks", "all-gather", "ring"]
"""How keys and values travel: only the blocks that tasks need; all of them to every rank at once; all of them, one
rank's share a step."""


class Planned(NamedTuple):
    """A plan with its planner's name."""

    planner: str
    plan: Plan
    transport: Transport
    planning_s: float
    """Wall-clock time of planning, on this machine."""


def timed(planner: str, transport: Transport, decide: Callable[[], Plan]) -> Planned:
    """Return what ``decide`` plans, with the time that it took."""
    begin = time.perf_counter()
    with garbage_collection_off():
        plan = decide()
    return Planned(planner, plan, transport, time.perf_counter() - begin)


def require_ranks(num_ranks: int) -> None:
    """Raise InputError unless there is a rank."""
    if num_ranks < 1:
        raise InputError(f"`num_ranks` {num_ranks}: expected a whole number of 1 or more")
